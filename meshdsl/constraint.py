"""``constrain``: a layout that the user states for a value inside a step.

    y = md.constrain(x @ w, "data=S(0) model=P")

The planner gives ``y`` this layout; axes that are not named stay free. Everywhere else it is
the identity. It speaks of the value itself, never of its gradient: under autodiff the tangent
and the cotangent pass by unconstrained. Under ``vmap`` the dims it splits move past the mapped
one, and in the body of a loop it holds in every trip.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshdsl.errors import ArgumentError, LayoutError, faults, is_a
from meshdsl.globs import join_path
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Placement, Split

T = TypeVar("T")

constrain_p = Primitive("constrain")


def constrain(x: T, layout: Layout | str) -> T:
    """``x``, planned in ``layout``.

    Args:
      x: an array, or a pytree of arrays that all get this layout.
      layout: axes that it does not name are free; it may state ``P``.

    Raises:
      NotationError: text that is no layout.
      ArgumentError: leaves that are no arrays.
      LayoutError: the layout splits dims that an array does not have.
    """
    stated = Layout.of(layout)
    found, tree = jax.tree_util.tree_flatten_with_path(x)
    alien = [f"{_label(keys)}: {is_a(leaf)}, not an array" for keys, leaf in found if not _is_array(leaf)]
    if alien:
        raise ArgumentError(faults("constrain takes arrays:", alien))
    rows = [row for keys, leaf in found for row in _faults(_label(keys), jax.numpy.shape(leaf), stated)]
    if rows:
        raise LayoutError(faults(f"constrain to {str(stated)!r} does not fit:", rows, "dims are counted from 0"))
    made: T = jax.tree_util.tree_unflatten(tree, [constrain_p.bind(leaf, layout=stated) for _, leaf in found])
    return made


def _is_array(x: Any) -> bool:
    return (hasattr(x, "shape") and hasattr(x, "dtype")) or isinstance(x, bool | int | float | complex)


def _label(keys: Sequence[Any]) -> str:
    return join_path(str(key).strip(".[]'\"") for key in keys) or "x"


def _faults(name: str, shape: Sequence[int], layout: Layout) -> list[str]:
    what = f"{name} of shape ({', '.join(map(str, shape))})"
    splits = [(axis, p) for axis, p in layout.placements if isinstance(p, Split)]
    named = [f"{what}: {axis}={p} names a dim, but the array has no named dims" for axis, p in splits if _is_name(p)]
    beyond = [(axis, p) for axis, p in splits if not _is_name(p) and not 0 <= int(p.dim) < len(shape)]
    dims = f"its dims are 0 to {len(shape) - 1}" if shape else "it is a scalar and cannot be split"
    return named + [f"{what}: {axis}={p} is out of range; {dims}" for axis, p in beyond]


def _is_name(placed: Split) -> bool:
    return isinstance(placed.dim, str)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, layout: Layout) -> tuple[Any, Any]:
    return constrain_p.bind(primals[0], layout=layout), tangents[0]


def _transpose(cotangent: Any, x: Any, *, layout: Layout) -> list[Any]:
    return [cotangent]


def _batch(args: Sequence[Any], dims: Sequence[int], *, layout: Layout) -> tuple[Any, int]:
    moved = {axis: _past(p, dims[0]) for axis, p in layout.placements}
    return constrain_p.bind(args[0], layout=Layout(**moved)), dims[0]


def _past(placed: Placement, mapped: int) -> Placement:
    """The placement once a mapped dim has been inserted before position ``mapped``."""
    if isinstance(placed, Split) and isinstance(placed.dim, int) and placed.dim >= mapped:
        return Split(placed.dim + 1)
    return placed


constrain_p.def_impl(lambda x, *, layout: x)
constrain_p.def_abstract_eval(lambda x, *, layout: x)
mlir.register_lowering(constrain_p, lambda context, x, *, layout: [x])
ad.primitive_jvps[constrain_p] = _jvp
ad.primitive_transposes[constrain_p] = _transpose
batching.primitive_batchers[constrain_p] = _batch
