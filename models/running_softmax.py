"""Attention in visits: keys and values meet the queries block by block, and no array of all attention weights exists.

The softmax is a running one (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018): of every query
the largest score so far, the sum of the exponentials of the scores less that one, and the sum of the values with these
weights. The backward pass computes the scores of a visit again (FlashAttention, Dao et al. 2022). A visit of more than
``BLOCK`` keys is a loop over blocks of them (Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021).

A score that a mask takes out is not minus infinity but the large negative number of ``jax.nn.dot_product_attention``,
so that a query without any key has the mean of all values that it meets, and no NaN.

Dims of queries are ``[... heads queries s head]``, those of keys and values ``[... heads t head]``, of which each head
serves ``queries`` of the queries, and those of scores ``[... heads queries s t]``.
"""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 1024  # keys whose scores are computed at once
MASKED = -0.7 * float(np.finfo(np.float32).max)  # the score of jax.nn.dot_product_attention
LEAST = float(np.finfo(np.float32).min)  # where a largest score begins: no finite score is below it


class RunningSoftmax(NamedTuple):
    """Softmax over the keys so far.

    Args:
      top: the largest score, ``[... heads queries s]``.
      total: the sum of ``exp(score - top)``, ``[... heads queries s]``.
      made: the sum of values with these weights, ``[... heads queries s head]``.
    """

    top: jax.Array
    total: jax.Array
    made: jax.Array

    @classmethod
    def of_nothing(cls, query: jax.Array, dtype: Any) -> "RunningSoftmax":
        """Returns the softmax before the first visit."""
        rows = jnp.zeros(query.shape[:-1], dtype)
        return cls(jnp.full_like(rows, LEAST), rows, jnp.zeros(query.shape, dtype))

    @property
    def mean(self) -> jax.Array:
        """The mean of the values, which is the result of attention."""
        return self.made / self.total[..., None]


class Row(NamedTuple):
    """A query and what its gradient is computed from.

    Args:
      query: ``[... heads queries s head]``.
      cotangent: of the result, like ``query``.
      top: of the softmax over all keys.
      total: of the softmax over all keys.
      inner: the inner product of the result and its cotangent.
    """

    query: jax.Array
    cotangent: jax.Array
    top: jax.Array
    total: jax.Array
    inner: jax.Array


class Sight(NamedTuple):
    """Which keys a query sees, by their positions.

    Args:
      causal: those up to its own position.
      window: those at most so many positions before and after its own.
    """

    causal: bool = False
    window: tuple[int, int] | None = None


class Visit(NamedTuple):
    """Keys, values, and what is known of their scores; None where there is nothing.

    Args:
      key: ``[... heads t head]``.
      value: ``[... heads t head]``.
      queries_at: positions of the queries, broadcast to ``[... heads queries s t]``.
      keys_at: positions of the keys, broadcast like these.
      bias: is added to the scores; sizes may be 1, but for ``t``.
      mask: true for the scores that are kept; sizes may be 1.
      lengths: only positions below are seen; sizes may be 1.
    """

    key: jax.Array
    value: jax.Array
    queries_at: jax.Array
    keys_at: jax.Array
    bias: jax.Array | None = None
    mask: jax.Array | None = None
    lengths: jax.Array | None = None

    def scores(self, query: jax.Array, scale: float, keep: jax.Array | None) -> jax.Array:
        """Returns the scores of queries."""
        scores = product("...hqsd,...htd->...hqst", query, self.key) * scale
        scores = scores if self.bias is None else (scores + self.bias).astype(scores.dtype)
        return scores if keep is None else jnp.where(keep, scores, MASKED)

    def kept(self, sight: Sight) -> jax.Array | None:
        """Returns which scores are kept, broadcast to them; None for all.

        Positions wait for the keys: where a loop over layers is differentiated, jax moves out of it whatever depends on
        none of its values, here the masks of all blocks at once.
        """
        keys_at, _ = lax.optimization_barrier((self.keys_at, self.key))
        masks = [] if self.mask is None else [self.mask]
        if self.lengths is not None:
            masks.append(keys_at < self.lengths)
        if sight.causal:
            masks.append(self.queries_at >= keys_at)
        if sight.window is not None:
            left, right = sight.window
            masks += [self.queries_at <= keys_at + left, self.queries_at >= keys_at - right]
        return reduce(jnp.logical_and, masks) if masks else None


class Gradients(NamedTuple):
    """Gradients of a visit, at least in float32."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


def absorb(so_far: RunningSoftmax, query: jax.Array, visit: Visit, scale: float, sight: Sight) -> RunningSoftmax:
    """Returns the running softmax after a visit."""

    def meet(so_far: RunningSoftmax, block: Visit) -> tuple[RunningSoftmax, None]:
        scores = block.scores(query, scale, block.kept(sight))
        top = jnp.maximum(so_far.top, jnp.max(scores, -1))
        weights, left = jnp.exp(scores - top[..., None]), jnp.exp(so_far.top - top)
        more = product("...hqst,...htd->...hqsd", weights.astype(block.value.dtype), block.value)
        total, made = so_far.total * left + jnp.sum(weights, -1), so_far.made * left[..., None] + more
        return RunningSoftmax(top, total, made), None

    absorbed: RunningSoftmax
    absorbed, _ = _over_blocks(meet, so_far, visit)
    return absorbed


def differentiate(row: Row, visit: Visit, scale: float, sight: Sight) -> Gradients:
    """Returns the gradients of a visit."""

    def meet(queries: jax.Array, block: Visit) -> tuple[jax.Array, Any]:
        keep = block.kept(sight)
        weights = jnp.exp(block.scores(row.query, scale, keep) - row.top[..., None]) / row.total[..., None]
        value = product("...hqst,...hqsd->...htd", weights.astype(block.value.dtype), row.cotangent)
        ahead = product("...hqsd,...htd->...hqst", row.cotangent, block.value)
        scores = weights * (ahead - row.inner[..., None])
        scores = scores if keep is None else jnp.where(keep, scores, 0)
        bias = None if block.bias is None else _summed_to(block.bias.shape, scores)
        scaled = (scores * scale).astype(block.key.dtype)
        key = product("...hqst,...hqsd->...htd", scaled, row.query)
        return queries + product("...hqst,...htd->...hqsd", scaled, block.key), (key, value, bias)

    start = jnp.zeros(row.query.shape, wide(row.query, visit.key))
    queries, (keys, values, bias) = _over_blocks(meet, start, visit)
    return Gradients(queries, keys, values, bias)


def product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns an einsum, at least in float32."""
    return jnp.einsum(dims, a, b, preferred_element_type=wide(a, b))


def wide(*arrays: jax.Array) -> Any:
    """Returns the dtype of scores, running sums and gradients: at least float32."""
    return jnp.result_type(*arrays, jnp.float32)


# ---- Blocks of keys --------------------------------------------------------------------------------------------------

_ALONG_KEYS = {"key": -2, "value": -2, "keys_at": -1, "bias": -1, "mask": -1}  # fields of a visit, and their axis


def _over_blocks(meet: Callable[[Any, Visit], tuple[Any, Any]], carry: Any, visit: Visit) -> tuple[Any, Any]:
    """Returns what is carried over blocks of a visit's keys, and gradients per key, if ``meet`` returns any.

    Blocks are of one size; where they do not divide, the rest comes last.
    """
    length = visit.key.shape[-2]
    count = -(-length // BLOCK)
    if count <= 1:
        return meet(carry, visit)
    size = length // count
    given = {name: (getattr(visit, name), axis) for name, axis in _ALONG_KEYS.items()}
    long = {name: (x, axis) for name, (x, axis) in given.items() if x is not None and x.shape[axis] == length}
    blocks = {name: _stacked(x, axis, count, size) for name, (x, axis) in long.items()}
    carry, made = lax.scan(lambda carry, block: meet(carry, visit._replace(**block)), carry, blocks)
    axes = [_ALONG_KEYS[name] for name in ("key", "value", "bias")][: len(made or ())]
    joined = [None if x is None else _unstacked(x, axis) for x, axis in zip(made or (), axes, strict=True)]
    if length % count:
        rest = {name: lax.slice_in_dim(x, count * size, length, axis=axis) for name, (x, axis) in long.items()}
        carry, made = meet(carry, visit._replace(**rest))
        last = zip(joined, made or (), axes, strict=True)
        joined = [None if x is None else jnp.concatenate([x, more], axis) for x, more, axis in last]
    return carry, joined


def _stacked(x: jax.Array, axis: int, count: int, size: int) -> jax.Array:
    """Returns the blocks along an axis, ``[block ...]``."""
    axis += x.ndim
    x = lax.slice_in_dim(x, 0, count * size, axis=axis)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _unstacked(blocks: jax.Array, axis: int) -> jax.Array:
    """Returns the array of which these are the blocks along an axis."""
    axis += blocks.ndim - 1
    x = jnp.moveaxis(blocks, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _summed_to(shape: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Returns the sum over the dims along which an array of a shape was broadcast."""
    return jnp.sum(x, [i for i, size in enumerate(shape) if size != x.shape[i]], keepdims=True)
