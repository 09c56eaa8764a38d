"""Experts without drops: every token reaches all of its experts, however uneven the routing.

GShard and Switch give each expert a fixed number of slots and drop what does not fit. Gale et al., "MegaBlocks" (2022),
drop nothing and multiply ragged groups of rows instead; Hwang et al., "Tutel" (2022), and DeepSeek-AI, "DeepSeek-V3
Technical Report" (2024), section 3.2.2, exchange them by all-to-all. Here shapes are static, but what is sent is data:
an owner of experts has room for a little more than its balanced share of tokens, and where more are routed to the
fullest one, all tokens go in as many turns as it needs, an equal part of those of every pair of ranks in each.
Balanced routing takes one turn.

    x [replicas ranks tokens embed], each token with ``choices`` experts
    sent [replicas ranks rows embed]           per rank: rows for the first owner, for the second, ...
    received [replicas ranks length embed]     per owner: rows of the first rank, of the second, ...
    sorted by expert, three ragged products, the way back, and a weighted sum per token

Between nodes with slower links, the exchange has two levels (DeepSeek-V3, section 3.2.2): a token is sent once to each
node that has experts for it, with its weights, to the rank of the sender's number there, which is a sender of the
exchange above, inside the node. What comes back is the weighted sum of the node's experts.

The functions see whole arrays: a rank owns ``experts / ranks`` experts and as many tokens as every other one, and the
exchange is ``md.ragged_exchange``, which sends the routed rows alone where a mesh axis splits ``ranks`` and the
compiler has such a collective. Each rank also sends how many tokens it has per expert, so that owners know what they
receive, and the tokens' weights, so that the backward pass needs neither the results of the experts nor their way back.

Values and gradients are gathered, never scattered: a row knows its token and a token its rows, so either direction
reads at known places. Further turns run their forward pass again in the backward pass, and keep nothing.
"""

from collections.abc import Callable
from functools import partial
from math import ceil, comb, inf, prod
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import meshdsl as md
from meshdsl.errors import ArgumentError, faults, nearest

FLAT = "replicas ranks rows embed"
EXCHANGES = "auto", "flat", "two_level"
BETWEEN_NODES, IN_NODES = "replicas ranks nodes rows embed", "replicas nodes ranks rows embed"

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
      ranks: that exchange rows: owners of experts, or nodes.
      rows: that a rank sends in a turn at most.
      length: of what a rank receives in a turn at most.
      turns: that balanced routing takes.
      dims: names of the dims of what is sent and received.
      layout: of the same.
      activation: of the hidden rows.
      inside: of the exchange inside nodes, if this one is between them.
    """

    ranks: int
    rows: int
    length: int
    turns: int
    dims: str
    layout: str
    activation: Activation
    inside: "_Form | None" = None


class _Routing(NamedTuple):
    """Where everything is, in all turns together; an entry is one choice of one token, or one node of one token.

    Args:
      order: entries of a rank, by expert, ``[... ranks entries]``.
      owner: of each entry, likewise.
      place: of each entry among those of its rank for its owner, likewise.
      counts: entries per rank and owner, ``[... ranks ranks]``.
      ends: per rank, owner and expert of the owner: entries for it and those before it, ``[... ranks ranks e]``.
      turns: how many the fullest rank needs, a scalar.
      experts: of each token, ``[... ranks tokens choices]``.
    """

    order: jax.Array
    owner: jax.Array
    place: jax.Array
    counts: jax.Array
    ends: jax.Array
    turns: jax.Array
    experts: jax.Array


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
    nodes: int = 1,
    exchange: str = "auto",
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
      capacity: room of an owner, relative to its balanced share of tokens; 1.05 is one turn as long as none has more
        than 1.05 of it, rounded down to equal parts for all ranks. Less memory is taken with less, in more turns.
        ``capacity_at`` is that of a quantile of measured loads. In two levels, it is also that of a rank that takes
        tokens from other nodes, relative to choices that are made evenly.
      layout: of tokens on their way, ``[replicas ranks rows embed]``, such as ``"data=S(ranks)"``; an axis that it
        does not name is planned.
      activation: of hidden rows.
      nodes: groups of ranks with slower links between them. With several, the dims of ``layout`` are ``[replicas nodes
        ranks rows embed]``.
      exchange: ``"flat"``, between all ranks at once; ``"two_level"``, first between nodes, where a token is sent to
        each node once, then inside them; ``"auto"`` for the one whose plan is faster.

    Raises:
      ArgumentError: shapes that do not fit each other; ranks that do not divide the experts, or with the replicas the
        tokens; nodes that do not divide the ranks; an unknown exchange; a capacity that is not positive; another dtype
        than that of the params; experts that are no integers, or weights that are no floats.

    Example:
      >>> params = ExpertWeights(jnp.ones((4, 8, 16)), jnp.ones((4, 16, 8)))
      >>> dropless(jnp.ones((2, 6, 8)), jnp.zeros((2, 6, 1), int), jnp.ones((2, 6, 1)), params, ranks=2).shape
      (2, 6, 8)
    """
    _check(x, experts, weights, params, ranks, replicas, nodes, capacity, exchange)
    if experts.dtype != jnp.int32:  # narrower ones cannot hold the number of experts
        numbers = experts.astype(jnp.int32)
        experts = jnp.where(numbers.astype(experts.dtype) == experts, numbers, -1)
    exchanges = {
        "flat": partial(_flat, capacity, layout.replace("(nodes)", "(ranks)"), activation),
        "two_level": partial(_two_level, nodes, capacity, layout, activation),
    }
    if exchange == "auto":
        run = md.alternatives("experts", exchanges) if nodes > 1 else exchanges["flat"]
    else:
        run = exchanges[exchange]

    def blocks(given: jax.Array) -> jax.Array:
        return given.reshape(replicas, ranks, -1, given.shape[-1])

    owned = jax.tree.map(lambda w: w.reshape(ranks, -1, *w.shape[1:]), params)
    made: jax.Array = run(blocks(x), blocks(experts), blocks(weights), owned)
    return made.reshape(x.shape)


def _flat(
    capacity: float,
    layout: str,
    activation: Activation,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: Any,
) -> jax.Array:
    """Returns the result of one exchange between all ranks, arrays being ``[replicas ranks tokens ...]``."""
    (_, ranks, tokens, _), choices, count = x.shape, experts.shape[-1], prod(params.up.shape[:2])
    share = tokens * choices / ranks  # of each pair of ranks; exchanges have equal parts for all of them
    room = _room(share, capacity, share * ranks)
    turns = _balanced_turns(share, room)
    rows = ceil((share - 1) / turns) + 1  # a rank has as many rows as any other
    form = _Form(ranks, ranks * rows, ranks * room, turns, FLAT, layout, activation)
    return _exchanged(form, experts, count, x, experts, weights, params)


def _two_level(
    nodes: int,
    capacity: float,
    layout: str,
    activation: Activation,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: Any,
) -> jax.Array:
    """Returns the same of an exchange between nodes, which sends a token to each once, around one inside them."""
    (replicas, ranks, tokens, _), choices, count = x.shape, experts.shape[-1], prod(params.up.shape[:2])
    inner, most = ranks // nodes, min(choices, nodes)

    # between nodes, every rank exchanges with those of its number; tokens go to as many nodes as even choices reach
    elsewhere = count - count // nodes
    reached = nodes * (1 - comb(elsewhere, choices) / comb(count, min(choices, count)))
    share = tokens * min(reached, most) / nodes
    room = ceil(_room(share, capacity, tokens) / inner) * inner  # so that all ranks divide what a rank receives
    turns = _balanced_turns(share, room)
    rows, length = min(room, ceil(tokens * most / nodes)), nodes * room

    # inside a node, every rank sends on what it received, in as many turns
    whole = tokens * choices / inner
    inner_room = _room(whole, capacity, length * choices)
    inner_rows, inner_turns = inner * inner_room, _balanced_turns(whole / turns, inner_room)
    inside = _Form(inner, inner_rows, inner_rows, inner_turns, IN_NODES, layout, activation)
    form = _Form(nodes, nodes * rows, length, turns, BETWEEN_NODES, layout, activation, inside)

    def by_number(given: jax.Array) -> jax.Array:
        return jnp.swapaxes(given.reshape(replicas, nodes, inner, *given.shape[2:]), 1, 2)

    x, experts, weights = (by_number(each) for each in (x, experts, weights))
    owned = jax.tree.map(lambda w: w.reshape(nodes, inner, *w.shape[1:]), params)
    node = jnp.arange(nodes)
    is_reached = jnp.any(experts[..., None] // (count // nodes) == node, -2)
    made = _exchanged(form, jnp.where(is_reached, node, -1), nodes, x, experts, weights, owned)
    return jnp.swapaxes(made, 1, 2).reshape(replicas, ranks, *made.shape[-2:])


def _room(share: float, capacity: float, most: float) -> int:
    """Returns how many rows of every pair of ranks have room, of this balanced share and ``most`` at all."""
    return max(int(min(capacity * share, most)), ceil(share) if capacity >= 1 else 0, 2)


def _balanced_turns(share: float, room: int) -> int:
    """Returns how many turns balanced routing takes, as ``_route`` counts them."""
    return max(ceil((share - 1) / (room - 1)), 1)


def _exchanged(
    form: _Form,
    chosen: jax.Array,
    count: int,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: Any,
) -> jax.Array:
    """Returns the sum over turns.

    Args:
      form: of the exchange.
      chosen: which of ``count`` each entry goes to, experts or nodes, ``[... ranks tokens entries]``.
      count: how many there are.
      x: ``[... ranks tokens embed]``.
      experts: of each token, ``[... ranks tokens choices]``.
      weights: likewise.
      params: weights of the experts per owner, ``[... ranks e ...]``, without leading dims that share them.
    """
    routing = _route(form, chosen, count, experts)
    given = _constrained(form, x), weights, params
    further = _further(form, routing, *given)  # in front, so that what the first turn keeps is not there meanwhile
    return _turn(form, 0, routing, *given) + further


def capacity_at(quantile: float, loads: Any, ranks: int) -> float:
    """Returns the capacity with which that part of measured exchanges takes one turn; the others take more.

    Args:
      quantile: of the exchanges, 0.99 for 99 of 100.
      loads: tokens that each expert was sent in exchanges like those of ``dropless``, of one group of ranks each:
        ``[... experts]``, such as ``[steps layers experts]``.
      ranks: owners of equal parts of the experts.

    Raises:
      ArgumentError: a quantile that is not between 0 and 1; loads that are no numbers of tokens, or of no tokens;
        ranks that are no number of devices or do not divide the experts.

    Example:
      >>> capacity_at(0.5, [[100, 100, 100, 100], [90, 130, 100, 80], [400, 0, 0, 0]], ranks=2)
      1.105
    """
    loads = np.asarray(loads)
    found = []
    if not isinstance(quantile, Real) or not 0 <= quantile <= 1:
        found.append(f"quantile={quantile!r}: a part of all exchanges is between 0 and 1; give 0.99")
    if not np.issubdtype(loads.dtype, np.number) or not np.all((loads >= 0) & (loads < inf)):
        found.append("loads: some are no numbers of tokens; give how many each expert was sent, at least 0")
    elif not loads.ndim or not loads.size or not np.all(np.sum(loads, -1)):
        found.append(f"loads: exchanges of shape {loads.shape} have no tokens; give how many each expert was sent")
    if not isinstance(ranks, Integral) or ranks < 1:
        found.append(f"ranks={ranks!r} is no number of devices; give an int of at least 1")
    elif not found and loads.shape[-1] % ranks:
        divisors = _nearest_divisors(ranks, loads.shape[-1])
        found.append(f"ranks={ranks} does not divide experts={loads.shape[-1]}; {divisors}")
    if found:
        raise ArgumentError(faults("capacity_at:", found))
    of_owners = np.sum(loads.reshape(-1, ranks, loads.shape[-1] // ranks), -1)
    rows = np.ceil(np.max(of_owners, -1) / ranks) + 0.5  # of a pair of ranks; ``dropless`` rounds down
    return float(np.quantile(rows * ranks**2 / np.sum(of_owners, -1), quantile, method="higher"))


def _check(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    params: ExpertWeights,
    ranks: int,
    replicas: int,
    nodes: int,
    capacity: float,
    exchange: str,
) -> None:
    """Raises ArgumentError with all faults."""
    for name, number in (("ranks", ranks), ("replicas", replicas), ("nodes", nodes)):
        if not isinstance(number, Integral) or number < 1:
            raise ArgumentError(f"dropless: {name}={number!r} is no number of devices; give an int of at least 1")
    if not x.ndim or not x.size or not experts.ndim or not experts.size:
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
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        found.append(f"weights: {weights.dtype} weighs no results; give floats, such as weights.astype({x.dtype})")
    dtype = jnp.result_type(x, *jax.tree.leaves(params))
    if dtype != x.dtype or not jnp.issubdtype(dtype, jnp.floating):
        found.append(f"x: {x.dtype} beside params of {dtype}; cast the params, or x, with .astype")
    if exchange not in EXCHANGES:
        found.append(f"exchange={exchange!r} is no exchange{nearest(exchange, EXCHANGES)}")
    if not isinstance(capacity, Real) or not 0 < capacity < inf:
        found.append(f"capacity={capacity!r}: a turn needs room; give 1.05, or less for more turns of less memory")
    tokens = prod(x.shape[:-1])
    for name, divisor, what, length in (
        ("ranks", ranks, "experts", count),
        ("ranks", ranks, "tokens", tokens),
        ("nodes", nodes, "ranks", ranks),
    ):
        if length % divisor:
            found.append(f"{name}={divisor} does not divide {what}={length}; {_nearest_divisors(divisor, length)}")
    if tokens % ranks == 0 and tokens // ranks % replicas:
        divisors = _nearest_divisors(replicas, tokens // ranks)
        found.append(f"replicas={replicas} does not divide the {tokens // ranks} tokens of a rank; {divisors}")
    if found:
        raise ArgumentError(faults("dropless:", found))


def _nearest_divisors(number: int, length: int) -> str:
    divisors = [n for n in range(1, length + 1) if length % n == 0]
    nearest = {*[n for n in divisors if n < number][-1:], *[n for n in divisors if n > number][:1]}
    return f"the nearest is {' or '.join(map(str, sorted(nearest)))}"


def _route(form: _Form, chosen: jax.Array, count: int, experts: jax.Array) -> _Routing:
    """Returns where entries go; see ``_exchanged``."""
    each = count // form.ranks
    chosen = chosen.reshape(*chosen.shape[:-2], -1)
    chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)  # behind all others
    order = jnp.argsort(chosen, axis=-1, stable=True)
    of_chosen = _counts(chosen, count).reshape(*chosen.shape[:-1], form.ranks, each)
    counts = jnp.sum(of_chosen, -1)
    owner = chosen // each
    place = jnp.argsort(order, axis=-1) - jnp.take_along_axis(_before(counts), owner, -1)

    def needed(rows: jax.Array, most: int) -> jax.Array:
        """Turns in which parts of all ranks, rounded up, do: n rows have at most ranks + (n - ranks) / turns."""
        spare = max(most - form.ranks, 1)
        return (jnp.max(rows) - form.ranks + spare - 1) // spare

    turns = jnp.maximum(needed(jnp.sum(counts, -2), form.length), needed(jnp.sum(counts, -1), form.rows))
    ends = jnp.cumsum(of_chosen, -1)
    return _Routing(order, owner, place, counts, ends, jnp.maximum(turns, 1), experts)


def _part(index: Any, routing: _Routing) -> tuple[jax.Array, jax.Array]:
    """Returns where the part of a turn begins among the entries of each pair, and its size."""
    each, rest = jnp.divmod(routing.counts, routing.turns)
    return each * index + jnp.minimum(rest, index), each + (index < rest)


def _turn(form: _Form, index: Any, routing: _Routing, x: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
    """Returns what a turn, of this index, adds to the result; the other arguments are those of ``_exchanged``."""
    tokens, entries = x.shape[-2], routing.order.shape[-1]
    each = entries // tokens
    first, sizes = _part(index, routing)
    begin = _before(sizes)
    # a row's entry and an entry's row, or beyond the last one
    owner = _blocks(sizes, form.rows)
    shift = _entries(_before(routing.counts) + first - begin, owner)
    entry = _entries(routing.order, jnp.where(owner < form.ranks, jnp.arange(form.rows) + shift, entries), entries)
    place = routing.place - _entries(first, routing.owner)
    is_sent = (place >= 0) & (place < _entries(sizes, routing.owner))
    row = jnp.where(is_sent, place + _entries(begin, routing.owner), form.rows)

    token, rows_of_token = entry // each, row.reshape(*row.shape[:-1], tokens, each)
    given = _gather(x, token, rows_of_token)
    if form.inside is None:
        scales = _gather(weights.reshape(*row.shape, 1).astype(x.dtype), entry, row[..., None])
    else:
        scales = _gather(weights.astype(x.dtype), token, rows_of_token)
    rows, scales = (_exchange(form, form.length, each, sizes) for each in (given, scales))
    if form.inside is None:
        results = _run(form, first, sizes, routing, rows, scales, params)
    else:
        chosen = md.ragged_exchange(_rows(routing.experts + 1, token), sizes, form.length) - 1
        results = _in_nodes(form.inside, rows, chosen, scales, params)
    made = _exchange(form, form.rows, results, jnp.swapaxes(sizes, -2, -1))
    return jnp.sum(_gather(made, row, entry[..., None]).reshape(*rows_of_token.shape, -1), -2)


def _in_nodes(form: _Form, rows: jax.Array, experts: jax.Array, scales: jax.Array, params: Any) -> jax.Array:
    """Returns the weighted sum of the experts of its node for each row, ``[replicas ranks nodes rows ...]``."""
    rows, experts, scales = (jnp.swapaxes(each, 1, 2) for each in (rows, experts, scales))
    count = prod(params.up.shape[1:3])  # of a node
    own = experts - count * jnp.arange(rows.shape[1])[:, None, None, None]
    own = jnp.where((own >= 0) & (own < count), own, -1)
    return jnp.swapaxes(_exchanged(form, own, count, rows, own, scales, params), 1, 2)


def _run(
    form: _Form, first: jax.Array, sizes: jax.Array, routing: _Routing, rows: jax.Array, scales: jax.Array, params: Any
) -> jax.Array:
    """Returns each owner's experts on the rows that it received, times the ``scales`` of these rows.

    Hidden rows are scaled, not results, so that the backward pass needs no results.
    """
    each = routing.ends.shape[-1]
    ends = jnp.clip(routing.ends - first[..., None], 0, sizes[..., None])
    of_experts = jnp.swapaxes(jnp.diff(ends, prepend=0), -3, -2)  # by owner, rank, expert
    block = _blocks(of_experts.reshape(*rows.shape[:-2], -1), rows.shape[-2])
    expert = jnp.where(block < form.ranks * each, block % each, each)  # ``each`` in empty rows
    order = jnp.argsort(expert, axis=-1, stable=True)
    back = jnp.argsort(order, axis=-1)
    counts = _counts(expert, each)
    batch, last = tuple(range(rows.ndim - 2)), rows.ndim - 1
    # [... rows k] and [... e k n] -> [... rows n]
    by_expert = lax.RaggedDotDimensionNumbers((((last,), (last,)), (batch, batch)), (last - 1,), (last - 1,))

    def product(rows: jax.Array, matrices: jax.Array) -> jax.Array:
        whole = jnp.broadcast_to(matrices, (*rows.shape[:-2], *matrices.shape[-3:]))
        return lax.ragged_dot_general(rows, whole, counts, by_expert)

    rows, scales = (_gather(each, order, back[..., None]) for each in (rows, scales))
    if params.gate is None:
        hidden = form.activation(checkpoint_name(product(rows, params.up), "mlpwi"))
    else:
        up = checkpoint_name(product(rows, params.up), "mlpwi_1")
        hidden = form.activation(checkpoint_name(product(rows, params.gate), "mlpwi_0")) * up
    return _gather(checkpoint_name(product(hidden * scales, params.down), "mlpwo"), back, order[..., None])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further(form: _Form, routing: _Routing, x: jax.Array, weights: jax.Array, params: Any) -> jax.Array:
    """Returns what all turns but the first add to the result."""

    def one(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + _turn(form, index, routing, x, weights, params)

    total: jax.Array = lax.fori_loop(1, _expected(form, routing), one, jnp.zeros_like(x))
    return total


def _further_forward(form: _Form, *given: Any) -> tuple[jax.Array, Any]:
    return _further(form, *given), given


def _further_backward(form: _Form, given: Any, cotangent: jax.Array) -> Any:
    routing, *others = given

    def one(index: jax.Array, totals: Any) -> Any:
        _, pull = jax.vjp(partial(_turn, form, index, routing), *others)
        return jax.tree.map(jnp.add, totals, pull(cotangent))

    grads = lax.fori_loop(1, _expected(form, routing), one, jax.tree.map(jnp.zeros_like, tuple(others)))
    return None, *grads


_further.defvjp(_further_forward, _further_backward)


def _expected(form: _Form, routing: _Routing) -> jax.Array:
    """Returns the number of turns; the planner takes it that as many follow the first as in balanced routing."""
    return md.expect_iterations(routing.turns, form.turns - 1)


@jax.custom_vjp
def _gather(x: jax.Array, where: jax.Array, readers: jax.Array) -> jax.Array:
    """Returns rows of ``x``, zeros beyond the last one.

    Args:
      x: ``[... n embed]``.
      where: the row of ``x`` to read for each of the result's, ``[... m]``.
      readers: the rows of the result that read each of ``x``, ``[... n times]``, or m.
    """
    return _rows(x, where)


def _gather_forward(x: jax.Array, where: jax.Array, readers: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(x, where, readers), readers


def _gather_backward(readers: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    found = _rows(cotangent, readers.reshape(*readers.shape[:-2], -1))
    return jnp.sum(found.reshape(*readers.shape, -1), -2), None, None


_gather.defvjp(_gather_forward, _gather_backward)


def _rows(x: jax.Array, where: jax.Array) -> jax.Array:
    made: jax.Array = jnp.take_along_axis(x, where[..., None], -2, mode="fill", fill_value=0)
    return made


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(form: _Form, length: int, rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Returns ``[... ranks length embed]``: the rows that every rank receives, of ``sizes`` from rank to rank.

    Its transpose sends them back; as the backward pass, it states the layout of gradients too.
    """
    return _constrained(form, md.ragged_exchange(_constrained(form, rows), sizes, length))


def _exchange_forward(form: _Form, length: int, rows: jax.Array, sizes: jax.Array) -> Any:
    return _exchange(form, length, rows, sizes), (sizes, rows.shape[-2])


def _exchange_backward(form: _Form, length: int, given: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    sizes, rows = given
    return _exchange(form, rows, cotangent, jnp.swapaxes(sizes, -2, -1)), None


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _constrained(form: _Form, rows: jax.Array) -> jax.Array:
    made: jax.Array = md.constrain(md.named(rows, form.dims), form.layout).array
    return made


def _counts(numbers: jax.Array, upper: int) -> jax.Array:
    """Returns how often each number below ``upper`` occurs along the last dim."""
    return jnp.sum(numbers[..., None] == jnp.arange(upper), -2)


def _blocks(sizes: jax.Array, rows: int) -> jax.Array:
    """Returns in which of the blocks of these sizes each of ``rows`` rows lies, their number for those behind."""
    return jnp.sum(jnp.arange(rows) >= jnp.cumsum(sizes, -1)[..., None], -2)


def _entries(table: jax.Array, where: jax.Array, fill: int = 0) -> jax.Array:
    """Returns entries of the last dim, ``fill`` beyond the last one."""
    made: jax.Array = jnp.take_along_axis(table, where, -1, mode="fill", fill_value=fill)
    return made


def _before(counts: jax.Array) -> jax.Array:
    return jnp.cumsum(counts, -1) - counts
