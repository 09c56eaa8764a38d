"""Local programs of operations that read and write at positions given by data.

Positions speak of the whole tensor. Where this device holds a block of a dim that is looked
up, the positions are first brought in bounds as the operation's mode says (*clip* does it by
moving them, and that is a statement about the whole tensor), then counted from the start of
the block. What falls outside the block is another device's: a gather answers zero there, a
scatter drops it.

A gather that answers positions out of bounds with a fill value must say it once in a partial
sum: the first device does.

XLA (as of jax 0.10) reads a slice of a slice from where the two together start, without bounds,
and it makes a scatter to one position of slices: out of bounds it would write what another device
holds. A barrier hides from it that the block is a slice.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from meshdsl.ir import Op
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import P
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.indexing import Lookup, gather_dims, scatter_dims

FILL = GatherScatterMode.FILL_OR_DROP
CLIP = GatherScatterMode.CLIP


@local("gather")
def gather(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Read this device's rows and columns."""
    operand, indices = arrays
    dims, sums = gather_dims(op), _summed(where.outputs[0])
    sizes = where_whole(op.params["slice_sizes"], op.inputs[0].shape, operand.shape)
    split = _split(dims, where)
    fills = op.params["mode"] == FILL
    if not split and not (fills and sums):
        return bind(op, operand, indices, slice_sizes=sizes)
    at = signed(indices)
    mine = shift(at if fills else clip(at, dims), dims, split, op.inputs[0].shape, where)
    (found,) = bind(op, operand, mine, slice_sizes=sizes, mode=FILL, fill_value=0)
    return (_say_once(found, at, op, dims, where),) if fills else (found,)


def _say_once(found: jax.Array, at: jax.Array, op: Op, dims: Lookup, where: Local) -> jax.Array:
    """Put the fill value at positions that are out of bounds of the whole operand, on the first device of a sum."""
    outside = jnp.any((at < 0) | (at > np.array(dims.limits, at.dtype)), axis=-1)
    first = where.index(_summed(where.outputs[0])) == 0
    said = lax.broadcast_in_dim(outside & first, found.shape, dims.queries)
    return jnp.where(said, jnp.asarray(op.params["fill_value"], found.dtype), found)


def _summed(layout: Layout) -> tuple[str, ...]:
    return tuple(name for name, placed in layout.placements if placed is P)


@local("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Write this device's rows and columns."""
    operand, indices, updates = arrays
    dims = scatter_dims(op)
    split = _split(dims, where)
    if not split:
        return bind(op, operand, indices, updates)
    at = signed(indices)
    mine = shift(clip(at, dims) if op.params["mode"] == CLIP else at, dims, split, op.inputs[0].shape, where)
    once = indices.size == indices.shape[-1]
    return bind(op, lax.optimization_barrier(operand) if once else operand, mine, updates, mode=FILL)


def _split(dims: Lookup, where: Local) -> tuple[int, ...]:
    """Looked up dims of which this device holds a block."""
    return tuple(d for d in dims.looked_up if where.inputs[0].splitting(d))


def signed(indices: jax.Array) -> jax.Array:
    """Indices in a type that can count below zero."""
    if indices.dtype in (jnp.int32, jnp.int64):
        return indices
    largest = np.iinfo(np.int32).max
    fits = np.iinfo(indices.dtype).max <= largest
    return (indices if fits else jnp.minimum(indices, largest)).astype(jnp.int32)


def clip(at: jax.Array, dims: Lookup) -> jax.Array:
    """Positions moved to the nearest ones in bounds of the whole operand."""
    return jnp.clip(at, 0, np.array(dims.limits, at.dtype))


def shift(at: jax.Array, dims: Lookup, split: tuple[int, ...], shape: tuple[int, ...], where: Local) -> jax.Array:
    """Positions counted from the start of this device's block."""
    layout = where.inputs[0]
    starts = [where.offset(layout, d, shape[d]) if d in split else jnp.int32(0) for d in dims.columns]
    return at - jnp.stack(starts).astype(at.dtype)


def where_whole(sizes: tuple[int, ...], whole: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Slice sizes on a block: dims that are taken whole are taken whole there too."""
    return tuple(b if size == n else size for size, n, b in zip(sizes, whole, block, strict=True))
