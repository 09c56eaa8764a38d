"""Local programs of reads and writes at positions given by data: gather, scatter, dynamic slices.

Positions refer to the whole tensor. Where this device holds a block of a looked-up dim, positions are first brought in
bounds as the operation's mode says (*clip* moves them with respect to the whole tensor), then counted from the start of
the block. Positions outside the block belong to other devices: a gather returns zero there, a scatter drops them. The
fill value of positions out of bounds may occur once in a partial sum, so the first device writes it.

The window of a dynamic slice can extend over several blocks of a split dim, and a block can hold all of it, a part or
nothing. Let the window be ``size`` long and start ``ahead`` of the block. The device uses the part of its block that is
nearest to the window, ``held`` elements from ``near`` on:

    block                    [  .  .  .  .  .  .  ]          ahead = 4
    window                               [  .  .  .  .  ]    size = 4
    nearest part                   [  .  .  .  . ]           near = 2, held = 4

Shifted by ``ahead - near``, with zeros from outside, the part is the block's share of the window; shifted the other
way, the window is the new value of the part. So no more elements than a window are touched.
"""

from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from meshdsl.ir.graph import Op
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import P
from meshdsl.lowering.local.registry import Local, bind, local, padded
from meshdsl.rules.indexing import COMBINE, SCATTERS, Combine, Lookup, gather_dims, scatter_dims, window

# ---- Gather and scatter ----------------------------------------------------------------------------------------------
# XLA (as of jax 0.10) reads a slice of a slice from the sum of both starts, without bounds, and turns a scatter to one
# position into slices: out of bounds it would write into another device's block. A barrier hides from it that the block
# is a slice.


FILL = GatherScatterMode.FILL_OR_DROP
CLIP = GatherScatterMode.CLIP


@local("gather")
def gather(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Reads the rows and columns that this device holds, and zeros elsewhere."""
    operand, indices = arrays
    dims, sums = gather_dims(op), _summed(where.outputs[0])
    sizes = where_whole(op.params["slice_sizes"], op.inputs[0].shape, operand.shape)
    split = _split(dims, where)
    fills = op.params["mode"] == FILL
    if not split and not (fills and sums):
        return bind(op, operand, indices, slice_sizes=sizes)
    at = signed(indices)
    if any(d in dims.windows for d in split):
        return (_read_window(op, operand, at, dims, split, where),)
    mine = shift(at if fills else clip(at, dims), dims, split, op.inputs[0].shape, where)
    (found,) = bind(op, operand, mine, slice_sizes=sizes, mode=FILL, fill_value=0)
    return (_fill_once(found, at, op, dims, where),) if fills else (found,)


def _fill_once(found: jax.Array, at: jax.Array, op: Op, dims: Lookup, where: Local) -> jax.Array:
    """Writes the fill value at positions out of bounds of the whole operand, on the first device of a sum."""
    outside = jnp.any((at < 0) | (at > np.array(dims.limits, at.dtype)), axis=-1)
    first = where.index(_summed(where.outputs[0])) == 0
    filled = lax.broadcast_in_dim(outside & first, found.shape, dims.queries)
    return jnp.where(filled, jnp.asarray(op.params["fill_value"], found.dtype), found)


def _summed(layout: Layout) -> tuple[str, ...]:
    return tuple(name for name, placed in layout.placements if placed is P)


@local(*SCATTERS)
def scatter(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Writes the rows and columns that this device holds."""
    operand, indices, updates = arrays
    dims = scatter_dims(op)
    split = _split(dims, where)
    if not split:
        return bind(op, operand, indices, updates)
    at = signed(indices)
    if any(d in dims.windows for d in split):
        return (_write_window(op, operand, at, updates, dims, split, where),)
    mine = shift(clip(at, dims) if op.params["mode"] == CLIP else at, dims, split, op.inputs[0].shape, where)
    once = indices.size == indices.shape[-1]
    return bind(op, lax.optimization_barrier(operand) if once else operand, mine, updates, mode=FILL)


def _split(dims: Lookup, where: Local) -> tuple[int, ...]:
    """Looked-up dims of which this device holds a block, and dims of windows."""
    return tuple(d for d in (*dims.looked_up, *dims.windows) if where.inputs[0].splitting(d))


def signed(indices: jax.Array) -> jax.Array:
    """Returns the indices in a signed dtype."""
    if indices.dtype in (jnp.int32, jnp.int64):
        return indices
    largest = np.iinfo(np.int32).max
    fits = np.iinfo(indices.dtype).max <= largest
    return (indices if fits else jnp.minimum(indices, largest)).astype(jnp.int32)


def clip(at: jax.Array, dims: Lookup) -> jax.Array:
    """Returns the nearest positions in bounds of the whole operand."""
    return jnp.clip(at, 0, np.array(dims.limits, at.dtype))


def shift(at: jax.Array, dims: Lookup, split: tuple[int, ...], shape: tuple[int, ...], where: Local) -> jax.Array:
    """Returns the positions counted from the start of this device's block."""
    layout = where.inputs[0]
    starts = [where.offset(layout, d, shape[d]) if d in split else jnp.int32(0) for d in dims.columns]
    return at - jnp.stack(starts).astype(at.dtype)


def where_whole(sizes: tuple[int, ...], whole: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the slice sizes on a block: dims that are taken whole are taken whole there too."""
    return tuple(b if size == n else size for size, n, b in zip(sizes, whole, block, strict=True))


# A single query that reads or writes several elements of a split dim is a dynamic slice, but for what happens out of
# bounds: then nothing is read or written.


def _read_window(
    op: Op, operand: jax.Array, at: jax.Array, dims: Lookup, split: tuple[int, ...], where: Local
) -> jax.Array:
    """This device's part of the only window of a gather, and zeros elsewhere."""
    starts, allowed = _window_start(op, at, dims)
    whole = op.inputs[0].shape
    parts = _parts(split, dims.sizes, starts, operand.shape, whole, where)
    found = _read(operand, where_whole(dims.sizes, whole, operand.shape), starts, parts)
    found = found.reshape(where.local_shape(where.outputs[0], op.outputs[0].shape))
    if op.params["mode"] != FILL:
        return found
    return _fill_once(jnp.where(allowed, found, jnp.zeros((), found.dtype)), at, op, dims, where)


def _write_window(
    op: Op,
    operand: jax.Array,
    at: jax.Array,
    updates: jax.Array,
    dims: Lookup,
    split: tuple[int, ...],
    where: Local,
) -> jax.Array:
    """The operand with the part of a scatter's only window that falls in this device's block."""
    starts, allowed = _window_start(op, at, dims)
    whole = op.inputs[0].shape
    parts = _parts(split, dims.sizes, starts, operand.shape, whole, where)
    update = updates.reshape(where_whole(dims.sizes, whole, operand.shape))
    return _write(operand, update, starts, parts, COMBINE[op.name], allowed)


def _window_start(op: Op, at: jax.Array, dims: Lookup) -> tuple[list[jax.Array], jax.Array]:
    """The start of the only window, per dim of the operand, and whether it is in bounds."""
    clipped = clip(at, dims).reshape(-1)
    starts = [jnp.zeros((), at.dtype) for _ in op.inputs[0].shape]
    for column, d in enumerate(dims.columns):
        starts[d] = clipped[column]
    inside = jnp.all(at.reshape(-1) == clipped) | (op.params["mode"] == CLIP)
    return starts, inside


# ---- Dynamic slices --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Near:
    """The part of a block that is nearest to a window, in one dim.

    Args:
      dim: a split dim.
      size: length of the window.
      ahead: start of the window, counted from the start of the block.
      near, held: start and length of the part.
    """

    dim: int
    size: int
    ahead: jax.Array
    near: jax.Array
    held: int


@local("dynamic_slice")
def dynamic_slice(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Reads this device's part of the window, and zeros elsewhere."""
    operand, *starts = arrays
    whole, sizes = op.inputs[0].shape, op.params["slice_sizes"]
    parts = _parts(window(whole, sizes)[1], sizes, starts, operand.shape, whole, where)
    return (_read(operand, where_whole(sizes, whole, operand.shape), starts, parts),)


@local("dynamic_update_slice")
def dynamic_update_slice(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Writes the part of the window that falls in this device's block."""
    operand, update, *starts = arrays
    whole, sizes = op.inputs[0].shape, op.inputs[1].shape
    parts = _parts(window(whole, sizes)[1], sizes, starts, operand.shape, whole, where)
    return (_write(operand, update, starts, parts, COMBINE[op.name]),)


def _read(operand: jax.Array, sizes: tuple[int, ...], starts: list[jax.Array], parts: list[Near]) -> jax.Array:
    """This device's part of the window, and zeros elsewhere."""
    lengths = _lengths(sizes, parts)
    found = lax.dynamic_slice(operand, _within(operand.shape, lengths, _from(starts, parts)), lengths)
    for part in parts:
        found = _shifted(found, part.dim, part.ahead - part.near, part.size)
    return found


def _write(
    operand: jax.Array,
    update: jax.Array,
    starts: list[jax.Array],
    parts: list[Near],
    combine: Combine,
    allowed: jax.Array | None = None,
) -> jax.Array:
    """The operand, with the part of the window that falls in this device's block combined with the update.

    Args:
      allowed: whether anything is written; None for always.
    """
    before, written = _from(starts, parts), update
    for part in parts:
        written = _shifted(written, part.dim, part.near - part.ahead, part.held)
    inside = [] if allowed is None else [allowed]
    for part in parts:
        at = lax.broadcasted_iota(jnp.int32, written.shape, part.dim) + (part.near - part.ahead)
        inside.append((at >= 0) & (at < part.size))
    old = lax.dynamic_slice(operand, before, written.shape)
    new = combine(old, written)
    new = jnp.where(reduce(jnp.logical_and, inside), new, old) if inside else new
    return lax.dynamic_update_slice(operand, new, before)


def _parts(
    cut: tuple[int, ...],
    sizes: tuple[int, ...],
    starts: list[jax.Array],
    block: tuple[int, ...],
    whole: tuple[int, ...],
    where: Local,
) -> list[Near]:
    """The parts of a window of ``sizes`` in those of the dims ``cut`` that are split."""
    layout, found = where.inputs[0], []
    for d in (d for d in cut if layout.splitting(d)):
        start = jnp.clip(signed(starts[d]), 0, whole[d] - sizes[d])
        ahead, held = start - where.offset(layout, d, whole[d]), min(sizes[d], block[d])
        found.append(Near(d, sizes[d], ahead, jnp.clip(ahead, 0, block[d] - held), held))
    return found


def _from(starts: list[jax.Array], parts: list[Near]) -> list[jax.Array]:
    """The starts, those of split dims in the block."""
    near = {part.dim: part.near for part in parts}
    return [near[d].astype(start.dtype) if d in near else start for d, start in enumerate(starts)]


def _within(shape: tuple[int, ...], lengths: tuple[int, ...], starts: list[jax.Array]) -> list[jax.Array]:
    """The starts in bounds; some compilers forget the bounds when they merge a slice with one of its result."""
    bounds = zip(starts, shape, lengths, strict=True)
    return [jnp.clip(start, 0, min(n - k, int(np.iinfo(start.dtype).max))) for start, n, k in bounds]


def _lengths(sizes: tuple[int, ...], parts: list[Near]) -> tuple[int, ...]:
    held = {part.dim: part.held for part in parts}
    return tuple(held.get(d, size) for d, size in enumerate(sizes))


def part_in_block(x: jax.Array, dim: int, ahead: jax.Array, size: int, fill: jax.Array | None = None) -> jax.Array:
    """Returns a window of ``size`` elements that starts ``ahead`` of the block ``x``: ``fill`` or zeros outside it."""
    held = min(size, x.shape[dim])
    near = jnp.clip(ahead, 0, x.shape[dim] - held)
    return _shifted(lax.dynamic_slice_in_dim(x, near, held, dim), dim, ahead - near, size, fill)


def _shifted(x: jax.Array, dim: int, by: jax.Array, size: int, fill: jax.Array | None = None) -> jax.Array:
    """``size`` elements of ``x`` after the first ``by``; ``fill``, by default zeros, out of bounds."""
    n = x.shape[dim]
    around = [(size, size, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    around_it = padded(x, jnp.zeros((), x.dtype) if fill is None else fill, around)
    return lax.dynamic_slice_in_dim(around_it, jnp.clip(by + size, 0, n + size), size, dim)
