"""Exchanges between the devices of a split dim, inside a local program.

These run what ``Exchange`` describes, each collective under its planned name. ``axes`` are those
that split the dim, major first; over none of them an exchange leaves the block as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.layouts.exchange import pieces, steps
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.local.registry import Local
from meshdsl.lowering.moves import collective_scope
from meshdsl.rules.sliding import Sliding

Axes = tuple[str, ...]
Ends = Mapping[int, tuple[int, int]]  # per dim, how many elements in front of a block and behind it
Fill = jax.Array | float | None


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The blocks of all devices, one after the other along ``dim``."""
    if not axes:
        return x
    with jax.named_scope(collective_scope("all-gather", axes, x.dtype)):
        found: jax.Array = lax.all_gather(x, axes, axis=dim, tiled=True)
    return found


def cycle(x: jax.Array, where: Local, axes: Axes, dim: int, before: int, after: int) -> jax.Array:
    """This block with ``before`` elements of ``dim`` in front and ``after`` behind; the first follows the last."""
    found = [
        _fetched(lax.slice_in_dim(x, start, stop, axis=dim), where, axes, distance)
        for distance, start, stop in pieces(before, after, x.shape[dim])
    ]
    return lax.concatenate(found, dim)


def windows(x: jax.Array, where: Local, layout: Layout, ends: Ends, fill: Fill = 0) -> jax.Array:
    """This block with what lies in front of it and behind it along several dims, one after the other.

    Filled up last, so that what is sent does not depend on what with.

    Args:
      layout: of the operand. fill: what lies beyond the ends of the dims; None if nobody sees it.
    """
    held = x
    for dim, (before, after) in sorted(ends.items()):
        held = cycle(held, where, layout.splitting(dim), dim, before, after)
    outer = [dim for dim in ends if any(ends[dim])]
    if fill is None or not outer:
        return held
    inner = (_within(held.shape, where, layout.splitting(dim), dim, x.shape[dim], ends[dim][0]) for dim in outer)
    return jnp.where(reduce(jnp.logical_and, inner), held, jnp.asarray(fill, x.dtype))


def _within(shape: tuple[int, ...], where: Local, axes: Axes, dim: int, extent: int, before: int) -> jax.Array:
    """Whether an element lies within the ends of the dim: of a block of ``extent`` with ``before`` others in front."""
    first, blocks = where.index(axes) * extent, prod(where.sizes[axis] for axis in axes)
    at = lax.broadcasted_iota(jnp.int32, shape, dim)
    return (at >= before - first) & (at < before - first + blocks * extent)


def slid(
    x: jax.Array, where: Local, layout: Layout, sliding: Mapping[int, Sliding], fill: Fill = 0
) -> tuple[jax.Array, dict[int, tuple[int, int]]]:
    """This block with what its windows over the dims of ``sliding`` see of others, and the padding left to do."""
    held, padding = windows(x, where, layout, {dim: (s.before, s.after) for dim, s in sliding.items()}, fill), {}
    for dim, s in sliding.items():
        axes = layout.splitting(dim)
        blocks = prod(where.sizes[axis] for axis in axes)
        padding[dim] = s.padding(blocks) if s.drift == 0 else (0, 0)
        if s.drift:
            start = where.index(axes) * (s.drift // blocks) - s.low + s.before
            held = lax.dynamic_slice_in_dim(held, start, s.extent(blocks), dim)
    return held, padding


def mirror(x: jax.Array, where: Local, axes: Axes) -> jax.Array:
    """The block of the device at the mirrored place."""
    blocks = prod(where.sizes[axis] for axis in axes)
    return _permute(x, where, axes, lambda at: blocks - 1 - at)


def swap(x: jax.Array, where: Local, axes: Axes, partners: Sequence[int]) -> jax.Array:
    """The block of each device's partner."""
    return _permute(x, where, axes, lambda at: partners[at])


def _fetched(x: jax.Array, where: Local, axes: Axes, distance: int) -> jax.Array:
    """What the device ``distance`` blocks further on has as ``x``; every block is passed on, also past the ends."""
    blocks = prod(where.sizes[axis] for axis in axes)
    moving, apart = steps(distance % blocks, [where.sizes[axis] for axis in axes])
    over = tuple(axes[i] for i in moving)
    count = prod(where.sizes[axis] for axis in over)
    return _permute(x, where, over, lambda at: (at - apart) % count)


def _permute(x: jax.Array, where: Local, axes: Axes, target: Callable[[int], int]) -> jax.Array:
    """Every device sends ``x`` to the one at ``target`` of its own place along ``axes``."""
    if not axes:
        return x
    order = tuple(axis for axis in where.sizes if axis in axes)  # a permute counts devices in mesh order
    number = _numbers(axes, order, where.sizes)
    pairs = [(number[at], number[target(at)]) for at in range(len(number))]
    with jax.named_scope(collective_scope("collective-permute", axes, x.dtype)):
        moved: jax.Array = lax.ppermute(x, order, pairs)
    return moved


def _numbers(axes: Axes, order: Axes, sizes: dict[str, int]) -> Sequence[int]:
    """Per place along ``axes``, major first, the device's number along ``order``."""
    grid = np.arange(prod(sizes[axis] for axis in order)).reshape([sizes[axis] for axis in order])
    numbers: list[int] = grid.transpose([order.index(axis) for axis in axes]).ravel().tolist()
    return numbers
