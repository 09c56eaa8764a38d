"""Shardings of jax inside a step, as layouts.

    NamedSharding(mesh, P("data", None))                   data=S(0) model=B
    NamedSharding(mesh, P(("data", "model")))              data=S(0) model=S(0)
    NamedSharding(mesh, P("data", P.UNCONSTRAINED))        data=S(0), and no other axis splits dim 0
    NamedSharding(mesh, P(None, unreduced={"model"}))      model=P, the others B

Only names of axes count: the mesh of the sharding may have other sizes, other devices or none (``AbstractMesh``). An
axis that it lacks is free. In the type of an array (``out_sharding=``, ``jax.sharding.reshard``), so is an Auto axis
that the spec does not name: what enters ``jax.sharding.auto_axes`` is resharded to ``P()`` over such axes.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.ir.graph import Op
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, P, Placement, S

_TYPES = ("sharding", "out_sharding")  # parameters that state the type of a result


def stated_layout(sharding: Any, rank: int, is_type: bool = False) -> tuple[Layout, tuple[int, ...]] | None:
    """Returns the layout of a sharding for an array of this rank, and the dims that no other axis may split.

    None for a sharding without named axes, such as that of one device.

    Args:
      is_type: the sharding is the type of the array, so that it says nothing of Auto axes.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    placed: dict[str, Placement] = {}
    closed = list(range(rank))
    for dim, entry in enumerate(sharding.spec.partitions):
        if entry is PartitionSpec.UNCONSTRAINED:
            closed.remove(dim)
        else:
            axes = (entry,) if isinstance(entry, str) else entry or ()
            placed.update({axis: S(dim) for axis in axes})
    placed.update(dict.fromkeys(getattr(sharding.spec, "unreduced", ()), P))
    if len(closed) < rank:
        return Layout(**placed), tuple(closed)
    types = zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True)
    free = [axis for axis, kind in types if is_type and kind is AxisType.Auto]
    others = [axis for axis in sharding.mesh.axis_names if axis not in placed and axis not in free]
    return Layout(**placed, **dict.fromkeys(others, B)), ()


def type_of_result(params: Mapping[str, Any]) -> Any:
    """Returns the sharding that an operation states for its result, beside what it computes; None if there is none."""
    return params.get("out_sharding", params.get("sharding"))


def is_stated(op: Op) -> bool:
    """Whether an operation states the sharding of its result, beside what it computes, over several devices."""
    sharding = type_of_result(op.params)
    return isinstance(sharding, NamedSharding) and sharding.mesh.size > 1


def without_empty_types(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation without types that say nothing, as jax adds under an ambient mesh."""
    return {name: None if name in _TYPES and _says_nothing(x) else x for name, x in params.items()}


def _says_nothing(sharding: Any) -> bool:
    found = stated_layout(sharding, len(getattr(sharding, "spec", ())), is_type=True)
    return found is not None and not found[0].placements
