"""Local programs of data movement whose parameters contain shapes or positions, or that exchange blocks."""

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.layouts.exchange import permute_elements
from meshdsl.lowering.local.collectives import cycle, mirror, slid, swap
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.shape import grows_at_end, pad_windows, slice_windows


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
    """This device's places of the result, from its block and the ends of others."""
    (x,), starts, limits = arrays, list(op.params["start_indices"]), list(op.params["limit_indices"])
    layout, shapes = where.inputs[0], zip(op.inputs[0].shape, op.outputs[0].shape, strict=True)
    split = {d: a != b for d, (a, b) in enumerate(shapes) if layout.splitting(d)}
    sliding = {d: slice_windows(op, d) for d, cut in split.items() if cut}
    held, left = slid(x, where, layout, sliding, fill=None)
    for d in split:
        starts[d], limits[d] = 0, x.shape[d]
    for d, (low, _) in left.items():
        starts[d], limits[d] = -low, sliding[d].extent(prod(where.sizes[axis] for axis in layout.splitting(d))) - low
    return (lax.slice(held, starts, limits, op.params["strides"]),)


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
    """This device's places of the result, from its block and the ends of others."""
    (x, fill), config, layout = arrays, list(op.params["padding_config"]), where.inputs[0]
    moved = [d for d, amounts in enumerate(config) if layout.splitting(d) and any(amounts)]
    x, left = slid(x, where, layout, {d: pad_windows(op, d) for d in moved}, fill)
    cuts: list[tuple[int, jax.Array, int]] = []
    for d, (*_, between) in enumerate(config):
        if d in left:
            config[d] = (*left[d], between)
        elif grows_at_end(op, d) and _blocks(op, where, d) > 1:
            x, start, block = _own_places(op, x, where, d)
            config[d] = (0, block, 0)
            cuts.append((d, start, block))
    (padded,) = bind(op, x, fill, padding_config=tuple(config))
    for d, start, block in cuts:
        padded = lax.dynamic_slice_in_dim(padded, start, block, d)
    return (padded,)


def _blocks(op: Op, where: Local, d: int) -> int:
    """The number of blocks of dim d of the result."""
    return prod(where.sizes[axis] for axis in where.outputs[0].splitting(d))


def _own_places(op: Op, x: jax.Array, where: Local, d: int) -> tuple[jax.Array, jax.Array, int]:
    """Of a whole dim that grows at its end: a slice as long as a block, the block's start in it, and its length."""
    n, grown = op.inputs[0].shape[d], op.outputs[0].shape[d]
    block = grown // _blocks(op, where, d)
    start = where.offset(where.outputs[0], d, grown)
    first = jnp.minimum(start, n - block)
    return lax.dynamic_slice_in_dim(x, first, block, d), start - first, block
