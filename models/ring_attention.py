"""Ring attention: the sequence is split into blocks, and blocks of keys and values visit the queries one after another.

Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023), with a running softmax
(``models.running_softmax``). The functions see whole arrays ``[batch blocks ...]``: one hop of the ring is
``jnp.roll`` by one block, which is a collective-permute where each device has one block. The backward pass computes the
scores again, and the gradients of keys and values travel with their blocks, so that no device ever holds more than two
blocks of each.

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

In a ring of one block nothing hops: it is blockwise attention on every device, with whichever keys the planner brings
there, all of them or all positions of some heads.
"""

from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import meshdsl as md
from meshdsl.custom_rules import rule
from meshdsl.errors import ArgumentError, nearest
from meshdsl.models.running_softmax import Row, RunningSoftmax, Sight, Visit, absorb, differentiate, wide

Meetings = list[tuple[int, int]]
Batch = TypeVar("Batch")

PAIRS = "batch seq part pair heads s head"  # of keys and values, seq being the blocks

# A block has one part, or an early and a late one. A meeting is (part of the queries, part of the keys).
CHOSEN = -1  # the early part of blocks after the visiting one, the late part of blocks before it
OWN: dict[str, Meetings] = {"whole": [(0, 0)], "usual": [(0, 0)], "zigzag": [(0, 0), (1, 1), (1, 0)]}
VISIT: dict[str, Meetings] = {"whole": [(0, 0)], "usual": [(0, 0)], "zigzag": [(1, 0), (CHOSEN, CHOSEN)]}
ORDERS = ("zigzag", "usual", "permuted")


class Terms(NamedTuple):
    """Arrays that change scores; None where there is none.

    Args:
      bias: is added, ``[batch heads queries seq keys]``; sizes may be 1, but for ``keys``.
      mask: true for the scores that are kept, ``[batch heads queries seq keys]``; sizes may be 1.
      lengths: the number of keys, ``[batch]``.
    """

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    lengths: jax.Array | None = None

    @property
    def per_block(self) -> dict[str, Any]:
        """Fields of a visit, ``[batch block heads queries seq keys]``."""
        lengths = None if self.lengths is None else self.lengths[:, None, None, None, None, None]
        bias, mask = (None if x is None else x[:, None] for x in (self.bias, self.mask))
        return {"bias": bias, "mask": mask, "lengths": lengths}


NO_TERMS = Terms()


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
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    terms: Terms = NO_TERMS,
) -> jax.Array:
    """Returns softmax attention, computed block by block, like ``query``.

    **If causal, batches must be in zig-zag order** (``zigzag_batch``), unless ``order`` says otherwise. On one in the
    usual order, positions attend to later ones, without an error.

    Args:
      query: ``[batch seq heads queries head]``; ``queries`` share the keys and values of a head.
      key: ``[batch keys heads head]``; as many as queries if causal and in more than one block.
      value: like ``key``.
      blocks: of the ring, the number of devices that the sequence is split over; 1 for blockwise attention.
      causal: whether a position attends only to itself and earlier ones.
      layout: of the visiting keys and values, ``[batch seq part pair heads s head]`` with one place of ``seq`` per
        block, such as ``"model=S(seq)"``. Axes that split ``batch``, ``seq`` or ``heads`` split queries and results,
        too. Besides, ``md.Rules(activations=...)`` apply to each hop. An axis that neither names is planned: if
        memory allows it, one gather may be cheaper than the hops.
      fused: the plan counts each visit as one operation, as of a kernel that never writes attention weights to memory.
        There is no such kernel here: what runs is the same either way.
      order: of the sequence if causal, and of the result: that of ``zigzag(seq, blocks)``; ``"usual"``, where half of
        the work of visits is not used; or ``"permuted"``, the usual one, put in zig-zag order and back in here.
      scale: of the scores; by default ``head ** -0.5``.
      window: keys are seen at most so many positions before and after a query.
      terms: biases and masks, for a ring of one block only, and the numbers of keys.

    Scores and running sums are float32, or the dtype of the arguments where that is wider.

    Raises:
      ArgumentError: the shapes are not those of self-attention with one head size; the sequence does not divide into
        blocks, or into two chunks per block if causal.

    Example:
      >>> query, key, value = jnp.ones((2, 64, 2, 1, 8)), jnp.ones((2, 64, 2, 8)), jnp.ones((2, 64, 2, 8))
      >>> ring_attention(query, key, value, blocks=4, layout="seq=S(seq)").shape
      (2, 64, 2, 1, 8)
    """
    _check(query, key, value, blocks, causal, fused, window, terms)
    if order not in ORDERS:
        known = ", ".join(map(repr, ORDERS))
        raise ArgumentError(f"order: no order {order!r}{nearest(order, ORDERS)}; it is one of {known}")
    mode = "whole" if not causal else "usual" if order == "usual" or blocks == 1 else "zigzag"
    is_permuted = mode == "zigzag" and order == "permuted"
    batch, _, heads, queries, head = query.shape
    parts = 2 if mode == "zigzag" else 1
    chunk, others = (chunk_length(x.shape[1], parts * blocks) for x in (query, key))
    if is_permuted:
        query, key, value = (_permuted(x, zigzag(2 * blocks, blocks)) for x in (query, key, value))
    rows = jnp.moveaxis(query.reshape(batch, blocks, parts, chunk, heads, queries, head), 3, 5)
    pairs = jnp.stack([x.reshape(batch, blocks, parts, others, heads, head) for x in (key, value)], 3)
    kind = _Kind(mode, layout, fused, head**-0.5 if scale is None else scale, window)
    out = _attend(kind, rows, jnp.moveaxis(pairs, 4, 5), terms)
    out = jnp.moveaxis(out, 5, 3).reshape(query.shape)
    return _permuted(out, np.argsort(zigzag(2 * blocks, blocks))) if is_permuted else out


def _permuted(x: jax.Array, order: np.ndarray) -> jax.Array:
    """Returns ``[batch seq ...]`` with its chunks in another order."""
    chunks = x.reshape(x.shape[0], order.size, -1, *x.shape[2:])
    return chunks[:, order].reshape(x.shape)


def _check(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    blocks: int,
    causal: bool,
    fused: bool,
    window: Any,
    terms: Terms,
) -> None:
    """Raises ArgumentError unless the shapes fit, and so many blocks can express the arguments."""
    if query.ndim != 5:
        remedy = "; without grouped queries, give query[:, :, :, None]" if query.ndim == 4 else ""
        raise ArgumentError(f"query: shape {query.shape} is not [batch seq heads queries head]{remedy}")
    seq = query.shape[1] if (causal and blocks > 1) or key.ndim < 2 else key.shape[1]
    wanted = (query.shape[0], seq, query.shape[2], query.shape[4])
    wrong = [f"{name} {x.shape}" for name, x in (("key", key), ("value", value)) if x.shape != wanted]
    if wrong:
        raise ArgumentError(
            f"{', '.join(wrong)}: must be [batch seq heads head] {wanted}, to fit query {query.shape}; keys and values "
            "have one head size, and in a causal ring as many positions as queries; for others use models.attention "
            "with variant='products' or 'fused'"
        )
    if blocks > 1 and not (terms.bias is None and terms.mask is None):
        raise ArgumentError(f"terms: biases and masks need a ring of one block, not of {blocks}")
    if fused and (window or any(x is not None for x in terms)):
        raise ArgumentError("fused: there is no prediction of a ring with a window, biases, masks or lengths")


class _Kind(NamedTuple):
    """What a ring computes.

    Args:
      mode: a key of ``OWN``: all positions attend to all, or only to earlier ones, in the usual order or in zig-zag
        order, where blocks have two parts.
      layout: of keys and values during the visits.
      fused: whether a visit is one operation.
      scale: of the scores.
      window: of keys around a query.
    """

    mode: str
    layout: str
    fused: bool
    scale: float
    window: tuple[int, int] | None

    def meetings(self, own: bool) -> list[tuple[int, int, Sight]]:
        """Returns the parts that meet in a visit, and the keys seen: where both are the same part, earlier ones."""
        met = (OWN if own else VISIT)[self.mode]
        return [(q, k, Sight(own and q == k and self.mode != "whole", self.window)) for q, k in met]

    def places(self, x: jax.Array, hop: jax.Array | None) -> list[jax.Array]:
        """Returns the positions of each part of the blocks that visit at a hop, ``[1 block s]``.

        Args:
          x: ``[batch block part ... s head]``.
          hop: None for the blocks where they begin.
        """
        blocks, parts, chunk = *x.shape[1:3], x.shape[-2]
        visiting = jnp.arange(blocks) if hop is None else (jnp.arange(blocks) - hop) % blocks
        index = visiting[:, None] * parts * chunk + jnp.arange(parts * chunk)
        at = place(index, blocks * parts * chunk, blocks) if self.mode == "zigzag" else index
        return _parts(at.reshape(1, blocks, parts, chunk))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kind: _Kind, query: jax.Array, pairs: jax.Array, terms: Terms) -> jax.Array:
    """Returns the output, like ``query``.

    Args:
      query: ``[batch seq part heads queries s head]``.
      pairs: keys and values, ``[batch seq part pair heads s head]``.
    """
    return _forward(kind, query, pairs, terms)[0]


def _forward(kind: _Kind, query: jax.Array, pairs: jax.Array, terms: Terms) -> tuple[jax.Array, Any]:
    """Returns the output, and what the backward pass reads."""
    pairs = _constrained_pairs(pairs, kind.layout)
    queries = _constrained_queries(_parts(query), kind.layout)
    queries_at = kind.places(query, None)

    def meet(states: Any, pairs: jax.Array, hop: jax.Array | None = None) -> Any:
        own, after, keys_at = hop is None, _after(hop, query), kind.places(pairs, hop)
        for q, k, sight in kind.meetings(own):
            before, these = _pick(states, q, after), _pick(queries, q, after)
            pair, places = _pick(_parts(pairs), k, after), (_pick(queries_at, q, after), _pick(keys_at, k, after))
            if kind.fused:
                made = RunningSoftmax(*_absorbing(sight, kind.scale)(*before, these, pair))
            else:
                made = absorb(before, these, _visit(pair, *places, terms), kind.scale, sight)
            if kind.mode == "usual" and not own:
                made = jax.tree.map(partial(_choose, after), made, before)
            states = _put(states, q, after, made)
        return _constrained_queries(states, kind.layout)

    def visit(carry: Any, hop: jax.Array) -> Any:
        states, pairs = carry
        pairs = _hop(pairs, kind.layout)
        return (meet(states, pairs, hop), pairs), None

    states = meet([RunningSoftmax.of_nothing(x, wide(query, pairs)) for x in queries], pairs)
    if query.shape[1] > 1:
        (states, _), _ = lax.scan(visit, (states, pairs), _hops(query))
    out = jnp.stack([state.mean.astype(query.dtype) for state in states], 2)
    return out, (query, pairs, terms, out, [state.top for state in states], [state.total for state in states])


def _backward(kind: _Kind, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, Terms]:
    """Returns the gradients of queries, pairs and biases."""
    query, pairs, terms, out, top, total = saved
    dtype = wide(query, pairs)
    inner = jnp.sum(cotangent.astype(dtype) * out, -1)
    rows = list(map(Row, _parts(query), _parts(cotangent), top, total, _parts(inner)))
    rows, pairs = _constrained_queries(rows, kind.layout), _constrained_pairs(pairs, kind.layout)
    queries_at = kind.places(query, None)

    def meet(grads: Any, pairs: jax.Array, hop: jax.Array | None = None) -> Any:
        own, after, keys_at = hop is None, _after(hop, query), kind.places(pairs, hop)
        queries, others, bias = *map(_parts, grads), None
        for q, k, sight in kind.meetings(own):
            row, pair = _pick(rows, q, after), _pick(_parts(pairs), k, after)
            if kind.fused:
                made = _differentiating(sight, kind.scale)(*row, pair)
            else:
                places = _pick(queries_at, q, after), _pick(keys_at, k, after)
                found = differentiate(row, _visit(pair, *places, terms), kind.scale, sight)
                made, bias = (found.query, jnp.stack([found.key, found.value], 2)), found.bias
            if kind.mode == "usual" and not own:
                made = [_choose(after, x, jnp.zeros_like(x)) for x in made]
            queries = _put(queries, q, after, _pick(queries, q, after) + made[0])
            others = _put(others, k, after, _pick(others, k, after) + made[1])
        return jnp.stack(_constrained_queries(queries, kind.layout), 2), jnp.stack(others, 2), bias

    def visit(carry: Any, hop: jax.Array) -> Any:
        queries, pairs, others = carry
        pairs = _hop(pairs, kind.layout)
        queries, others, _ = meet((queries, others), pairs, hop)
        return (queries, pairs, _hop(others, kind.layout)), None

    zeros = jnp.zeros(pairs.shape, dtype)
    queries, gradient, bias = meet((jnp.zeros(query.shape, dtype), zeros), pairs)
    if query.shape[1] > 1:
        (queries, _, others), _ = lax.scan(visit, (queries, pairs, zeros), _hops(query))
        gradient += others
    biases = Terms(None if bias is None else bias[:, 0].astype(terms.bias.dtype))
    return queries.astype(query.dtype), gradient.astype(pairs.dtype), biases


_attend.defvjp(_forward, _backward)


def _visit(pair: jax.Array, queries_at: jax.Array, keys_at: jax.Array, terms: Terms) -> Visit:
    """Returns a visit of keys and values ``[batch block pair heads t head]``, at positions ``[1 block s]``."""
    places = queries_at[:, :, None, None, :, None], keys_at[:, :, None, None, None]
    return Visit(pair[:, :, 0], pair[:, :, 1], *places, **terms.per_block)


@cache
def _absorbing(sight: Sight, scale: float) -> Any:
    """Returns a visit of the forward pass as one operation: running softmax, queries and pair to a running softmax."""

    def _absorb(top: Any, total: Any, made: Any, query: Any, pair: Any) -> RunningSoftmax:
        return absorb(
            RunningSoftmax(top, total, made), query, _visit(pair, *_alike(query, pair), NO_TERMS), scale, sight
        )

    text = "b n h _ _, b n h _ _, b n h _ _ _, b n h _ _ _, b n _ h _ _ -> b n h _ _, b n h _ _, b n h _ _ _"
    return rule(text, share=0.5 if sight.causal else 1.0, temporaries=False)(_absorb)


@cache
def _differentiating(sight: Sight, scale: float) -> Any:
    """Returns a visit of the backward pass as one operation: row and pair to the gradients of queries and pair."""

    def _differentiate(query: Any, cotangent: Any, top: Any, total: Any, inner: Any, pair: Any) -> Any:
        row = Row(query, cotangent, top, total, inner)
        made = differentiate(row, _visit(pair, *_alike(query, pair), NO_TERMS), scale, sight)
        return made.query, jnp.stack([made.key, made.value], 2)

    row = "b n h _ _ _, b n h _ _ _, b n h _ _, b n h _ _, b n h _ _"
    text = f"{row}, b n _ h _ _ -> b n h _ _ _, b n _ h _ _"
    return rule(text, share=0.5 if sight.causal else 1.0, temporaries=False)(_differentiate)


def _alike(query: jax.Array, pair: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the places of queries and pair in a part that both have."""
    return jnp.arange(query.shape[-2])[None, None], jnp.arange(pair.shape[-2])[None, None]


def _hop(pairs: jax.Array, layout: str) -> jax.Array:
    """Returns every block in the place of the next one."""
    return _constrained_pairs(md.roll(md.named(pairs, PAIRS), 1, "seq").array, layout)


def _constrained_pairs(pairs: jax.Array, layout: str) -> jax.Array:
    """Returns pairs in their layout; those of a ring of one block do not visit, and have none."""
    if pairs.shape[1] == 1:
        return pairs
    made: jax.Array = md.constrain(md.named(pairs, PAIRS), layout).array
    return made


def _constrained_queries(parts: Any, layout: str) -> Any:
    """Returns parts of queries, or of results per query, split over the axes that split the same dims of the pairs."""
    stated, dims = md.Layout.of(layout).named(PAIRS.split()), "batch seq heads queries s head".split()
    shared = md.Layout(**{axis: md.S(dim) for dim in ("batch", "seq", "heads") for axis in stated.splitting(dim)})
    return jax.tree.map(
        lambda x: x if x.shape[1] == 1 else md.constrain(md.named(x, dims[: x.ndim]), shared).array, parts
    )


def _hops(query: jax.Array) -> jax.Array:
    return jnp.arange(1, query.shape[1])


def _after(hop: jax.Array | None, query: jax.Array) -> jax.Array | None:
    """Returns per block whether it comes after the one that visits it, ``[block]``; None if no other visits."""
    return None if hop is None else jnp.arange(query.shape[1]) >= hop


def _parts(x: jax.Array) -> list[jax.Array]:
    return [x[:, :, i] for i in range(x.shape[2])]


def _pick(parts: list[Any], which: int, after: jax.Array | None) -> Any:
    """Returns one part of every block; parts may be trees of arrays."""
    return jax.tree.map(partial(_choose, after), *parts) if which == CHOSEN else parts[which]


def _put(parts: list[Any], which: int, after: jax.Array | None, new: Any) -> list[Any]:
    """Returns the parts with ``new`` in place of the one that was picked."""
    if which != CHOSEN:
        return [*parts[:which], new, *parts[which + 1 :]]
    early, late = parts
    choose = partial(_choose, after)
    return [jax.tree.map(choose, new, early), jax.tree.map(choose, late, new)]


def _choose(after: Any, early: jax.Array, late: jax.Array) -> jax.Array:
    return jnp.where(after.reshape(-1, *[1] * (early.ndim - 2)), early, late)
