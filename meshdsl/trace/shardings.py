"""Shardings of jax inside a step, as layouts.

    NamedSharding(mesh, P("data", None))                   data=S(0) model=B
    NamedSharding(mesh, P(("data", "model")))              data=S(0) model=S(0)
    NamedSharding(mesh, P("data", P.UNCONSTRAINED))        data=S(0), and no other axis splits dim 0
    NamedSharding(mesh, P(None, unreduced={"model"}))      model=P, the others B

Only names of axes count: the mesh of the sharding may have other sizes, other devices or none (``AbstractMesh``). An
axis that it lacks is free.
"""

from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.ir.graph import Op
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, P, Placement, S


def stated_layout(sharding: Any, rank: int) -> tuple[Layout, tuple[int, ...]] | None:
    """Returns the layout of a sharding for an array of this rank, and the dims that no other axis may split.

    None for a sharding without named axes, such as that of one device.
    """
    if not isinstance(sharding, NamedSharding):
        return None
    placed: dict[str, Placement] = {}
    closed = list(range(rank))
    for dim, entry in enumerate(sharding.spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            closed.remove(dim)
        else:
            axes = (entry,) if isinstance(entry, str) else entry or ()
            placed.update({axis: S(dim) for axis in axes})
    placed.update(dict.fromkeys(getattr(sharding.spec, "unreduced", ()), P))
    if len(closed) < rank:
        return Layout(**placed), tuple(closed)
    others = [axis for axis in sharding.mesh.axis_names if axis not in placed]
    return Layout(**placed, **dict.fromkeys(others, B)), ()


def is_stated(op: Op) -> bool:
    """Whether an operation states the sharding of its result, beside what it computes, with names of axes."""
    stated = (op.params.get(name) for name in ("sharding", "out_sharding"))
    return any(isinstance(sharding, NamedSharding) and any(sharding.spec) for sharding in stated)
