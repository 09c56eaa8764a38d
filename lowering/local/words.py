"""High words of products.

XLA cannot compile its own operation (``lax.mulhi``) under ``shard_map``, so the local program
multiplies half words, as by hand, each of which fits a word:

    x = (a b), y = (c d):   x * y = ac << 2h  +  (ad + bc) << h  +  bd
"""

import jax
import jax.numpy as jnp

from meshdsl.ir import Op
from meshdsl.lowering.local.registry import Local, local


@local("mulhi")
def mulhi(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The high word; a negative operand is 2**bits too large when it is read as unsigned."""
    x, y = arrays
    kind = jnp.iinfo(x.dtype)
    unsigned = jnp.dtype(f"uint{kind.bits}")
    high = high_word(x.astype(unsigned), y.astype(unsigned)).astype(x.dtype)
    if kind.min < 0:
        high = high - jnp.where(x < 0, y, 0) - jnp.where(y < 0, x, 0)
    return (high,)


def high_word(x: jax.Array, y: jax.Array) -> jax.Array:
    """The high word of the product of unsigned words."""
    half = jnp.asarray(x.dtype.itemsize * 4, x.dtype)
    mask = jnp.asarray((1 << x.dtype.itemsize * 4) - 1, x.dtype)
    a, b, c, d = x >> half, x & mask, y >> half, y & mask
    middle = (b * d >> half) + (a * d & mask) + (b * c & mask)
    return a * c + (a * d >> half) + (b * c >> half) + (middle >> half)
