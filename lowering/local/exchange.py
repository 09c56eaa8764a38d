"""Exchanges between the devices of a split dim, inside a local program.

These run what ``Exchange`` describes, each collective under its planned name. ``axes`` are those
that split the dim, major first; over none of them an exchange leaves the block as it is.
"""

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.layouts.exchange import pieces, steps
from meshdsl.lowering.local.registry import Local
from meshdsl.lowering.moves import collective_scope
from meshdsl.rules.sliding import Sliding

Axes = tuple[str, ...]


def gather(x: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """The blocks of all devices, one after the other along ``dim``."""
    if not axes:
        return x
    with jax.named_scope(collective_scope("all-gather", axes, x.dtype)):
        found: jax.Array = lax.all_gather(x, axes, axis=dim, tiled=True)
    return found


def window(
    x: jax.Array, where: Local, axes: Axes, dim: int, before: int, after: int, fill: jax.Array | float | None = 0
) -> jax.Array:
    """This block with ``before`` elements of ``dim`` in front of it and ``after`` behind.

    Args:
      fill: what lies beyond the ends of the dim; None if the last block is followed by the first.
    """
    found = [
        _fetched(lax.slice_in_dim(x, start, stop, axis=dim), where, axes, distance, fill)
        for distance, start, stop in pieces(before, after, x.shape[dim])
    ]
    return lax.concatenate(found, dim)


def slid(
    x: jax.Array, where: Local, axes: Axes, dim: int, sliding: Sliding, fill: jax.Array | float | None = 0
) -> tuple[jax.Array, tuple[int, int]]:
    """This block with what its windows see of others, and the padding that is left to do."""
    held = window(x, where, axes, dim, sliding.before, sliding.after, fill)
    blocks = prod(where.sizes[axis] for axis in axes)
    if sliding.drift == 0:
        return held, sliding.padding(blocks)
    start = where.index(axes) * (sliding.drift // blocks) - sliding.low + sliding.before
    return lax.dynamic_slice_in_dim(held, start, sliding.extent(blocks), dim), (0, 0)


def mirror(x: jax.Array, where: Local, axes: Axes) -> jax.Array:
    """The block of the device at the mirrored place."""
    blocks = prod(where.sizes[axis] for axis in axes)
    return _permute(x, where, axes, lambda at: blocks - 1 - at)


def swap(x: jax.Array, where: Local, axes: Axes, partners: Sequence[int]) -> jax.Array:
    """The block of each device's partner."""
    return _permute(x, where, axes, lambda at: partners[at])


def _fetched(x: jax.Array, where: Local, axes: Axes, distance: int, fill: jax.Array | float | None) -> jax.Array:
    """What the device ``distance`` blocks further on has as ``x``; every block is passed on, also past the ends."""
    blocks = prod(where.sizes[axis] for axis in axes)
    moving, apart = steps(distance % blocks, [where.sizes[axis] for axis in axes])
    over = tuple(axes[i] for i in moving)
    count = prod(where.sizes[axis] for axis in over)
    moved = _permute(x, where, over, lambda at: (at - apart) % count)
    if fill is None or distance == 0:
        return moved
    source = where.index(axes) + distance
    return jnp.where((source >= 0) & (source < blocks), moved, jnp.asarray(fill, x.dtype))


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
