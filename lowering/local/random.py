"""Local programs of random bits, and of calls with effects.

Threefry maps a key and a 64-bit counter to 64 bits, and JAX counts the elements of the result in row-major order. So a
device computes its block from the counters of its elements, as ``jax._src.random`` does with
``jax_threefry_partitionable``; tests compare both bit by bit.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p

from meshdsl.ir.graph import Op
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.random import counted
from meshdsl.rules.registry import ONCE

# ---- High words of products ------------------------------------------------------------------------------------------
# XLA cannot compile its own operation (``lax.mulhi``) under ``shard_map``, so the local program
# multiplies half words, as by hand, each of which fits a word:
#
#     x = (a b), y = (c d):   x * y = ac << 2h  +  (ad + bc) << h  +  bd


@local("mulhi")
def mulhi(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The high word of a product; as unsigned, a negative operand is 2**bits too large."""
    x, y = arrays
    kind = jnp.iinfo(x.dtype)
    unsigned = jnp.dtype(f"uint{kind.bits}")
    high = high_word(x.astype(unsigned), y.astype(unsigned)).astype(x.dtype)
    if kind.min < 0:
        high = high - jnp.where(x < 0, y, 0) - jnp.where(y < 0, x, 0)
    return (high,)


def high_word(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the high word of the product of unsigned words."""
    half = jnp.asarray(x.dtype.itemsize * 4, x.dtype)
    mask = jnp.asarray((1 << x.dtype.itemsize * 4) - 1, x.dtype)
    a, b, c, d = x >> half, x & mask, y >> half, y & mask
    middle = (b * d >> half) + (a * d & mask) + (b * c & mask)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)


# ---- Random ----------------------------------------------------------------------------------------------------------


_WORD = jnp.uint32


@local("random_bits")
def random_bits(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The bits at this device's positions."""
    (keys,) = arrays
    whole, layout = op.outputs[0].shape, where.outputs[0]
    block = where.local_shape(layout, whole)
    made = block[len(keys.shape) :]
    if not counted(op) or block == whole:
        return bind(op, keys, shape=made)
    starts = [where.offset(layout, d, n) for d, n in enumerate(whole)]
    return (_threefry_bits(keys, _positions(starts, block, whole), op.params["bit_width"]),)


@local("iota_2x32_shape")
def counters(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """This device's positions in the whole array."""
    whole, layout = op.outputs[0].shape, where.outputs[0]
    starts = [where.offset(layout, d, n) for d, n in enumerate(whole)]
    return _positions(starts, where.local_shape(layout, whole), whole)


def _threefry_bits(key: jax.Array, counters: tuple[jax.Array, jax.Array], width: int) -> jax.Array:
    high, low = counters
    words = [jnp.broadcast_to(word, low.shape) for word in jax.random.key_data(key)]
    first, second = threefry2x32_p.bind(*words, high, low)  # type: ignore[no-untyped-call]
    return lax.convert_element_type(first ^ second, jnp.dtype(f"uint{width}"))


def _positions(starts: list[jax.Array], block: tuple[int, ...], whole: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Row-major positions of a block's elements in the whole array, as high and low words."""
    high = low = jnp.zeros(block, _WORD)
    for dim, (start, n) in enumerate(zip(starts, whole, strict=True)):
        at = start.astype(_WORD) + lax.broadcasted_iota(_WORD, block, dim)
        high, low = _times_plus(high, low, n, at)
    return high, low


def _times_plus(high: jax.Array, low: jax.Array, factor: int, term: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(high, low) * factor + term`` in 64 bits as two words; factor < 2**32."""
    by = _WORD(factor)
    product = low * by
    total = product + term
    return high * by + high_word(low, by) + (total < term).astype(_WORD), total


# ---- Effects ---------------------------------------------------------------------------------------------------------
# Calls with effects run once, on the first device.


@local(*ONCE)
def once(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The call on the first device, with whole operands; other devices return zeros."""
    first = where.index(tuple(where.sizes)) == 0
    nothing = tuple(jnp.zeros(v.shape, v.dtype) for v in op.outputs)
    made: tuple[jax.Array, ...] = lax.cond(first, lambda *xs: bind(op, *xs), lambda *xs: nothing, *arrays)
    return made
