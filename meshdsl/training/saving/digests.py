"""Digests of arrays that do not depend on how the arrays lie: what is saved on one mesh is compared on another.

The digest of an array is a sum, modulo 2^32, of its words, each times an odd number that follows from its position. A
sum is divided over devices like any other, so no array is gathered and no device reads more than its shard. A product
with an odd number is zero only if the word is, so a change of a single word is always seen; of changes to several,
about one in 2^32 is not (multilinear hashing: Carter and Wegman, Universal classes of hash functions, 1979). Floats
that are short in decimal have zeros in their low bits, to which the high ones are added first.

The parts of a sum can also be left to the host, so that no device waits for another one. Only then may a second thread
start the computation: programs that exchange data have to be started in one order on all devices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshdsl.ir.graph import element_bits

_SPREAD, _SHIFT = 0x9E3779B1, 15  # 2^32 divided by the golden ratio (Knuth), and half the bits of a word
WORD = 32  # bits
_LAUNCHED = 16  # arrays of one kind whose digests one program computes


class Digests:
    """Digests of arrays that devices compute, and which arrays are not finite; ``result`` waits for them.

    The arrays may be donated afterwards. Every process has to make this for the same arrays.

    Args:
      arrays: by name.
      in_parts: whether devices exchange nothing; for ``snapshot``s.
    """

    def __init__(self, arrays: Mapping[str, Any], in_parts: bool = False) -> None:
        compute = _partial_digests if in_parts else _digests
        self._started = [(names, compute(xs)) for names, xs in _batches(arrays)]

    def result(self) -> tuple[dict[str, str], list[str]]:
        """Return the digest of each array as text, and the names of arrays that hold NaNs or infinities."""
        digests: dict[str, str] = {}
        bad: list[str] = []
        for names, rows in self._started:
            parts = np.asarray(rows).reshape(-1, len(names), 2)
            for name, (digest, is_bad) in zip(names, parts.sum(0, np.uint64), strict=True):
                digests[name] = f"{digest % 2**WORD:08x}"
                bad += [name] * bool(is_bad)
        return digests, bad


def snapshot(arrays: Mapping[str, Any]) -> dict[str, jax.Array] | None:
    """Return copies that devices make in the background; None if the arrays are not all of CPU devices.

    The arrays may be donated afterwards: devices copy them before they do what is started next.
    """
    if not all(isinstance(x, jax.Array) and _is_on_host(x) for x in arrays.values()):
        return None
    return dict(chain.from_iterable(zip(names, _copies(xs), strict=True) for names, xs in _batches(arrays)))


def _is_on_host(x: jax.Array) -> bool:
    devices: Any = x.sharding.device_set
    kinds = {device.default_memory().kind for device in devices if device.platform == "cpu"}
    return kinds == {x.sharding.memory_kind} and isinstance(x.sharding, NamedSharding | SingleDeviceSharding)


def _batches(arrays: Mapping[str, Any]) -> Iterator[tuple[list[str], list[Any]]]:
    """Yield names and arrays of one kind: one launch takes many small ones, and a kind has one program."""
    alike: dict[Any, list[str]] = {}
    for name, x in arrays.items():
        alike.setdefault((jnp.shape(x), jnp.result_type(x), getattr(x, "sharding", None)), []).append(name)
    for names in alike.values():
        for i in range(0, len(names), _LAUNCHED):
            yield names[i : i + _LAUNCHED], [arrays[name] for name in names[i : i + _LAUNCHED]]


@jax.jit
def _copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(x) for x in arrays]


@jax.jit
def _digests(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return a row per array: its digest, and whether it holds NaNs or infinities."""
    return jnp.stack([_digest(x, x.shape) for x in arrays])


def _partial_digests(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return such rows of every device, for its shards; zeros where another device has the same shards."""
    sharding = arrays[0].sharding
    found: jax.Array = _rows_of_devices(arrays, sharding) if isinstance(sharding, NamedSharding) else _digests(arrays)
    return found


@partial(jax.jit, static_argnums=1)
def _rows_of_devices(arrays: Sequence[jax.Array], sharding: NamedSharding) -> jax.Array:
    mesh, shape = sharding.mesh, arrays[0].shape
    split = [axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in sharding.spec]

    def rows(blocks: Sequence[jax.Array]) -> jax.Array:
        first, stride = jnp.uint32(0), math.prod(shape)  # position of the first element of the blocks
        for axes, size, block in zip(split, shape, blocks[0].shape, strict=False):
            stride //= max(size, 1)
            if axes:
                first += jax.lax.axis_index(axes).astype(jnp.uint32) * np.uint32(block * stride % 2**WORD)
        others = tuple(axis for axis in mesh.axis_names if axis not in chain(*split))
        counts = jax.lax.axis_index(others) == 0 if others else True
        return jnp.where(counts, jnp.stack([_digest(x, shape, first) for x in blocks]), 0)[None]

    each = PartitionSpec(mesh.axis_names)
    found: jax.Array = jax.shard_map(rows, mesh=mesh, in_specs=sharding.spec, out_specs=each)(arrays)
    return found


def _digest(x: jax.Array, shape: Sequence[int], first: Any = 0) -> jax.Array:
    """Return the part of a digest for a block of an array of this shape, from this position."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        x = jax.device_put(x, jax.memory.Space.Device)
    words = _words(x)
    words ^= words >> WORD // 2
    whole = (*shape, *words.shape[x.ndim :])
    position = jnp.full(words.shape, first, jnp.uint32) * np.uint32(math.prod(whole[x.ndim :]))
    stride = 1
    for dim in reversed(range(words.ndim)):
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * np.uint32(stride % 2**WORD)
        stride *= whole[dim]
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
