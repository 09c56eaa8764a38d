"""Ring attention: the sequence is split into blocks, and blocks of keys and values visit the queries one after another.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), with the running softmax of
Milakov and Gimelshein (2018). The functions see whole arrays ``[batch blocks ...]``: one hop of the ring is
``jnp.roll`` by one block, which is a collective-permute where each device has one block. The backward pass computes the
scores again from the logarithms of the softmax's sums, and the gradients of keys and values travel with their blocks,
so that no device ever holds more than two blocks of each.

    hop 0        every block's queries meet its own keys
    hop t        block i's queries meet the keys of block i - t      n - 1 hops for n blocks
    backward     the same, and gradients: n - 1 hops, the last of which takes them home

A causal mask would leave late blocks with most of the work. In the zig-zag order (Llama Team, "The Llama 3 Herd of
Models", 2024, section 3.3.2) block i has the chunks i and 2n - 1 - i of 2n, so that every visit costs two products of
chunks, without a mask:

    a block before one's own     all queries meet its early chunk
    a block after one's own      the late queries meet all of its keys

The order of a batch is not visible in its arrays: on one in the usual order, causal attention sees later tokens,
without an error. ``zigzag_batch`` permutes a batch. Of a batch in the usual order, the ring takes blocks as they are
(``order="usual"``): every visit costs four products of chunks, and those of later blocks are not used. Or the arguments
are permuted on the way in, and the result on the way out (``order="permuted"``), which pays where sequences are long.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshdsl as md
from meshdsl.custom_rules import rule
from meshdsl.errors import ArgumentError, nearest

# A running softmax: maximum of scores and sum of exponentials, [... s], and weighted values, [... s head].
Softmax = tuple[jax.Array, jax.Array, jax.Array]
Meetings = list[tuple[int, int]]
Batch = TypeVar("Batch")

PAIRS = "batch seq part pair heads s head"  # of keys and values, seq being the blocks

# A block has one part, or an early and a late one. A meeting is (part of the queries, part of the keys).
CHOSEN = -1  # the early part of blocks after the visiting one, the late part of blocks before it
OWN: dict[str, Meetings] = {"whole": [(0, 0)], "usual": [(0, 0)], "zigzag": [(0, 0), (1, 1), (1, 0)]}
VISIT: dict[str, Meetings] = {"whole": [(0, 0)], "usual": [(0, 0)], "zigzag": [(1, 0), (CHOSEN, CHOSEN)]}
ORDERS = ("zigzag", "usual", "permuted")


def zigzag(seq: int, blocks: int) -> np.ndarray:
    """Returns the position of every place of a sequence in zig-zag order, ``[seq]``: ``x[:, zigzag(8, 2)]``.

    Block i of the result has the chunks i and 2n - 1 - i of the sequence's 2n; ``np.argsort`` of it is the way back.

    Args:
      seq: positions.
      blocks: n, the number of blocks of the ring.

    Raises:
      ArgumentError: the sequence does not divide into chunks.

    Example:
      >>> zigzag(8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    order: np.ndarray = place(np.arange(seq), seq, blocks)
    return order


def zigzag_batch(batch: Batch, blocks: int) -> Batch:
    """Returns a batch in zig-zag order: tokens, targets and whatever else has one element per token.

    Args:
      batch: a tree of arrays ``[batch seq ...]``, named or not; numpy's stay numpy's.
      blocks: as in ``zigzag``.

    Raises:
      ArgumentError: an array has fewer than two dims, or its sequence does not divide into chunks.

    Example:
      >>> zigzag_batch({"inputs": np.arange(8)[None]}, 2)
      {'inputs': array([[0, 1, 6, 7, 2, 3, 4, 5]])}
    """

    def permuted(x: Any) -> Any:
        if x.ndim < 2:
            raise ArgumentError(f"zigzag_batch: an array of shape {x.shape} has no dims [batch seq ...]")
        return x[:, zigzag(x.shape[1], blocks)]

    made: Batch = jax.tree.map(permuted, batch)
    return made


def place(index: Any, seq: int, blocks: int) -> Any:
    """Returns the positions of ``zigzag`` at some places, an array or a named tensor of integers of the same shape.

    Raises:
      ArgumentError: as ``zigzag``.

    Example:
      >>> place(np.array([2, 3]), 8, 2)
      array([6, 7])
    """
    chunk = chunk_length(seq, 2 * blocks)
    block, rest = index // (2 * chunk), index % (2 * chunk)
    late, offset = rest // chunk, rest % chunk
    return (block + late * (2 * blocks - 1 - 2 * block)) * chunk + offset


def chunk_length(seq: int, chunks: int) -> int:
    """Returns the positions per chunk.

    Raises:
      ArgumentError: the sequence does not divide into so many chunks.

    Example:
      >>> chunk_length(96, 16)
      6
    """
    if chunks < 1:
        raise ArgumentError(f"blocks: a ring has at least one, not {chunks}")
    if seq % chunks:
        below = seq // chunks * chunks
        nearest = " or ".join(str(n) for n in (below, below + chunks) if n)
        raise ArgumentError(f"ring attention: seq={seq} does not divide into {chunks} chunks; the nearest is {nearest}")
    return seq // chunks


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: int,
    causal: bool = True,
    layout: str = "",
    fused: bool = False,
    order: str = "zigzag",
) -> jax.Array:
    """Returns softmax attention, computed block by block, like ``query``.

    **If causal, batches must be in zig-zag order** (``zigzag_batch``), unless ``order`` says otherwise. On one in the
    usual order, positions attend to later ones, without an error.

    Args:
      query: ``[batch seq heads queries head]``; ``queries`` share the keys and values of a head.
      key: ``[batch seq heads head]``.
      value: ``[batch seq heads head]``.
      blocks: of the ring, the number of devices that the sequence is split over.
      causal: whether a position attends only to itself and earlier ones.
      layout: of the visiting keys and values, ``[batch seq part pair heads s head]`` with one place of ``seq`` per
        block, such as ``"model=S(seq)"``. Axes that split ``batch``, ``seq`` or ``heads`` split queries and results,
        too. Besides, ``md.Rules(activations=...)`` apply to each hop. An axis that neither names is planned: if
        memory allows it, one gather may be cheaper than the hops.
      fused: the plan counts each visit as one operation, as of a kernel that never writes attention weights to memory.
        There is no such kernel here: what runs is the same either way.
      order: of the sequence if causal, and of the result: that of ``zigzag(seq, blocks)``; ``"usual"``, where half of
        the work of visits is not used; or ``"permuted"``, the usual one, put in zig-zag order and back in here.

    Scores and running sums are float32, or the dtype of the arguments where that is wider.

    Raises:
      ArgumentError: the shapes are not those of self-attention with one head size; the sequence does not divide into
        blocks, or into two chunks per block if causal.

    Example:
      >>> query, key, value = jnp.ones((2, 64, 2, 1, 8)), jnp.ones((2, 64, 2, 8)), jnp.ones((2, 64, 2, 8))
      >>> ring_attention(query, key, value, blocks=4, layout="seq=S(seq)").shape
      (2, 64, 2, 1, 8)
    """
    _check(query, key, value)
    if order not in ORDERS:
        known = ", ".join(map(repr, ORDERS))
        raise ArgumentError(f"order: no order {order!r}{nearest(order, ORDERS)}; it is one of {known}")
    is_permuted = causal and order == "permuted"
    if is_permuted:
        query, key, value = (_permuted(x, zigzag(2 * blocks, blocks)) for x in (query, key, value))
    batch, seq, heads, queries, head = query.shape
    mode = "whole" if not causal else "usual" if order == "usual" else "zigzag"
    parts = 2 if mode == "zigzag" else 1
    chunk = chunk_length(seq, parts * blocks)
    rows = jnp.moveaxis(query.reshape(batch, blocks, parts, chunk, heads, queries, head), 3, 5)
    pairs = jnp.stack([x.reshape(batch, blocks, parts, chunk, heads, head) for x in (key, value)], 3)
    out = _attend(mode, layout, fused, rows, jnp.moveaxis(pairs, 4, 5))
    out = jnp.moveaxis(out, 5, 3).reshape(query.shape)
    return _permuted(out, np.argsort(zigzag(2 * blocks, blocks))) if is_permuted else out


def _permuted(x: jax.Array, order: np.ndarray) -> jax.Array:
    """Returns ``[batch seq ...]`` with its chunks in another order."""
    chunks = x.reshape(x.shape[0], order.size, -1, *x.shape[2:])
    return chunks[:, order].reshape(x.shape)


def _check(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
    """Raises ArgumentError unless the shapes are those of self-attention with one head size."""
    if query.ndim != 5:
        remedy = "; without grouped queries, give query[:, :, :, None]" if query.ndim == 4 else ""
        raise ArgumentError(f"query: shape {query.shape} is not [batch seq heads queries head]{remedy}")
    wanted = (*query.shape[:3], query.shape[4])
    wrong = [f"{name} {x.shape}" for name, x in (("key", key), ("value", value)) if x.shape != wanted]
    if wrong:
        raise ArgumentError(
            f"{', '.join(wrong)}: must be [batch seq heads head] {wanted}, to fit query {query.shape}; a ring is "
            "self-attention with one head size, for others use models.attention with variant='products' or 'fused'"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(mode: str, layout: str, fused: bool, query: jax.Array, pairs: jax.Array) -> jax.Array:
    """Returns the output, like ``query``.

    Args:
      mode: a key of ``OWN``: all positions attend to all, or only to earlier ones, in the usual order or in zig-zag
        order, where blocks have two parts.
      layout: of ``pairs`` during the visits.
      fused: whether a visit is one operation.
      query: ``[batch seq part heads queries s head]``.
      pairs: keys and values, ``[batch seq part pair heads s head]``.
    """
    return _forward(mode, layout, fused, query, pairs)[0]


def _forward(mode: str, layout: str, fused: bool, query: jax.Array, pairs: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the output, and what the backward pass reads."""
    pairs = _constrained_pairs(pairs, layout)
    queries = _constrained_queries(_parts(query), layout)

    def meet(states: Any, pairs: jax.Array, meetings: Meetings, own: bool = False, after: Any = None) -> Any:
        for q, k in meetings:
            absorb = _ABSORB[fused, mode != "whole" and own and q == k]
            before = _pick(states, q, after)
            made = absorb(*before, _pick(queries, q, after), _pick(_parts(pairs), k, after))
            if mode == "usual" and not own:
                made = jax.tree.map(partial(_choose, after), made, before)
            states = _put(states, q, after, made)
        return _constrained_queries(states, layout)

    def visit(carry: Any, hop: jax.Array) -> Any:
        states, pairs = carry
        pairs = _hop(pairs, layout)
        return (meet(states, pairs, VISIT[mode], after=_after(hop, query)), pairs), None

    wide = _wide(query, pairs)
    zeros = [jnp.zeros(x.shape, wide) for x in queries]
    nothing = [(jnp.full_like(x[..., 0], -jnp.inf), x[..., 0], x) for x in zeros]
    (states, _), _ = lax.scan(visit, (meet(nothing, pairs, OWN[mode], own=True), pairs), _hops(query))
    out = jnp.stack([(made / total[..., None]).astype(query.dtype) for _, total, made in states], 2)
    return out, (query, pairs, out, [top + jnp.log(total) for top, total, _ in states])


def _backward(mode: str, layout: str, fused: bool, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of queries and pairs."""
    query, pairs, out, sums = saved
    wide = _wide(query, pairs)
    inner = jnp.sum(cotangent.astype(wide) * out, -1)
    rows = list(zip(_parts(query), _parts(cotangent), sums, _parts(inner), strict=True))
    rows, pairs = _constrained_queries(rows, layout), _constrained_pairs(pairs, layout)

    def meet(grads: Any, pairs: jax.Array, meetings: Meetings, own: bool = False, after: Any = None) -> Any:
        queries, others = map(_parts, grads)
        for q, k in meetings:
            differentiate = _DIFFERENTIATE[fused, mode != "whole" and own and q == k]
            made = differentiate(*_pick(rows, q, after), _pick(_parts(pairs), k, after))
            if mode == "usual" and not own:
                made = [_choose(after, x, jnp.zeros_like(x)) for x in made]
            queries = _put(queries, q, after, _pick(queries, q, after) + made[0])
            others = _put(others, k, after, _pick(others, k, after) + made[1])
        return jnp.stack(_constrained_queries(queries, layout), 2), jnp.stack(others, 2)

    def visit(carry: Any, hop: jax.Array) -> Any:
        queries, pairs, others = carry
        pairs = _hop(pairs, layout)
        queries, others = meet((queries, others), pairs, VISIT[mode], after=_after(hop, query))
        return (queries, pairs, _hop(others, layout)), None

    zeros = jnp.zeros(pairs.shape, wide)
    queries, own = meet((jnp.zeros(query.shape, wide), zeros), pairs, OWN[mode], own=True)
    (queries, _, others), _ = lax.scan(visit, (queries, pairs, zeros), _hops(query))
    return queries.astype(query.dtype), (own + others).astype(pairs.dtype)


_attend.defvjp(_forward, _backward)


def _absorb(masked: bool, top: Any, total: Any, made: Any, query: Any, pair: Any) -> Softmax:
    """Returns the running softmax after more keys and values."""
    scores = _scores(masked, query, pair)
    new = jnp.maximum(top, jnp.max(scores, -1))
    weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
    more = _product("...hqst,...htd->...hqsd", weights.astype(pair.dtype), pair[:, :, 1])
    return new, total * kept + jnp.sum(weights, -1), made * kept[..., None] + more


def _differentiate(masked: bool, query: Any, cotangent: Any, sums: Any, inner: Any, pair: Any) -> Any:
    """Returns the gradients of a part of the queries and of a pair of keys and values, at least float32."""
    weights = jnp.exp(_scores(masked, query, pair) - sums[..., None])
    value = _product("...hqst,...hqsd->...htd", weights.astype(pair.dtype), cotangent)
    ahead = _product("...hqsd,...htd->...hqst", cotangent, pair[:, :, 1])
    scores = (weights * (ahead - inner[..., None]) * query.shape[-1] ** -0.5).astype(pair.dtype)
    key = _product("...hqst,...hqsd->...htd", scores, query)
    return _product("...hqst,...htd->...hqsd", scores, pair[:, :, 0]), jnp.stack([key, value], 2)


def _scores(masked: bool, query: jax.Array, pair: jax.Array) -> jax.Array:
    """Returns the scores of a part, or those that a causal mask keeps if both sides have the same positions."""
    scores = _product("...hqsd,...htd->...hqst", query, pair[:, :, 0]) * query.shape[-1] ** -0.5
    return jnp.where(jnp.tri(query.shape[-2], dtype=bool), scores, -jnp.inf) if masked else scores


def _product(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(dims, a, b, preferred_element_type=_wide(a, b))


def _wide(*arrays: jax.Array) -> Any:
    """Returns the dtype of scores, running sums and gradients: at least float32."""
    return jnp.result_type(*arrays, jnp.float32)


def _of_visits(function: Callable[..., Any], text: str) -> dict[tuple[bool, bool], Any]:
    """Returns a function of a visit by whether it is fused and masked."""
    found: dict[tuple[bool, bool], Any] = {}
    for masked in (False, True):
        found[False, masked] = partial(function, masked)
        found[True, masked] = rule(text, share=0.5 if masked else 1.0)(wraps(function)(partial(function, masked)))
    return found


_ABSORB = _of_visits(
    _absorb, "b n h _ _, b n h _ _, b n h _ _ _, b n h _ _ _, b n _ h _ _ -> b n h _ _, b n h _ _, b n h _ _ _"
)
_DIFFERENTIATE = _of_visits(
    _differentiate, "b n h _ _ _, b n h _ _ _, b n h _ _, b n h _ _, b n _ h _ _ -> b n h _ _ _, b n _ h _ _"
)


def _hop(pairs: jax.Array, layout: str) -> jax.Array:
    """Returns every block in the place of the next one."""
    return _constrained_pairs(md.roll(md.named(pairs, PAIRS), 1, "seq").array, layout)


def _constrained_pairs(pairs: jax.Array, layout: str) -> jax.Array:
    made: jax.Array = md.constrain(md.named(pairs, PAIRS), layout).array
    return made


def _constrained_queries(parts: Any, layout: str) -> Any:
    """Returns parts of queries, or of results per query, split over the axes that split the same dims of the pairs."""
    stated, dims = md.Layout.of(layout).named(PAIRS.split()), "batch seq heads queries s head".split()
    shared = md.Layout(**{axis: md.S(dim) for dim in ("batch", "seq", "heads") for axis in stated.splitting(dim)})
    return jax.tree.map(lambda x: md.constrain(md.named(x, dims[: x.ndim]), shared).array, parts)


def _hops(query: jax.Array) -> jax.Array:
    return jnp.arange(1, query.shape[1])


def _after(hop: jax.Array, query: jax.Array) -> jax.Array:
    """Returns per block whether it comes after the one that visits it, ``[block]``."""
    return jnp.arange(query.shape[1]) >= hop


def _parts(x: jax.Array) -> list[jax.Array]:
    return [x[:, :, i] for i in range(x.shape[2])]


def _pick(parts: list[Any], which: int, after: jax.Array) -> Any:
    """Returns one part of every block; parts may be trees of arrays."""
    return jax.tree.map(partial(_choose, after), *parts) if which == CHOSEN else parts[which]


def _put(parts: list[Any], which: int, after: jax.Array, new: Any) -> list[Any]:
    """Returns the parts with ``new`` in place of the one that was picked."""
    if which != CHOSEN:
        return [*parts[:which], new, *parts[which + 1 :]]
    early, late = parts
    choose = partial(_choose, after)
    return [jax.tree.map(choose, new, early), jax.tree.map(choose, late, new)]


def _choose(after: jax.Array, early: jax.Array, late: jax.Array) -> jax.Array:
    return jnp.where(after.reshape(-1, *[1] * (early.ndim - 2)), early, late)
