"""Experts without drops: the numbers of a loop over experts, whatever the routing, and one exchange each way."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.dropless import ExpertWeights, capacity_at, dropless
from tests.models.values import quick

RNG = np.random.default_rng(5)
TOKENS, EMBED, HIDDEN, EXPERTS, CHOICES, RANKS = 128, 8, 12, 8, 2, 4
WEIGHTS = ExpertWeights(
    *(jnp.asarray(RNG.normal(size=(EXPERTS, *size)) / 3, "float32") for size in [(8, 12), (12, 8), (8, 12)])
)
X = jnp.asarray(RNG.normal(size=(4, TOKENS // 4, EMBED)), "float32")
SHARES = jnp.asarray(RNG.uniform(size=(4, TOKENS // 4, CHOICES)), "float32")
ROUTINGS = {
    "balanced": np.arange(TOKENS * CHOICES) % EXPERTS,
    "random": RNG.integers(0, EXPERTS, TOKENS * CHOICES),
    "uneven": np.minimum(RNG.geometric(0.4, TOKENS * CHOICES) - 1, EXPERTS - 1),
    "to one expert": np.full(TOKENS * CHOICES, 5),
}
OF_ONE_RANK = np.where(np.arange(TOKENS * CHOICES) < TOKENS * CHOICES // RANKS, ROUTINGS["balanced"], -1)
SLOW = md.Topology("slow", 1e8, 1e8, 1e9, 4e9, 0.0, (Link(1e-5, 1e7),))


def plain(x, experts, shares, params):
    """Every expert on every token."""
    made = jnp.zeros_like(x)
    for e in range(EXPERTS):
        hidden = jax.nn.silu(x @ params.gate[e]) * (x @ params.up[e])
        made += jnp.sum(jnp.where(experts == e, shares, 0), -1, keepdims=True) * (hidden @ params.down[e])
    return made


def with_gradients(function):
    def loss(x, shares, params, experts):
        made = function(x, experts, shares, params)
        return jnp.sum(jnp.sin(made)), made

    return quick(jax.grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"nodes": 2, "exchange": "two_level"}, {"nodes": 4, "exchange": "two_level", "capacity": 0.4}],
    ids=str,
)
def test_values_and_gradients_are_those_of_all_experts_on_all_tokens(kwargs):
    found = with_gradients(lambda *args: dropless(*args, ranks=RANKS, replicas=2, **kwargs))
    expected = with_gradients(plain)
    for experts in (numbers.reshape(SHARES.shape) for numbers in (*ROUTINGS.values(), OF_ONE_RANK)):
        both = [jax.tree.leaves(f(X, SHARES, WEIGHTS, experts)) for f in (found, expected)]
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_numbers_no_expert_adds_nothing_and_leaves_others_alone():
    x, experts = jnp.asarray(RNG.normal(size=(2, 8, EMBED)), "float32"), jnp.asarray(RNG.integers(0, 4, (2, 8, 1)))
    whole = dropless(x, experts, jnp.ones_like(experts, float), WEIGHTS, 2)
    for padding in (-1, 1000):
        made = dropless(x, experts.at[0, 0].set(padding), jnp.ones_like(experts, float), WEIGHTS, 2)
        np.testing.assert_allclose(made, whole.at[0, 0].set(0.0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, count", [("int8", 128), ("uint8", 256)])
@pytest.mark.parametrize("kwargs", [{}, {"nodes": 2, "exchange": "two_level"}], ids=str)
def test_experts_are_numbered_by_integers_of_any_width(dtype, count, kwargs):
    params = ExpertWeights(*(jnp.asarray(RNG.normal(size=(count, *size)), "float32") for size in [(8, 3), (3, 8)]))
    x, experts = X[0], jnp.arange(count - TOKENS // 4, count).reshape(-1, 1)
    narrow, whole = (
        dropless(x, e, SHARES[0, :, :1], params, RANKS, **kwargs) for e in (experts.astype(dtype), experts)
    )
    np.testing.assert_array_equal(narrow, whole)
    assert np.all(np.any(whole, -1))


def train(params, x, experts):
    """A step of experts behind a layer below; ``experts`` are given, so that routing is what a test wants."""

    def loss(params):
        made = dropless(jnp.tanh(x @ params["below"]), experts, jnp.ones_like(experts, float), params["experts"], RANKS)
        return jnp.mean(made**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def test_a_plan_exchanges_tokens_once_each_way_and_runs_with_all_tokens_sent_to_one_expert():
    params = {"below": jnp.asarray(RNG.normal(size=(EMBED, EMBED)), "float32"), "experts": WEIGHTS}
    pins = {"params/below": "data=B", "**": "data=S(0)"}
    sharded = md.parallelize(train, md.Mesh(data=RANKS, topology=SLOW), pins)
    args = params, X.reshape(TOKENS, EMBED), ROUTINGS["to one expert"].reshape(TOKENS, CHOICES)
    plan = sharded.plan(*args)
    exchanged = 4 * int(1.05 * TOKENS * CHOICES / RANKS**2) * EMBED * (RANKS - 1)
    sent = [(c.kind, c.phase) for c in plan.collectives if c.trips and c.bytes == exchanged]
    assert sent == [("all-to-all", phase) for phase in ("forward", "forward", "backward", "backward")]
    below = 2 * params["below"].nbytes * (RANKS - 1) // RANKS
    assert plan.bytes - below <= 4.2 * exchanged
    sharded.check(*args)  # in all turns; compiled bytes are compared in tests/examples/test_strategies.py


@pytest.mark.parametrize("ragged", [False, True], ids=["rounds", "ragged"])
@pytest.mark.parametrize("capacity, turns, rows, slots", [(0.45, 3, 6, 7), (2.0, 1, 16, 32)])
def test_plans_count_balanced_routing_whatever_the_capacity(ragged, capacity, turns, rows, slots):
    params = {"below": jnp.asarray(RNG.normal(size=(EMBED, EMBED)), "float32"), "experts": WEIGHTS}

    def step(params, x, experts):
        def loss(params):
            given = experts, jnp.ones_like(experts, float), params["experts"], RANKS, 1, capacity
            return jnp.mean(dropless(jnp.tanh(x @ params["below"]), *given, layout="data=S(ranks)") ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    mesh = md.Mesh(data=RANKS, topology=replace(SLOW, ragged=ragged))
    sharded = md.parallelize(step, mesh, {"params/below": "data=B", "**": "data=S(0)"})
    args = params, X.reshape(TOKENS, EMBED)
    size = 4 * (rows if ragged else slots) * EMBED * (RANKS - 1)  # of 16 rows for each of the owners
    plan = sharded.plan(*args, jnp.zeros((TOKENS, CHOICES), int))
    sent = [c.trips for c in plan.collectives if c.kind == "all-to-all" and c.bytes == size]
    assert sorted(sent) == sorted([1] * 4 + [turns - 1] * 5)  # further turns run twice
    for numbers in ROUTINGS.values():
        sharded.check(*args, jnp.asarray(numbers.reshape(TOKENS, CHOICES)))


def between_nodes(exchange, network):
    """A step over two nodes of four ranks, with links ``network`` times slower between them, and its arguments."""

    def step(params, x, experts):
        def loss(params):
            given = experts, jnp.ones_like(experts, float), params["experts"], 8
            kwargs = {"nodes": 2, "exchange": exchange, "layout": "node=S(nodes),data=S(ranks)"}
            return jnp.mean(dropless(jnp.tanh(x @ params["below"]), *given, **kwargs) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    links = Link(1e-8, 1e7, devices=4), Link(1e-8, 1e7 / network)
    mesh = md.Mesh(node=2, data=4, topology=replace(SLOW, links=links, ragged=True))
    pins = {"params/below": "node=B,data=B", "**": "node=S(0),data=S(0)"}
    params = {"below": jnp.asarray(RNG.normal(size=(EMBED, EMBED)), "float32"), "experts": WEIGHTS}
    return md.parallelize(step, mesh, pins), (params, X.reshape(TOKENS, EMBED))


def test_two_levels_send_a_token_once_to_each_node_and_run_whatever_the_routing():
    sharded, args = between_nodes("two_level", 10)
    plan = sharded.plan(*args, jnp.zeros((TOKENS, CHOICES), int))
    size, tokens = EMBED * 4, TOKENS // 8
    for axis, sent in (("node", tokens * size), ("data", 4 * int(1.05 * tokens * CHOICES / 4) * size * 3 // 4)):
        found = [c.phase for c in plan.collectives if c.trips and c.axes == (axis,) and c.bytes == sent]
        assert found == ["forward", "forward", "backward", "backward"]
    for numbers in ROUTINGS.values():
        sharded.check(*args, jnp.asarray(numbers.reshape(TOKENS, CHOICES)))


def test_tokens_are_sent_to_the_nodes_of_their_experts_alone():
    # both experts of each token are in one node; of all tokens, a node could take a half in a turn
    assert turns_taken(ROUTINGS["balanced"], 1.05, nodes=RANKS, exchange="two_level") == 1
    assert turns_taken(ROUTINGS["to one expert"], 1.05, nodes=RANKS, exchange="two_level") > 2


@pytest.mark.parametrize("network, taken", [(1, "flat"), (20, "two_level")])
def test_two_levels_are_taken_where_links_between_nodes_are_slow(network, taken):
    sharded, args = between_nodes("auto", network)
    assert sharded.plan(*args, jnp.zeros((TOKENS, 4), int)).alternatives == (("experts", taken),)  # of 8 experts


@pytest.mark.parametrize(
    "capacity, balanced, to_one", [(0.3, 5, 21), (0.33, 4, 16), (0.45, 3, 11), (1.0, 1, 5), (1.5, 1, 3), (9, 1, 1)]
)
def test_balanced_routing_takes_the_planned_turns_and_uneven_routing_more(capacity, balanced, to_one):
    entries = np.arange(TOKENS * CHOICES)
    ahead = np.tile(np.repeat(np.arange(RANKS), [17, 17, 17, 13]), RANKS)  # owners get equally many of uneven pairs
    pairs = (ahead + entries // (TOKENS * CHOICES // RANKS)) % RANKS * (EXPERTS // RANKS)
    for numbers in (ROUTINGS["balanced"], pairs, OF_ONE_RANK):
        assert turns_taken(numbers, capacity) == balanced
    assert turns_taken(ROUTINGS["to one expert"], capacity) == to_one


@pytest.mark.parametrize("quantile, count", [(0, 1), (0.5, 3), (1, 4)])
def test_that_part_of_measured_routings_takes_one_turn(quantile, count):
    capacity = capacity_at(quantile, [np.bincount(numbers, minlength=EXPERTS) for numbers in ROUTINGS.values()], RANKS)
    assert [turns_taken(numbers, capacity) == 1 for numbers in ROUTINGS.values()].count(True) == count


def test_a_capacity_of_measured_loads_is_not_rounded_below_them():
    loads = np.array([60, 0, 40, 0, 40, 0, 36, 0])  # 15 / 11 * 11 is below 15
    assert turns_taken(np.repeat(np.arange(EXPERTS), loads), capacity_at(1, loads, RANKS)) == 1
    assert turns_taken(np.repeat(np.arange(EXPERTS), loads), 14.9 / 11) == 2


def turns_taken(numbers, capacity, **kwargs):
    """Returns how often experts are run on the first tokens, of this routing, having checked the values."""
    runs, experts = [], jnp.asarray(numbers.reshape(4, -1, CHOICES))
    x, shares = (whole[:, : experts.shape[1]] for whole in (X, SHARES))

    def counted(hidden):
        jax.debug.callback(lambda: runs.append(0))
        return jax.nn.silu(hidden)

    made = dropless(x, experts, shares, WEIGHTS, RANKS, capacity=capacity, activation=counted, **kwargs)
    np.testing.assert_allclose(made, plain(x, experts, shares, WEIGHTS), rtol=1e-5, atol=1e-5)
    jax.effects_barrier()
    return len(runs)


@pytest.mark.parametrize(
    "given, text",
    [
        (
            {"ranks": 3},
            r"ranks=3 does not divide experts=8; the nearest is 2 or 4\n.*tokens=128; the nearest is 2 or 4",
        ),
        ({"replicas": 5}, r"replicas=5 does not divide the 32 tokens of a rank; the nearest is 4 or 8"),
        ({"nodes": 3}, r"nodes=3 does not divide ranks=4; the nearest is 2 or 4"),
        ({"exchange": "two"}, r"exchange='two' is no exchange; did you mean 'auto'"),
        ({"capacity": 0}, r"capacity=0: a turn needs room; give 1.05"),
        (
            {"weights": SHARES[:2]},
            r"weights: shape \(2, 32, 2\) is not \[... choices\] \(4, 32, 2\), to fit x \(4, 32, 8\)",
        ),
        ({"experts": SHARES}, r"experts: float32 numbers no experts; give integers"),
        ({"experts": jnp.array(1)}, r"x \(4, 32, 8\) with experts \(\) has no tokens, or choices, to send"),
        ({"weights": jnp.array(1j)}, r"weights: complex64 weighs no results; give floats, such as weights.astype"),
        ({"weights": jnp.array(1)}, r"weights: int32 weighs no results; give floats"),
        ({"capacity": "1"}, r"capacity='1': a turn needs room; give 1.05"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(given, text):
    whole = {"x": X, "experts": jnp.zeros(SHARES.shape, int), "weights": SHARES, "params": WEIGHTS, "ranks": RANKS}
    with pytest.raises(md.ArgumentError, match=text):
        dropless(**whole | given)


@pytest.mark.parametrize(
    "given, text",
    [
        ((1.5, [[1, 2, 3, 4]], 2), r"quantile=1.5: a part of all exchanges is between 0 and 1; give 0.99"),
        ((0.9, [[1, 2, 3, 4], [0, 0, 0, 0]], 2), r"loads: exchanges of shape \(2, 4\) have no tokens"),
        (("all", [[1, 2, 3, 4]], 2), r"quantile='all': a part of all exchanges is between 0 and 1"),
        ((0.9, [[1, -2, 3, 4]], 2), r"loads: some are no numbers of tokens; give how many each expert was sent"),
        ((0.9, [[1, np.nan, 3, 4]], 2), r"loads: some are no numbers of tokens"),
        ((0.9, [[1, 2, 3, 4]], 3), r"ranks=3 does not divide experts=4; the nearest is 2 or 4"),
        ((0.9, [[1, 2, 3, 4]], 0), r"ranks=0 is no number of devices; give an int of at least 1"),
    ],
    ids=str,
)
def test_a_quantile_of_no_loads_is_refused(given, text):
    with pytest.raises(md.ArgumentError, match=text):
        capacity_at(*given)
