"""``constrain``: a layout for a value inside a step.

    y = md.constrain(x @ w, "data=S(0) model=P")
    y = md.constrain(hidden, "data=S(batch)")               # a tensor with named dims

The planner gives ``y`` this layout; mesh axes that are not named stay free. Outside of ``parallelize`` it is the
identity. It constrains the value, never its gradient: under autodiff the tangent and the cotangent are unconstrained.
Under ``vmap`` the dims that it splits shift past the mapped one, and in the body of a loop it holds in every iteration.

A partial sum is reduced before it is cast to a narrower float, as the step is written. A constraint of the cast's
result to ``P`` reverses that order, which sends half of the bytes for bfloat16:

    sent = md.constrain(gradient.astype(jnp.bfloat16), "data=P")

It applies to this cast on these axes; other consumers of the same cast get the value that was reduced first. For
``P(max)`` and ``P(min)`` both orders give the same values.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.errors import ArgumentError, LayoutError, faults, is_a, nearest
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Split
from meshdsl.nd.named_array import NamedArray
from meshdsl.primitives.constrain import bind_constrain
from meshdsl.shardings import Stated, memory_of, stated_layout
from meshdsl.util.paths import join_path

T = TypeVar("T")


def constrain(x: T, layout: Stated) -> T:
    """Return ``x``, constrained to ``layout`` in the plan.

    Args:
      x: an array, or a pytree of arrays that all get this layout; dims of named tensors by name or number.
      layout: a layout or its text; mesh axes that it does not name are free. It may contain ``P`` (partial sums). It
        may be a ``PartitionSpec`` or ``NamedSharding``, as ``jax.lax.with_sharding_constraint`` takes them: dims that
        it does not leave ``UNCONSTRAINED`` are split by its axes alone.

    Returns:
      ``x``, unchanged in value.

    Raises:
      NotationError: the text is not a layout, or a spec names an axis twice.
      ArgumentError: some leaves are not arrays; all are listed.
      LayoutError: the layout splits dims that an array does not have.

    Example:
      >>> y = md.constrain(x @ w, "data=S(0) model=P")

    The counterpart in JAX is ``jax.lax.with_sharding_constraint``.
    """
    wanted = layout if isinstance(layout, NamedSharding | PartitionSpec) else Layout.of(layout)
    found, tree = jax.tree_util.tree_flatten_with_path(x, is_leaf=_is_named)
    alien = [f"{_label(keys)}: {is_a(leaf)}, not an array" for keys, leaf in found if not _is_array(leaf)]
    if alien:
        raise ArgumentError(faults("constrain takes arrays:", alien))
    rows = [row for keys, leaf in found for row in _faults(_label(keys), leaf, _stated(leaf, wanted)[0])]
    if rows:
        raise LayoutError(faults(f"constrain to {str(wanted)!r} does not fit:", rows, "dims are counted from 0"))
    made: T = jax.tree_util.tree_unflatten(tree, [_constrained(leaf, wanted) for _, leaf in found])
    return made


def _constrained(x: Any, wanted: Layout | NamedSharding | PartitionSpec) -> Any:
    layout, closed = _stated(x, wanted)
    if _is_named(x):
        return NamedArray(bind_constrain(x.array, layout.numbered(x.dims), x.dims, closed), x.dims)
    return bind_constrain(x, layout, closed=closed)


def _stated(x: Any, wanted: Layout | NamedSharding | PartitionSpec) -> tuple[Layout, tuple[int, ...]]:
    """Return the layout that is stated for an array, and the dims that only its axes may split."""
    if isinstance(wanted, Layout):
        return wanted, ()
    found = stated_layout(wanted, len(x.dims) if _is_named(x) else jax.numpy.ndim(x))
    assert found is not None, "its axes have names"
    layout, closed = found
    return layout.within(memory_of(wanted)), closed


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
