"""Local programs of data movement whose parameters contain shapes or positions, or that exchange blocks."""

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.layouts.exchange import permute_elements
from meshdsl.lowering.local.collectives import cycle, mirror, slid, swap, windows
from meshdsl.lowering.local.indexing import part_in_block
from meshdsl.lowering.local.registry import Local, bind, local, padded
from meshdsl.rules.shape import longest_moves, pad_windows, slice_windows
from meshdsl.trace.passes.share_halos import rolled


@local("broadcast_in_dim")
def broadcast_in_dim(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """A broadcast to this device's block of the result."""
    return bind(op, *arrays, shape=where.local_shape(where.outputs[0], op.params["shape"]))


@local("reshape")
def reshape(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """A reshape to this device's block of the result; the operand's dims may be read in another order."""
    order = op.params["dimensions"]
    source = arrays[0] if order is None else lax.transpose(arrays[0], order)
    return (source.reshape(where.local_shape(where.outputs[0], op.params["new_sizes"])),)


@local("iota")
def iota(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Counts from the start of this device's block."""
    shape, dim, layout = op.params["shape"], op.params["dimension"], where.outputs[0]
    (counted,) = bind(op, *arrays, shape=where.local_shape(layout, shape))
    if not layout.splitting(dim):
        return (counted,)
    return (counted + where.offset(layout, dim, shape[dim]).astype(counted.dtype),)


@local("slice")
def slice_(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """This device's places of the result, from its block and the ends of others; or those in its block, and zeros."""
    (x,), starts, limits = arrays, list(op.params["start_indices"]), list(op.params["limit_indices"])
    strides, layout = list(op.params["strides"] or [1] * x.ndim), where.inputs[0]
    shapes = zip(op.inputs[0].shape, op.outputs[0].shape, strict=True)
    split = {d: a != b for d, (a, b) in enumerate(shapes) if layout.splitting(d)}
    windows = {d: slice_windows(op, d) for d, cut in split.items() if cut}
    for d, few in ((d, w.count) for d, w in windows.items() if not w.splits):
        x = _places_in_block(op, x, where, d, few)
        strides[d] = 1
    sliding = {d: w for d, w in windows.items() if w.splits}
    held, left = slid(x, where, layout, sliding, fill=None)
    for d in split:
        starts[d], limits[d] = 0, x.shape[d]
    for d, (low, _) in left.items():
        starts[d], limits[d] = -low, sliding[d].extent(prod(where.sizes[axis] for axis in layout.splitting(d))) - low
    return (lax.slice(held, starts, limits, strides),)


def _places_in_block(op: Op, x: jax.Array, where: Local, d: int, count: int) -> jax.Array:
    """The ``count`` places that a slice reads along dim d, with zeros for those that other devices hold."""
    stride = op.params["strides"][d] if op.params["strides"] else 1
    ahead = op.params["start_indices"][d] - where.offset(where.inputs[0], d, op.inputs[0].shape[d])
    if stride == 1:
        return part_in_block(x, d, ahead, count)
    at = ahead + stride * jnp.arange(count)
    inside = lax.broadcast_in_dim((at >= 0) & (at < x.shape[d]), (*x.shape[:d], count, *x.shape[d + 1 :]), (d,))
    return jnp.where(inside, jnp.take(x, at, axis=d, mode="clip"), jnp.zeros((), x.dtype))


@local("rev")
def rev(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The block of the device at the mirrored position, reversed."""
    turned = [where.inputs[0].splitting(d) for d in op.params["dimensions"]]
    return bind(op, mirror(arrays[0], where, tuple(axis for axes in turned for axis in axes)))


@local("roll")
def roll(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The block shifted by elements of the blocks before it."""
    dim, shift = op.params["axis"], op.params["shift"]
    return (cycle(arrays[0], where, where.inputs[0].splitting(dim), dim, shift, -shift),)


@local("deal")
def permute_local(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Fetches the missing elements round by round, then puts all of them in order."""
    (x,), axes = arrays, where.inputs[0].splitting(0)
    found = permute_elements(op.params["which"], x.shape[0], prod(where.sizes[axis] for axis in axes))
    at, held = where.index(axes), [x]
    for each in found.rounds:
        piece = lax.dynamic_slice_in_dim(x, jnp.asarray(each.start)[at], found.unit, 0)
        held.append(swap(piece, where, axes, each.target))
    return (lax.concatenate(held, 0).at[jnp.asarray(found.places)[at]].get(mode="promise_in_bounds"),)


@local("pad")
def pad(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """This device's places of the result, from its block and the ends of others, or from a whole operand."""
    (x, fill), config, layout = arrays, list(op.params["padding_config"]), where.inputs[0]
    padded = [d for d, amounts in enumerate(config) if any(amounts)]
    grown = [d for d in padded if where.outputs[0].splitting(d) and not layout.splitting(d)]
    moved = [d for d in padded if layout.splitting(d)]
    x, left = slid(x, where, layout, {d: pad_windows(op, d) for d in moved}, fill)
    for d, amounts in left.items():
        config[d] = (*amounts, config[d][2])
    for d in grown:
        x = _own_places(op, x, fill, where, d)
        config[d] = (0, 0, 0)
    return bind(op, x, fill, padding_config=tuple(config))


@local("shifts")
def shifts(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Slices of the block with the halo of the longest moves."""
    (x, fill), layout = arrays, where.inputs[0]
    halos = {d: longest_moves(op, d) for d in range(x.ndim) if layout.splitting(d)}
    held = windows(x, where, layout, halos, fill)
    config = [[(0, 0, 0) if d in halos else (by, -by, 0) for d, by in enumerate(move)] for move in op.params["moves"]]
    moved = []
    for move, amounts in zip(op.params["moves"], config, strict=True):
        starts = [halos[d][0] - by if d in halos else 0 for d, by in enumerate(move)]
        part = lax.slice(held, starts, [start + n for start, n in zip(starts, x.shape, strict=True)])
        moved.append(padded(part, fill, amounts) if any(map(any, amounts)) else part)
    return tuple(moved)


@local("rolls")
def rolls(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Slices of the block with the halo of the longest moves; dims that are whole are rolled."""
    (x,), layout = arrays, where.inputs[0]
    halos = {d: longest_moves(op, d) for d in range(x.ndim) if layout.splitting(d)}
    held, moved = windows(x, where, layout, halos, fill=None), []
    for move in op.params["moves"]:
        starts = [halos[d][0] - by if d in halos else 0 for d, by in enumerate(move)]
        part = lax.slice(held, starts, [start + n for start, n in zip(starts, x.shape, strict=True)])
        moved.append(rolled(part, {d: by for d, by in enumerate(move) if d not in halos}))
    return tuple(moved)


def _own_places(op: Op, x: jax.Array, fill: jax.Array, where: Local, d: int) -> jax.Array:
    """This device's block of a padded dim that it holds whole: the part that falls in the block, padded."""
    low, _, between = op.params["padding_config"][d]
    spread = padded(x, fill, [(0, 0, between) if i == d else (0, 0, 0) for i in range(x.ndim)]) if between else x
    block = where.local_shape(where.outputs[0], op.outputs[0].shape)[d]
    first = where.offset(where.outputs[0], d, op.outputs[0].shape[d]) - low
    return part_in_block(spread, d, first, block, fill)
