"""Local programs of windows that start at positions given by data.

A window can reach over several blocks of a split dim, and a block can hold it all, a part or
nothing. Let the window be ``size`` long and start ``ahead`` of the block. The device looks at the
part of its block that is nearest to the window, ``held`` elements from ``near`` on:

    block                    [  .  .  .  .  .  .  ]          ahead = 4
    window                               [  .  .  .  .  ]    size = 4
    nearest part                   [  .  .  .  . ]           near = 2, held = 4

Shifted by ``ahead - near``, with zeros from outside, the part is the block's share of the window; and
shifted the other way, the window is what the part becomes. So no more than a window is touched.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.ir import Op
from meshdsl.lowering.local.indexing import signed, where_whole
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.indexing import window


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
    """What this device holds of the window, zeros elsewhere."""
    operand, *starts = arrays
    sizes = where_whole(op.params["slice_sizes"], op.inputs[0].shape, operand.shape)
    parts = _parts(op, sizes, starts, operand.shape, where)
    lengths = _lengths(sizes, parts)
    (found,) = bind(op, operand, *_within(operand.shape, lengths, _from(starts, parts)), slice_sizes=lengths)
    for part in parts:
        found = _shifted(found, part.dim, part.ahead - part.near, part.size)
    return (found,)


@local("dynamic_update_slice")
def dynamic_update_slice(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Write what of the window lies in this device's block."""
    operand, update, *starts = arrays
    parts = _parts(op, update.shape, starts, operand.shape, where)
    if not parts:
        return bind(op, *arrays)
    before, inside = _from(starts, parts), jnp.bool_(True)
    written = update
    for part in parts:
        written = _shifted(written, part.dim, part.near - part.ahead, part.held)
    for part in parts:
        at = lax.broadcasted_iota(jnp.int32, written.shape, part.dim) + (part.near - part.ahead)
        inside = inside & (at >= 0) & (at < part.size)
    old = lax.dynamic_slice(operand, before, written.shape)
    return bind(op, operand, jnp.where(inside, written, old), *before)


def _parts(op: Op, sizes: tuple[int, ...], starts: list[jax.Array], block: tuple[int, ...], where: Local) -> list[Near]:
    """The parts in the dims that are cut and split."""
    whole, layout = op.inputs[0].shape, where.inputs[0]
    found = []
    for d in window(whole, op.outputs[0].shape if op.name == "dynamic_slice" else op.inputs[1].shape)[1]:
        if layout.splitting(d):
            start = jnp.clip(signed(starts[d]), 0, whole[d] - sizes[d])
            ahead, held = start - where.offset(layout, d, whole[d]), min(sizes[d], block[d])
            found.append(Near(d, sizes[d], ahead, jnp.clip(ahead, 0, block[d] - held), held))
    return found


def _from(starts: list[jax.Array], parts: list[Near]) -> list[jax.Array]:
    """The starts, those of split dims in the block."""
    near = {part.dim: part.near for part in parts}
    return [near[d].astype(start.dtype) if d in near else start for d, start in enumerate(starts)]


def _within(shape: tuple[int, ...], lengths: tuple[int, ...], starts: list[jax.Array]) -> list[jax.Array]:
    """The starts in bounds; left to the compiler, some merge the slice with one of its result and forget it."""
    bounds = zip(starts, shape, lengths, strict=True)
    return [jnp.clip(start, 0, min(n - k, int(np.iinfo(start.dtype).max))) for start, n, k in bounds]


def _lengths(sizes: tuple[int, ...], parts: list[Near]) -> tuple[int, ...]:
    held = {part.dim: part.held for part in parts}
    return tuple(held.get(d, size) for d, size in enumerate(sizes))


def _shifted(x: jax.Array, dim: int, by: jax.Array, size: int) -> jax.Array:
    """``size`` elements of ``x`` that come after the first ``by``, zeros where there are none."""
    n = x.shape[dim]
    around = [(size, size, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    padded = lax.pad(x, jnp.zeros((), x.dtype), around)
    return lax.dynamic_slice_in_dim(padded, jnp.clip(by + size, 0, n + size), size, dim)
