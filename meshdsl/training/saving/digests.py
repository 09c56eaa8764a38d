"""Digests of arrays that do not depend on how the arrays lie: what is saved on one mesh is compared on another.

The digest of an array is a sum, modulo 2^32, of its words, each times an odd number that follows from its position. A
sum is divided over devices like any other, so no array is gathered and no device reads more than its shard. A product
with an odd number is zero only if the word is, so a change of a single word is always seen; of changes to several,
about one in 2^32 is not (multilinear hashing: Carter and Wegman, Universal classes of hash functions, 1979). Floats
that are short in decimal have zeros in their low bits, to which the high ones are added first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir.graph import element_bits

_SPREAD, _SHIFT = 0x9E3779B1, 15  # 2^32 divided by the golden ratio (Knuth), and half the bits of a word
WORD = 32  # bits
_LAUNCHED = 16  # arrays of one kind whose digests one program computes


class Digests:
    """Digests of arrays that devices compute, and which arrays are not finite; ``result`` waits for them.

    The arrays may be donated afterwards. Every process has to make this for the same arrays.
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        alike: dict[Any, list[str]] = {}  # one launch takes many small arrays of one kind, which one program serves
        for name, x in arrays.items():
            alike.setdefault((jnp.shape(x), jnp.result_type(x), getattr(x, "sharding", None)), []).append(name)
        batches = [names[i : i + _LAUNCHED] for names in alike.values() for i in range(0, len(names), _LAUNCHED)]
        self._started = [(names, _digests([arrays[name] for name in names])) for names in batches]

    def result(self) -> tuple[dict[str, str], list[str]]:
        """Return the digest of each array as text, and the names of arrays that hold NaNs or infinities."""
        found = {name: row for names, rows in self._started for name, row in zip(names, np.asarray(rows), strict=True)}
        return {name: f"{digest:08x}" for name, (digest, _) in found.items()}, [
            n for n, (_, bad) in found.items() if bad
        ]


@jax.jit
def _digests(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return a row per array: its digest, and whether it holds NaNs or infinities."""
    return jnp.stack([_digest(x) for x in arrays])


def _digest(x: jax.Array) -> jax.Array:
    words = _words(x)
    words ^= words >> WORD // 2
    position, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for dim in reversed(range(words.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride % 2**WORD)
        stride *= words.shape[dim]
    factor = position * np.uint32(_SPREAD)
    factor = (factor ^ (factor >> _SHIFT)) | np.uint32(1)
    bad = ~jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.zeros((), bool)
    return jnp.stack([(words * factor).sum(dtype=jnp.uint32), bad.astype(jnp.uint32)])


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as an array of uint32, with a last dim of its own if one element has several."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(x.real), _words(x.imag)], -1)
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    bits = element_bits(x.dtype)
    word: Any = {4: jnp.uint4, 2: jnp.uint2}.get(bits) or jnp.dtype(f"uint{min(bits, WORD)}")
    return jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
