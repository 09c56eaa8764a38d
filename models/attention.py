"""Softmax attention, causal or bidirectional, in seven variants with equal results, or the one that is planned fastest.

    products    the attention weights ``[batch heads seq key]`` are ordinary tensors of the step
    recomputed  the weights are recomputed in the backward pass (selective recomputation, Korthikanti et al. 2022)
    fused       one operation with a rule of its own: the plan counts its matmuls, half of them if causal, memory
                traffic of queries, keys and values only, and room for the weights while it runs; if ``seq`` is split,
                all keys and values are gathered
    flash       what runs is ``fused``; the plan predicts a kernel that never writes the weights to memory
                (FlashAttention, Dao et al. 2022), which is not part of this package
    masked      ``flash``, by a kernel that also computes the products that a causal mask discards
    ring        blocks of keys and values visit the queries of a split ``seq`` (``models.ring_attention``); if causal,
                the batch must be in zig-zag order (``zigzag_batch``), else positions attend to later ones, without
                an error
    auto        ``models.dot_product_attention``, on a batch in the usual order: the planner takes plain attention,
                recomputed or not, blocks of keys on each device, or a ring of ``blocks`` blocks
    fused_ring  what runs is ``ring``; the plan predicts a kernel that keeps attention weights out of memory during each
                visit, which is not part of this package

Dims: ``heads`` of keys and values, ``queries`` per key-value head (grouped-query attention), ``head`` for the elements
of one head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.custom_rules import rule
from meshdsl.errors import ArgumentError, nearest
from meshdsl.models.dot_product_attention import dot_product_attention
from meshdsl.models.ring_attention import ring_attention

RINGS = ("ring", "fused_ring")
VARIANTS = ("products", "recomputed", "fused", "flash", "masked", *RINGS, "auto")
BLOCKED = (*RINGS, "auto")


def attention(
    query: md.Tensor, key: md.Tensor, value: md.Tensor, causal: bool = True, variant: str = "products", blocks: int = 1
) -> md.Tensor:
    """Returns the attention output, with the dims of ``query``.

    Args:
      query: ``[batch seq heads head]`` or ``[batch seq heads queries head]``.
      key: ``[batch seq heads head]``.
      value: ``[batch seq heads head]``.
      causal: whether a position attends only to itself and earlier ones.
      variant: one of ``VARIANTS``.
      blocks: of a ring, the number of devices that ``seq`` is split over.

    Raises:
      ArgumentError: ``variant`` is none of them, or has no blocks; the sequence does not divide into those of a ring.
    """
    if variant not in VARIANTS:
        names = ", ".join(map(repr, VARIANTS))
        raise ArgumentError(f"no attention variant {variant!r}{nearest(variant, VARIANTS)}; it is one of {names}")
    if blocks != 1 and variant not in BLOCKED:
        raise ArgumentError(
            f"blocks={blocks}: attention variant {variant!r} has none, only {', '.join(map(repr, BLOCKED))}"
        )
    if variant == "auto":
        return _on_arrays(partial(_fastest, causal, blocks), query, key, value)
    if variant in _KERNELS:
        over_all, backwards = _KERNELS[variant]
        return _on_arrays(partial(_on_positions, backwards) if causal else over_all, query, key, value)
    if variant in RINGS:
        ring = partial(ring_attention, blocks=blocks, causal=causal, fused=variant == "fused_ring")
        return _on_arrays(ring, query, key, value)
    attend = partial(_products, causal)
    return (md.remat(attend) if variant == "recomputed" else attend)(query, key, value)


def zigzag_blocks(variant: str, blocks: int) -> int:
    """Returns the blocks of the zig-zag order that a causal batch has to be in; 1 for the usual order.

    Example:
      >>> zigzag_blocks("ring", 8), zigzag_blocks("auto", 8)
      (8, 1)
    """
    return blocks if variant in RINGS else 1


def _fastest(causal: bool, blocks: int, query: Any, key: Any, value: Any) -> Any:
    heads = query.reshape(*query.shape[:2], -1, query.shape[-1])
    return dot_product_attention(heads, key, value, is_causal=causal, blocks=blocks).reshape(query.shape)


def _products(causal: bool, query: md.Tensor, key: md.Tensor, value: md.Tensor) -> md.Tensor:
    key, value = (md.rename(x, seq="key") for x in (key, value))
    scores = md.dot(query, key, over="head") * key.shape["head"] ** -0.5
    if causal:
        scores = md.where(md.causal(scores.shape("seq key")), scores, -1e9)
    return md.dot(md.softmax(scores, over="key"), value, over="key")


def _on_arrays(attend: Callable[..., Any], query: md.Tensor, key: md.Tensor, value: md.Tensor) -> md.Tensor:
    grouped = "queries" in query.dims
    dims = "batch seq heads queries head" if grouped else _DIMS
    queries, *others = (md.order(x, names).array for x, names in ((query, dims), (key, _DIMS), (value, _DIMS)))
    out = attend(queries if grouped else queries[:, :, :, None], *others)
    return md.named(out if grouped else out[:, :, :, 0], dims)


def _on_positions(kernel: Any, query: Any, key: Any, value: Any) -> Any:
    return kernel(query, key, value, jnp.arange(query.shape[1]))


_DIMS = "batch seq heads head"


# The names of the next two functions are part of the fingerprints of programs, which saved plans are compared by.
def _backwards(query: Any, key: Any, value: Any, position: Any) -> Any:
    return _attend(query, key, value, position[:, None] >= jnp.arange(key.shape[1]))


_RULE = "b s h q _, b _ h _, b _ h e, s -> b s h q e"
_causal = rule(_RULE, share=0.5)(_backwards)


def _whole(query: Any, key: Any, value: Any) -> Any:
    return _attend(query, key, value, True)


_WHOLE_RULE = "b s h q _, b _ h _, b _ h e -> b s h q e"
_bidirectional = rule(_WHOLE_RULE)(_whole)
_without_weights = rule(_WHOLE_RULE, temporaries=False)(_whole)
_KERNELS = {  # bidirectional, and causal
    "fused": (_bidirectional, _causal),
    "flash": (_without_weights, rule(_RULE, share=0.5, temporaries=False)(_backwards)),
    "masked": (_without_weights, rule(_RULE, temporaries=False)(_backwards)),
}


def _attend(query: Any, key: Any, value: Any, mask: Any) -> Any:
    scores = jnp.einsum("bshqd,bthd->bhqst", query, key) * query.shape[-1] ** -0.5
    return jnp.einsum("bhqst,bthd->bshqd", jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1), value)
