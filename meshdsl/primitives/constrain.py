"""The primitive behind ``md.constrain``: the identity, with a layout for the planner.

Under autodiff it constrains the primal only; under ``vmap`` the dims that it splits shift past the mapped one.
``names`` are the names of the value's dims if they are known, else empty.

``closed``, if given, are dims that only the layout's axes split, as a ``PartitionSpec`` says. What jax's own functions
state about shardings (``jax.lax.with_sharding_constraint``) is read as this primitive too, with one more parameter:
``by`` is the name of the function.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Placement, Split

Names = tuple[str, ...]
constrain_p = Primitive("constrain")


def bind_constrain(x: Any, layout: Layout, names: Names = (), closed: Sequence[int] = ()) -> Any:
    """Return ``x``, constrained to ``layout``, whose dims are numbers; ``names`` are their names.

    Args:
      closed: dims that only the layout's axes may split.
    """
    return constrain_p.bind(x, layout=layout, names=names, **({"closed": tuple(closed)} if closed else {}))


def stated_params(layout: Layout, by: str, closed: Sequence[int] = ()) -> dict[str, Any]:
    """Return the parameters of a constraint that a function of jax states."""
    return {"layout": layout, "names": (), "by": by, "closed": tuple(closed)}


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return constrain_p.bind(primals[0], **params), tangents[0]


def _transpose(cotangent: Any, x: Any, **params: Any) -> list[Any]:
    return [cotangent]


def _batch(args: Sequence[Any], mapped: Sequence[int], *, layout: Layout, names: Names, **stated: Any) -> Any:
    at = mapped[0]
    moved = Layout(**{axis: _past(p, at) for axis, p in layout.placements})
    named = (*names[:at], "", *names[at:]) if names else ()
    if "closed" in stated:
        stated["closed"] = tuple(dim + (dim >= at) for dim in stated["closed"])
    return constrain_p.bind(args[0], layout=moved, names=named, **stated), at


def _past(placed: Placement, mapped: int) -> Placement:
    """Return the placement after a mapped dim has been inserted at position ``mapped``."""
    if isinstance(placed, Split) and isinstance(placed.dim, int) and placed.dim >= mapped:
        return Split(placed.dim + 1)
    return placed


constrain_p.def_impl(lambda x, **params: x)
constrain_p.def_abstract_eval(lambda x, **params: x)
mlir.register_lowering(constrain_p, lambda context, x, **params: [x])
ad.primitive_jvps[constrain_p] = _jvp
ad.primitive_transposes[constrain_p] = _transpose
batching.primitive_batchers[constrain_p] = _batch
