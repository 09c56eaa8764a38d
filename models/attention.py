"""Attention: every position of ``seq`` takes a mean of the values at those up to it, or at all.

Four ways with the same numbers:

    products  the weights ``[batch heads seq key]`` are tensors of the step like any other
    again     they are not kept for the backward pass but computed again (Korthikanti et al. 2022, selective)
    fused     one operation with a rule of its own, as kernels do it that never write the weights to memory
              (FlashAttention, Dao et al. 2022): the plan counts its products, half of them if it is causal, and reads
              queries, keys and values only; where ``seq`` is split, all keys and values are gathered
    masked    fused, by a kernel that also does the products that a causal mask then hides

Dims: ``heads`` of keys and values, ``queries`` that share one of them, if there are any, ``head`` inside one.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.custom_rules import rule

WAYS = ("products", "again", "fused", "masked")


def attention(
    query: md.Tensor, key: md.Tensor, value: md.Tensor, causal: bool = True, way: str = "products"
) -> md.Tensor:
    """``[batch seq heads (queries) head]``, as ``query`` is; ``key`` and ``value`` have no ``queries``.

    Args:
      causal: whether a position looks only at those up to it.
      way: one of ``WAYS``.
    """
    if way in ("fused", "masked"):
        return _fused(query, key, value, (_causal if way == "fused" else _masked) if causal else None)
    made = partial(_products, causal)
    return (md.remat(made) if way == "again" else made)(query, key, value)


def _products(causal: bool, query: md.Tensor, key: md.Tensor, value: md.Tensor) -> md.Tensor:
    key, value = (md.rename(x, seq="key") for x in (key, value))
    scores = md.dot(query, key, over="head") * key.shape["head"] ** -0.5
    if causal:
        scores = md.where(md.causal(scores.shape("seq key")), scores, -1e9)
    return md.dot(md.softmax(scores, over="key"), value, over="key")


def _fused(query: md.Tensor, key: md.Tensor, value: md.Tensor, causal: Any) -> md.Tensor:
    grouped = "queries" in query.dims
    dims = "batch seq heads queries head" if grouped else _DIMS
    queries, *others = (md.order(x, names).array for x, names in ((query, dims), (key, _DIMS), (value, _DIMS)))
    given = queries if grouped else queries[:, :, :, None]
    found = causal(given, *others, jnp.arange(given.shape[1])) if causal else _whole(given, *others)
    return md.named(found if grouped else found[:, :, :, 0], dims)


_DIMS = "batch seq heads head"


def _backwards(query: Any, key: Any, value: Any, position: Any) -> Any:
    return _weighted(query, key, value, position[:, None] >= jnp.arange(key.shape[1]))


_RULE = "b s h q _, b _ h _, b _ h e, s -> b s h q e"
_causal, _masked = rule(_RULE, share=0.5)(_backwards), rule(_RULE)(_backwards)


@rule("b s h q _, b _ h _, b _ h e -> b s h q e")
def _whole(query: Any, key: Any, value: Any) -> Any:
    return _weighted(query, key, value, True)


def _weighted(query: Any, key: Any, value: Any, seen: Any) -> Any:
    scores = jnp.einsum("bshqd,bthd->bhqst", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bhqst,bthd->bshqd", jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1), value)
