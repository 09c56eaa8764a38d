"""Moves as collectives: what one device runs when a value goes from one layout to another.

The table below is the executable half of the move table in the layout algebra. Every entry
works on the block that one device holds, inside ``shard_map`` (or ``vmap`` with axis names):

    all-gather          S(i) -> B      blocks of all devices, concatenated along i
    all-reduce          P    -> B      the reduction of all devices' values
    reduce-scatter      P    -> S(i)   the same, but each device keeps one block
    all-to-all          S(i) -> S(j)   device r sends its r-th block of j to device r
    all-to-all          P(max) -> S(i) the same, followed by the maximum over the senders
    collective-permute  S(i) -> S(i)   blocks travel when the order of axes on one dim changes
    slice               B    -> S(i)   each device keeps its own block
    pad                 S(i) -> P      the other blocks are filled with the reduction's identity
    keep-first          B    -> P      one device keeps the value, the others hold zeros

A move over several axes is one collective over their product, first axis major; its axes are
the minor-most ones of the dim they leave and of the dim they enter, so blocks stay contiguous.
Values without arithmetic (PRNG keys) travel as the integers they consist of.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.layouts.move import Move
from meshdsl.layouts.placement import Partial, Placement, Split

Sizes = Mapping[str, int]
LocalMove = Callable[[jax.Array, Move, Sizes], jax.Array]


def apply_move(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    """This device's block after ``move``, from its block ``x`` before it.

    Args:
      x: the local block in layout ``move.before``.
      move: any kind of the table above.
      sizes: devices per mesh axis.
    """
    if prod(sizes[axis] for axis in move.axes) == 1:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = apply_move(jax.random.key_data(x), move, sizes)
        keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return keys
    return LOCAL_MOVES[move.kind](x, move, sizes)


def move_scope(move: Move, dtype: Any) -> str:
    """The name under which the compiled program shows the move: kind, axes and planned dtype."""
    return collective_scope(move.kind, move.axes, dtype)


def collective_scope(kind: str, axes: Sequence[str], dtype: Any) -> str:
    """The name of any planned collective of values of ``dtype``."""
    return f"{kind}({','.join(axes)}) {np.dtype(dtype).name if _is_plain(dtype) else dtype}"


def _is_plain(dtype: Any) -> bool:
    return not jnp.issubdtype(dtype, jax.dtypes.extended)


def _all_gather(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    moved: jax.Array = lax.all_gather(x, move.axes, axis=_dim(move.source), tiled=True)
    return moved


def _all_reduce(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    reduce: Callable[..., jax.Array] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[_reduction(move.source)]
    return reduce(x, move.axes)


def _reduce_scatter(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    moved: jax.Array = lax.psum_scatter(x, move.axes, scatter_dimension=_dim(move.target), tiled=True)
    return moved


def _all_to_all(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    if isinstance(move.source, Partial):
        return _reduce_blocks(x, move, sizes)
    moved: jax.Array = lax.all_to_all(
        x, move.axes, split_axis=_dim(move.target), concat_axis=_dim(move.source), tiled=True
    )
    return moved


def _reduce_blocks(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    """Every sender's block for this device, then their maximum or minimum."""
    dim, devices = _dim(move.target), _devices(move, sizes)
    blocks = lax.all_to_all(x, move.axes, split_axis=dim, concat_axis=dim, tiled=True)
    apart = blocks.reshape(*x.shape[:dim], devices, x.shape[dim] // devices, *x.shape[dim + 1 :])
    reduce = {"max": jnp.max, "min": jnp.min}[_reduction(move.source)]
    return reduce(apart, axis=dim)


def _permute(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    dim = _dim(move.source)
    before, after = move.before.splitting(dim), move.after.splitting(dim)
    moved: jax.Array = lax.ppermute(
        x, tuple(axis for axis in sizes if axis in before), swap_pairs(before, after, sizes)
    )
    return moved


def swap_pairs(before: tuple[str, ...], after: tuple[str, ...], sizes: Sizes) -> list[tuple[int, int]]:
    """Who sends to whom when the axes of one dim change order; devices count in mesh order."""
    axes = [axis for axis in sizes if axis in before]
    devices = np.arange(prod(sizes[axis] for axis in axes)).reshape([sizes[axis] for axis in axes])
    holders = (devices.transpose([axes.index(axis) for axis in order]) for order in (before, after))
    return sorted(zip(*(grid.ravel().tolist() for grid in holders), strict=True))


def _slice(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    """This device's block.

    XLA loses the product in a slice of one element of ``3 * slice`` for whole numbers (on CPU, jax 0.10 and 0.12, also
    without a mesh): it must not see what is sliced.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = lax.optimization_barrier(x)
    dim = _dim(move.target)
    block = x.shape[dim] // _devices(move, sizes)
    return lax.dynamic_slice_in_dim(x, _rank(move.axes) * block, block, dim)


def _pad(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    dim, devices = _dim(move.source), _devices(move, sizes)
    shape = (*x.shape[:dim], x.shape[dim] * devices, *x.shape[dim + 1 :])
    rest = jnp.full(shape, identity(_reduction(move.target), x.dtype), x.dtype)
    return lax.dynamic_update_slice_in_dim(rest, x, _rank(move.axes) * x.shape[dim], dim)


def _keep_first(x: jax.Array, move: Move, sizes: Sizes) -> jax.Array:
    if _reduction(move.target) != "sum":
        return x
    return jnp.where(_rank(move.axes) == 0, x, jnp.zeros_like(x))


LOCAL_MOVES: dict[str, LocalMove] = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "collective-permute": _permute,
    "slice": _slice,
    "pad": _pad,
    "keep-first": _keep_first,
}


def identity(reduction: str, dtype: jnp.dtype) -> bool | int | float:
    """The value that a reduction ignores: 0, or the dtype's lowest or highest value."""
    if reduction == "sum":
        return 0
    lowest = reduction == "max"
    if dtype == jnp.bool_:
        return not lowest
    if jnp.issubdtype(dtype, jnp.inexact):
        return -np.inf if lowest else np.inf
    return int(jnp.iinfo(dtype).min if lowest else jnp.iinfo(dtype).max)


def _rank(axes: tuple[str, ...]) -> jax.Array:
    return lax.axis_index(axes)


def _devices(move: Move, sizes: Sizes) -> int:
    return prod(sizes[axis] for axis in move.axes)


def _dim(placement: Placement) -> int:
    if isinstance(placement, Split) and isinstance(placement.dim, int):
        return placement.dim
    raise TypeError(f"{placement} names no numbered dim")


def _reduction(placement: Placement) -> str:
    if isinstance(placement, Partial):
        return placement.reduction
    raise TypeError(f"{placement} is no partial placement")
