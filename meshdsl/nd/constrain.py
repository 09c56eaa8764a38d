"""``constrain``: a layout that the user states for a value inside a step.

    y = md.constrain(x @ w, "data=S(0) model=P")
    y = md.constrain(hidden, "data=S(batch)")               # a tensor with named dims

The planner gives ``y`` this layout; axes that are not named stay free. Everywhere else it is
the identity. It speaks of the value itself, never of its gradient: under autodiff the tangent
and the cotangent pass by unconstrained. Under ``vmap`` the dims it splits move past the mapped
one, and in the body of a loop it holds in every trip.

A sum over devices is reduced before it is cast to floats that do not hold it, as the step says.
That the result of such a cast is ``P`` asks for the other order, half of the bytes for bfloat16:

    sent = md.constrain(gradient.astype(jnp.bfloat16), "data=P")

It speaks of this cast on these axes; who reads the same cast without it reads what was reduced
before. The largest and smallest, ``P(max)`` and ``P(min)``, are the same in either order.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from meshdsl.errors import ArgumentError, LayoutError, faults, is_a, nearest
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Split
from meshdsl.nd.named_array import NamedArray
from meshdsl.primitives.constrain import bind_constrain
from meshdsl.util.paths import join_path

T = TypeVar("T")


def constrain(x: T, layout: Layout | str) -> T:
    """``x``, planned in ``layout``.

    Args:
      x: an array, or a pytree of arrays that all get this layout; those with named dims by name or number.
      layout: axes that it does not name are free; it may state ``P``.

    Raises:
      NotationError: text that is no layout.
      ArgumentError: leaves that are no arrays.
      LayoutError: the layout splits dims that an array does not have.
    """
    stated = Layout.of(layout)
    found, tree = jax.tree_util.tree_flatten_with_path(x, is_leaf=_is_named)
    alien = [f"{_label(keys)}: {is_a(leaf)}, not an array" for keys, leaf in found if not _is_array(leaf)]
    if alien:
        raise ArgumentError(faults("constrain takes arrays:", alien))
    rows = [row for keys, leaf in found for row in _faults(_label(keys), leaf, stated)]
    if rows:
        raise LayoutError(faults(f"constrain to {str(stated)!r} does not fit:", rows, "dims are counted from 0"))
    made: T = jax.tree_util.tree_unflatten(tree, [_constrained(leaf, stated) for _, leaf in found])
    return made


def _constrained(x: Any, layout: Layout) -> Any:
    if _is_named(x):
        return NamedArray(bind_constrain(x.array, layout.numbered(x.dims), x.dims), x.dims)
    return bind_constrain(x, layout)


def _is_named(x: Any) -> bool:
    return isinstance(x, NamedArray)


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, bool | int | float | complex)


def _label(keys: Sequence[Any]) -> str:
    return join_path(str(key).strip(".[]'\"") for key in keys) or "x"


def _faults(name: str, x: Any, layout: Layout) -> list[str]:
    dims = x.dims if _is_named(x) else ()
    shape = x.array.shape if dims else jax.numpy.shape(x)
    what = f"{name}[{x.shape}]" if dims else f"{name} of shape ({', '.join(map(str, shape))})"
    splits = [(axis, p) for axis, p in layout.numbered(dims).placements if isinstance(p, Split)]
    named = [f"{what}: {axis}={p} {_unknown(p, dims)}" for axis, p in splits if _is_name(p)]
    beyond = [(axis, p) for axis, p in splits if not _is_name(p) and not 0 <= int(p.dim) < len(shape)]
    numbers = f"its dims are 0 to {len(shape) - 1}" if shape else "it is a scalar and cannot be split"
    return named + [f"{what}: {axis}={p} is out of range; {numbers}" for axis, p in beyond]


def _unknown(placed: Split, dims: Sequence[str]) -> str:
    near = nearest(placed.dim, dims)
    return f"splits a dim that it does not have{near}" if dims else "names a dim, but the array has no named dims"


def _is_name(placed: Split) -> bool:
    return isinstance(placed.dim, str)
