"""Experts without drops: every token reaches all of its experts, however uneven the routing.

GShard and Switch give each expert a fixed number of slots and drop what does not fit. Gale et al., "MegaBlocks" (2022),
drop nothing and multiply ragged groups of rows instead; Hwang et al., "Tutel" (2022), and DeepSeek-AI, "DeepSeek-V3
Technical Report" (2024), section 3.2.2, exchange them by all-to-all. Here shapes are static, so tokens travel in rounds
of dense exchanges: a pair of ranks has slots for a little more than the balanced share of tokens, and those beyond it
go in further rounds, which run only as often as the fullest pair needs. Balanced routing takes one round.

    x [replicas ranks tokens embed], each token with ``choices`` experts
    sent [replicas ranks slots embed]          per rank: slots for the first owner, for the second, ...
    received [replicas ranks slots embed]      per owner: slots of the first rank, of the second, ...; one all-to-all
    sorted by expert, three ragged products, the way back, and a weighted sum per token

The functions see whole arrays: a rank owns ``experts / ranks`` experts and as many tokens as every other one, and the
exchange is a transpose of two dims of length ``ranks``, which is an all-to-all where a mesh axis splits ``ranks``.
Each rank also sends how many tokens it has per expert, so that owners know what is in which slot, and the tokens'
weights, so that the backward pass needs neither the results of the experts nor their way back again.

Values and gradients are gathered, never scattered: a slot knows its token and a token its slots, so either direction
reads at known places. Further rounds run their forward pass again in the backward pass, and keep nothing.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, inf, prod
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import meshdsl as md
from meshdsl.errors import ArgumentError, faults

PLACES = "replicas ranks slots embed"

Activation = Callable[[jax.Array], jax.Array]


class ExpertWeights(NamedTuple):
    """The weights of all experts: ``down(activation(gate x) * up x)``, or ``down(activation(up x))`` without a gate.

    Args:
      up: ``[experts embed hidden]``.
      down: ``[experts hidden embed]``.
      gate: like ``up``, or None.
    """

    up: jax.Array
    down: jax.Array
    gate: jax.Array | None = None


class _Form(NamedTuple):
    """What does not change during a run.

    Args:
      ranks: owners of experts.
      slots: per pair of ranks and round.
      layout: of what is sent and received.
      activation: of the hidden rows.
    """

    ranks: int
    slots: int
    layout: str
    activation: Activation


class _Routing(NamedTuple):
    """Where everything is, in all rounds together; an entry is one choice of one token.

    Args:
      order: entries of a rank, by expert, ``[replicas ranks entries]``.
      owner: of each entry, likewise.
      place: of each entry among those of its rank for its owner, likewise.
      counts: entries per rank and owner, ``[replicas ranks ranks]``.
      ends: per owner, rank and expert of the owner: entries for it and those before it, ``[replicas ranks ranks e]``.
    """

    order: jax.Array
    owner: jax.Array
    place: jax.Array
    counts: jax.Array
    ends: jax.Array


def dropless(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: ExpertWeights,
    ranks: int,
    replicas: int = 1,
    capacity: float = 1.05,
    layout: str = "",
    activation: Activation = jax.nn.silu,
) -> jax.Array:
    """Returns the weighted sum of each token's experts, like ``x``. No token is dropped.

    It cannot be batched by ``jax.vmap``, so gradients per replica cannot be had, nor differentiated twice.

    Args:
      x: ``[... embed]``; the leading dims, flattened, are the tokens.
      experts: of each token, integers, ``[... choices]``; those that number no expert, such as -1, add nothing.
      weights: of each token's experts, ``[... choices]``.
      params: weights of the experts.
      ranks: owners of equal parts of the experts, the number of devices that split them.
      replicas: groups of tokens that are exchanged apart, each among its own ranks.
      capacity: slots per pair of ranks, relative to the balanced share; 1.05 is one round as long as no pair has more
        than 1.05 of it. Less memory is taken with less, in more rounds.
      layout: of tokens on their way, ``[replicas ranks slots embed]``, such as ``"data=S(ranks)"``; an axis that it
        does not name is planned.
      activation: of hidden rows.

    Raises:
      ArgumentError: shapes that do not fit each other; ranks that do not divide the experts, or with the replicas the
        tokens; a capacity that is not positive; another dtype than that of the params.

    Example:
      >>> params = ExpertWeights(jnp.ones((4, 8, 16)), jnp.ones((4, 16, 8)))
      >>> dropless(jnp.ones((2, 6, 8)), jnp.zeros((2, 6, 1), int), jnp.ones((2, 6, 1)), params, ranks=2).shape
      (2, 6, 8)
    """
    count, choices = _check(x, experts, weights, params, ranks, replicas, capacity)
    tokens = experts.size // choices // (replicas * ranks)
    share = tokens * choices / ranks
    slots = max(int(capacity * share), ceil(share) if capacity >= 1 else 1)  # balanced routing takes one round
    form = _Form(ranks, min(slots, tokens * choices), layout, activation)

    def blocks(given: jax.Array) -> jax.Array:
        return given.reshape(replicas, ranks, tokens, given.shape[-1])

    owned = jax.tree.map(lambda w: w.reshape(ranks, count // ranks, *w.shape[1:]), params)
    routing = _route(form, blocks(experts).reshape(replicas, ranks, -1), count)
    given = _constrained(blocks(x), layout), blocks(weights), owned
    further = _further(form, routing, *given)  # in front, so that what the first round keeps is not there meanwhile
    return (_round(form, 0, routing, *given) + further).reshape(x.shape)


def _check(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: ExpertWeights,
    ranks: int,
    replicas: int,
    capacity: float,
) -> tuple[int, int]:
    """Returns the numbers of experts and of choices, or raises ArgumentError with all faults."""
    for name, number in (("ranks", ranks), ("replicas", replicas)):
        if not isinstance(number, Integral) or number < 1:
            raise ArgumentError(f"dropless: {name}={number!r} is no number of devices; give an int of at least 1")
    if not x.ndim or not x.size or not experts.size:
        raise ArgumentError(f"dropless: x {x.shape} with experts {experts.shape} has no tokens, or choices, to send")
    count, _, hidden = (*params.up.shape, 0, 0, 0)[:3]
    wanted = {
        "params.up": (params.up.shape, (count, x.shape[-1], hidden), "[experts embed hidden]"),
        "params.down": (params.down.shape, (count, hidden, x.shape[-1]), "[experts hidden embed]"),
        "experts": (experts.shape, (*x.shape[:-1], *experts.shape[-1:]), "[... choices]"),
        "weights": (weights.shape, experts.shape, "[... choices]"),
    }
    if params.gate is not None:
        wanted["params.gate"] = (params.gate.shape, params.up.shape, "[experts embed hidden]")
    found = [
        f"{name}: shape {is_} is not {dims} {must}, to fit x {x.shape}"
        for name, (is_, must, dims) in wanted.items()
        if is_ != must
    ]
    if not jnp.issubdtype(experts.dtype, jnp.integer):
        found.append(
            f"experts: {experts.dtype} numbers no experts; give integers, such as the indices of jax.lax.top_k"
        )
    dtype = jnp.result_type(x, *jax.tree.leaves(params))
    if dtype != x.dtype or not jnp.issubdtype(dtype, jnp.floating):
        found.append(f"x: {x.dtype} beside params of {dtype}; cast the params, or x, with .astype")
    if not 0 < capacity < inf:
        found.append(f"capacity={capacity}: a round needs slots; give 1.05, or less for more rounds of less memory")
    tokens = prod(x.shape[:-1])
    for name, divisor, what, length in (("ranks", ranks, "experts", count), ("ranks", ranks, "tokens", tokens)):
        if length % divisor:
            found.append(f"{name}={divisor} does not divide {what}={length}; {_nearest_divisors(divisor, length)}")
    if tokens % ranks == 0 and tokens // ranks % replicas:
        nearest = _nearest_divisors(replicas, tokens // ranks)
        found.append(f"replicas={replicas} does not divide the {tokens // ranks} tokens of a rank; {nearest}")
    if found:
        raise ArgumentError(faults("dropless:", found))
    return count, experts.shape[-1]


def _nearest_divisors(number: int, length: int) -> str:
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    nearest = {*[n for n in divisors if n < number][-1:], *[n for n in divisors if n > number][:1]}
    return f"the nearest is {' or '.join(map(str, sorted(nearest)))}"


def _route(form: _Form, experts: jax.Array, count: int) -> _Routing:
    """Returns where entries go, ``experts`` being ``[replicas ranks entries]``, of ``count``."""
    each = count // form.ranks
    experts = jnp.where((experts >= 0) & (experts < count), experts, count)  # behind all others
    order = jnp.argsort(experts, axis=-1, stable=True)
    of_experts = _counts(experts, count).reshape(*experts.shape[:2], form.ranks, each)
    counts = jnp.sum(of_experts, -1)
    owner = experts // each
    place = jnp.argsort(order, axis=-1) - jnp.take_along_axis(_before(counts), owner, -1)
    ends = jnp.cumsum(jnp.swapaxes(of_experts, 1, 2), -1)
    return _Routing(order, owner, place, counts, ends)


def _round(form: _Form, index: Any, routing: _Routing, x: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
    """Returns what one round adds to the result.

    Args:
      form: of the exchange.
      index: of the round.
      routing: of all rounds.
      x: ``[replicas ranks tokens embed]``.
      weights: ``[replicas ranks tokens choices]``.
      params: weights of the experts per owner, ``[ranks e ...]``.
    """
    choices, slots = weights.shape[-1], form.ranks * form.slots
    first = index * form.slots
    at = first + jnp.arange(form.slots)
    # a slot's entry and an entry's slot, or beyond the last one
    entry = jnp.take_along_axis(
        routing.order[:, :, None], _before(routing.counts)[..., None] + at, -1, mode="fill", fill_value=0
    )
    entry = jnp.where(at < routing.counts[..., None], entry, weights[0, 0].size).reshape(*x.shape[:2], slots)
    place = routing.place - first
    slot = jnp.where((place >= 0) & (place < form.slots), routing.owner * form.slots + place, slots)

    rows = _exchange(form, _gather(x, entry // choices, slot.reshape(weights.shape)))
    scales = _exchange(form, _gather(weights.reshape(*slot.shape, 1).astype(x.dtype), entry, slot[..., None]))
    made = _exchange(form, _run(form, index, routing, rows, scales, params))
    return jnp.sum(_gather(made, slot, entry[..., None]).reshape(*weights.shape, -1), -2)


def _run(form: _Form, index: Any, routing: _Routing, rows: jax.Array, scales: jax.Array, params: Any) -> jax.Array:
    """Returns each owner's experts on the rows that it received, times the ``scales`` of these rows.

    Hidden rows are scaled, not results, so that the backward pass needs no results.
    """
    at = index * form.slots + jnp.arange(form.slots)
    each = routing.ends.shape[-1]
    expert = jnp.sum(at >= routing.ends[..., None], -2).reshape(rows.shape[:3])  # ``each`` in empty slots
    order = jnp.argsort(expert, axis=-1, stable=True)
    back = jnp.argsort(order, axis=-1)
    sizes = _counts(expert, each)

    def product(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(rows, jnp.broadcast_to(matrices, (len(rows), *matrices.shape)), sizes, _BY_EXPERT)

    rows, scales = (_gather(each, order, back[..., None]) for each in (rows, scales))
    if params.gate is None:
        hidden = form.activation(checkpoint_name(product(rows, params.up), "mlpwi"))
    else:
        up = checkpoint_name(product(rows, params.up), "mlpwi_1")
        hidden = form.activation(checkpoint_name(product(rows, params.gate), "mlpwi_0")) * up
    return _gather(checkpoint_name(product(hidden * scales, params.down), "mlpwo"), back, order[..., None])


# [replicas ranks rows k] and [replicas ranks e k n] -> [replicas ranks rows n]
_BY_EXPERT = lax.RaggedDotDimensionNumbers((((3,), (3,)), ((0, 1), (0, 1))), (2,), (2,))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further(form: _Form, routing: _Routing, x: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
    """Returns what all rounds but the first add to the result."""

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + _round(form, index, routing, x, weights, params)

    total: jax.Array = lax.fori_loop(1, _rounds(form, routing), one, jnp.zeros_like(x))
    return total


def _further_forward(form: _Form, *given: Any) -> tuple[jax.Array, Any]:
    return _further(form, *given), given


def _further_backward(form: _Form, given: Any, cotangent: jax.Array) -> Any:
    routing, *others = given

    def one(index: jax.Array, totals: Any) -> Any:
        _, pull = jax.vjp(partial(_round, form, index, routing), *others)
        return jax.tree.map(jnp.add, totals, pull(cotangent))

    grads = lax.fori_loop(1, _rounds(form, routing), one, jax.tree.map(jnp.zeros_like, tuple(others)))
    return None, *grads


_further.defvjp(_further_forward, _further_backward)


def _rounds(form: _Form, routing: _Routing) -> jax.Array:
    """Returns how many rounds the fullest pair of ranks needs; the planner takes it that one is enough."""
    return md.expect_iterations((jnp.max(routing.counts) + form.slots - 1) // form.slots, 0)


@jax.custom_vjp
def _gather(x: jax.Array, where: jax.Array, readers: jax.Array) -> jax.Array:
    """Returns rows of ``x``, zeros beyond the last one.

    Args:
      x: ``[replicas ranks n embed]``.
      where: the row of ``x`` to read for each of the result's, ``[replicas ranks m]``.
      readers: the rows of the result that read each of ``x``, ``[replicas ranks n times]``, or m.
    """
    return _rows(x, where)


def _gather_forward(x: jax.Array, where: jax.Array, readers: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(x, where, readers), readers


def _gather_backward(readers: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    found = _rows(cotangent, readers.reshape(*readers.shape[:2], -1))
    return jnp.sum(found.reshape(*readers.shape, -1), -2), None, None


_gather.defvjp(_gather_forward, _gather_backward)


def _rows(x: jax.Array, where: jax.Array) -> jax.Array:
    made: jax.Array = jnp.take_along_axis(x, where[..., None], 2, mode="fill", fill_value=0)
    return made


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchange(form: _Form, rows: jax.Array) -> jax.Array:
    """Returns ``[replicas ranks slots embed]`` with the slots of a pair of ranks at the other one.

    It is its own inverse and transpose; as the backward pass, it states the layout of gradients too.
    """
    rows = _constrained(rows, form.layout)
    pairs = rows.reshape(*rows.shape[:2], form.ranks, form.slots, rows.shape[-1])
    return _constrained(jnp.swapaxes(pairs, 1, 2).reshape(rows.shape), form.layout)


_exchange.defvjp(
    lambda form, rows: (_exchange(form, rows), None), lambda form, _, cotangent: (_exchange(form, cotangent),)
)


def _constrained(rows: jax.Array, layout: str) -> jax.Array:
    made: jax.Array = md.constrain(md.named(rows, PLACES), layout).array
    return made


def _counts(numbers: jax.Array, upper: int) -> jax.Array:
    """Returns how often each number below ``upper`` occurs along the last dim."""
    return jnp.sum(numbers[..., None] == jnp.arange(upper), -2)


def _before(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts, -1) - counts
