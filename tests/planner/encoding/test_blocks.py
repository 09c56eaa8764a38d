"""A network that is made of blocks of equal layers is the one that is made of all nodes."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.solution import Pins
from meshdsl.layouts import Layout
from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.encoding.blocks import LayerBlocks
from meshdsl.planner.encoding.kernels import bound_from_shared_messages
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.encoding.reduced_depth import ReducedDepth
from meshdsl.planner.mrf.elimination import eliminate
from meshdsl.planner.mrf.network import Network
from meshdsl.planner.mrf.trws import TRWS, MessagePassing, clip, pack
from meshdsl.planner.objective import Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.trace import trace
from tests.planner.graphs import ONE, TWO, limited, minimum, shape
from tests.sweeps import swept

LAYERS = 7


def deep(weights, x):
    """Residual layers whose gradients are scaled by the norm of all of them."""

    def loss(weights):
        h = x
        for w in weights:
            h = h + jnp.tanh(h @ w) @ w.T
        return (h**2).sum()

    gradients = jax.grad(loss)(weights)
    norm = sum((g**2).sum() for g in gradients) ** 0.5
    return [w - g / norm for w, g in zip(weights, gradients, strict=True)]


def model_of(mesh, pinned="", layers=LAYERS):
    program = trace(deep, ([shape(8, 16)] * layers, shape(32, 8)))
    inputs = [Layout.parse(pinned if i == 2 else "") for i in range(layers)] + [Layout.parse("x=S(0)")]
    return Model(make_problem(program, mesh, Pins(tuple(inputs), (Layout(),) * layers, tuple(range(layers)))))


def priced(model):
    """Prices for what is as large as a weight, in all layers, and for one value of one layer."""
    values = {v.id: v for v in model.problem.index.values}
    some = dict.fromkeys([v for v, value in values.items() if value.shape == (8, 16)], 1e-9)
    some[max(v for v in values if v not in some)] = 2e-9
    reads = {end: price for v, price in some.items() for end in model.wiring.ends_of(v)[1:]}
    return Prices(own_layout=some, copy=reads, waiting=reads)


def optimum(joint, network):
    """The least cost of a network, and the plan that has it."""
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), 1 << 24)
    assert found.exact
    return found.cost + network.constant, joint.domains.rows(network.decode(network.order, found.states))


@pytest.mark.parametrize("prices", [False, True])
def test_copies_of_a_block_cover_all_nodes_once_and_are_wired_alike(prices):
    model = limited(model_of(TWO), encoding_layers_nodes=0)
    if prices:
        model.prices = priced(model)
    blocks = LayerBlocks(model, True).blocks
    covered = [n for block in blocks for copy in block.copies for n in copy[: len(block.nodes)].tolist()]
    assert sorted(covered) == list(range(len(model.nodes)))
    assert max(len(block.copies) for block in blocks) >= LAYERS - 4
    readers = [[model.wiring.ends_of(p.value.id)[1:] for p in node.ports if p.defines] for node in model.nodes]
    for block in blocks:
        names = [*block.nodes, *block.outside]
        for copy in block.copies.tolist():
            to = dict(zip(names, copy, strict=True))
            for n in block.nodes:
                assert [[(to[m], p) for m, p in ends] for ends in readers[n]] == readers[to[n]]
                assert model.unary[n] is model.unary[to[n]]


def stated(layers):
    """Layers, each of which states a layout for what the one before it has made, and one for its own."""

    def step(x):
        for before, after in layers:
            x = md.constrain(jnp.sin(md.constrain(x, before)) * 3, after)
        return x

    return Model(make_problem(trace(step, (shape(3200, 800),)), ONE, Pins((Layout(),), (Layout(),), (None,))))


@pytest.mark.parametrize("odd", ["x=S(0)", "", "x=B"])
def test_layers_whose_values_are_read_in_other_states_are_not_equal(odd):
    model = stated([(odd if i == 5 else "x=S(1)", "x=S(0)") for i in range(9)])
    whole, best = NetworkBuilder(model), Evaluator(model).evaluate(model.first_states)
    model = limited(model, encoding_layers_nodes=0)
    blocks = NetworkBuilder(model)
    assert len(LayerBlocks(model, True).blocks) > 1
    for make in (NetworkBuilder.plans, lambda joint: joint.bounds(best, 1 << 12).network):
        (cost, _), (same, _) = (optimum(joint, make(joint)) for joint in (whole, blocks))
        assert cost == same


def test_layers_none_of_which_are_equal_leave_no_more_variables_than_without_them():
    model = stated([(at, "") for at in ("x=S(0)", "x=S(1)", "x=B", "", "x=S(0)", "x=B", "x=S(1)", "", "x=B")])
    without = NetworkBuilder(model).plans()
    model = limited(model, encoding_layers_nodes=0)
    blocks = LayerBlocks(model, True)
    assert blocks.layers.size and len(blocks.blocks) == 1
    assert len(NetworkBuilder(model).plans().unary) == len(without.unary)


@pytest.mark.parametrize("pinned", ["", "x=S(1)"], ids=["", "a layer pinned"])
@pytest.mark.parametrize("prices", [False, True])
def test_networks_of_blocks_cost_what_those_of_all_nodes_do(pinned, prices):
    model = model_of(ONE, pinned)
    evaluator, whole = Evaluator(model), NetworkBuilder(model)
    model = limited(model, encoding_layers_nodes=0)
    assert len(LayerBlocks(model, True).blocks) > 1
    blocks = NetworkBuilder(model)
    if prices:
        model.prices = priced(model)
        whole, blocks = whole.priced(model), blocks.priced(model)
    best = evaluator.evaluate(model.first_states)
    for make in (NetworkBuilder.plans, lambda joint: joint.bounds(best, 1 << 12).network):
        (cost, _), (same, rows) = (optimum(joint, make(joint)) for joint in (whole, blocks))
        assert cost == same
    paid, rows = optimum(blocks, blocks.plans())
    assert prices or evaluator.evaluate(rows).cost <= paid


@pytest.mark.parametrize("few", [1, 9])
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("pinned", ["", "x=S(1)"], ids=["", "a layer pinned"])
def test_the_plan_of_a_shorter_step_stretched_over_all_layers_is_as_good_as_the_best(pinned, weighs, few):
    model = model_of(ONE, pinned, 12)
    best, _ = optimum(whole := NetworkBuilder(model), whole.plans())
    model = limited(model, encoding_layers_nodes=0, encoding_layers_kept=few)
    joint = NetworkBuilder(model)
    network = joint.reduced_plans(weighs)
    assert joint.drops_layers == (few == 1)
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), 1 << 24)
    rows = joint.whole_plan(network.decode(network.order, found.states))
    assert Evaluator(model).evaluate(rows).cost <= best * (1 + 1e-12)


def test_in_any_states_networks_of_blocks_cost_what_those_of_all_nodes_do():
    model, rng = limited(model_of(TWO), encoding_reduction_entries=0), np.random.default_rng(0)
    whole = NetworkBuilder(model)
    model = limited(model, encoding_layers_nodes=0)
    blocks, best = NetworkBuilder(model), Evaluator(model).evaluate(model.first_states)
    for make in (NetworkBuilder.plans, lambda joint: joint.bounds(best, 1 << 12).network):
        for _ in range(5):
            chosen = [int(rng.integers(len(states.cost))) for states in whole.domains.states]
            assert minimum(make(blocks), chosen) == pytest.approx(minimum(make(whole), chosen), rel=1e-14)


@pytest.mark.parametrize("prices", [False, True])
def test_messages_that_begin_with_those_of_a_shorter_step_prove_as_much_sooner(prices):
    model = limited(model_of(ONE), encoding_layers_nodes=0, encoding_layers_kept=1)
    if prices:
        model.prices = priced(model)
    evaluator, joint = Evaluator(model), NetworkBuilder(model)
    best = evaluator.evaluate(model.first_states)
    whole = joint.bounds(best, 1 << 12)
    network, few = whole.network, Network(None, len(model.nodes))
    for stamp in whole.reduced.replicas:
        few.add_replica(stamp)
    assert len(few.unary) < len(network.unary)
    cost, _ = optimum(joint, network.copy())
    limit = evaluator.priced_cost(best) + 1.0
    made, unaware = (TRWS(capped(network, limit)) for _ in range(2))
    whole.reduced.initialize(made, limit)
    v, w = made.ends
    alike = [(int(a), int(b)) for a, b in zip(*whole.reduced.counterparts(v, w), strict=True)]
    same = [few.pairwise.get(a, {}).get(b) is network.pairwise[c][d] for (a, b), c, d in zip(alike, v, w, strict=True)]
    assert np.mean(same) > 0.9
    before = whole.reduced.bound(limit)
    for messages in (made, unaware):
        messages.run(1)
        assert messages.bound <= cost * (1 + 1e-12)
    assert 0.95 * cost < before <= cost
    assert made.lower >= unaware.lower and made.cost <= unaware.cost


def test_messages_between_all_copies_point_to_states_of_all_nodes():
    model = limited(model_of(TWO), encoding_layers_nodes=0, encoding_layers_kept=1)
    best = Evaluator(model).evaluate(model.first_states)
    shorter = NetworkBuilder(model).bounds(best, 1 << 12).reduced
    bound = shorter.bound(best.cost + 1.0)
    model = limited(model, encoding_reduction_entries=0)
    network = NetworkBuilder(model).bounds(best, 1 << 12).network
    cost = minimum(network, shorter.decoded)
    assert bound <= cost <= best.cost + 0.5  # shares of ties round


@pytest.mark.parametrize("narrow", [False, True], ids=["float64", "float32"])
@swept("seed", range(20), kept=range(4))
def test_equal_messages_are_evaluated_once(seed, narrow):
    """Arbitrary messages on copies of a part: the bound is that of all tables, each by itself."""
    rng = np.random.default_rng(seed)
    part = Network(None, 3)
    for v in range(3):
        part.add_variable(v, rng.integers(9, size=3).astype(float))
    for v, w in ((0, 1), (1, 2), (0, 2)):
        part.add(v, w, rng.integers(9, size=(3, 3)).astype(float))
    copies = np.array([[0, 1, 2], [2, 3, 4], [4, 5, 6], [6, 7, 8]])
    few, every = (Network(None, 9).replicate(part, [0, 1, 2], some) for some in (copies[:2], copies))
    small, whole = pack([few], [every], float32_entries=0 if narrow else np.inf)
    assert whole.tables.dtype == (np.float32 if narrow else np.float64)
    known = MessagePassing(small)
    known.run(int(rng.integers(3)))
    like = rng.integers(-1, 1 if seed % 2 else known.flat.to.size, whole.flat.to.size)
    ahead = whole.flat.back > np.arange(like.size)
    like[whole.flat.back[ahead]] = np.where(like[ahead] >= 0, known.flat.back[like[ahead]], -1)
    found = bound_from_shared_messages(whole, known, like)
    assert found == pytest.approx(by_itself(whole, known, like))
    assert found <= min(sum(cost_of(whole, states)) for states in product(range(3), repeat=9)) + 1e-9


def cost_of(packed, states):
    """Of the tables of variables, and of pairs of them, in some states."""
    flat, source = packed.flat, np.repeat(np.arange(packed.order.size), np.diff(packed.flat.first))
    yield from (packed.unary[flat.start[v] + states[v]] for v in range(packed.order.size))
    for h, (v, w) in enumerate(zip(source, flat.to, strict=True)):
        if v < w:
            yield packed.tables[flat.table[h] + 3 * states[v] + states[w]]


def by_itself(packed, known, like):
    """The sum of what variables keep and what their edges to earlier ones have left."""
    flat, total = packed.flat, packed.constant
    share = [list(shares(part.flat)) for part in (packed, known)]
    said = [np.zeros(3)] * like.size
    for v in range(packed.order.size):
        for h in range(flat.first[v], flat.first[v + 1]):
            if (g := like[h]) >= 0:
                a = np.searchsorted(known.flat.first, g, side="right") - 1
                said[h] = known.sent[known.flat.out[g] :][:3] * share[1][a] / share[0][v]
    heard = [said[h] for h in flat.back]
    for v in range(packed.order.size):
        halves = range(flat.first[v], flat.first[v + 1])
        behind = [h for h in halves if flat.to[h] < v]
        own = packed.unary[flat.start[v] :][:3] + sum(heard[h] for h in halves)
        total += own.min() * (1 - len(behind) / share[0][v])
        for h in behind:
            table = packed.tables[flat.table[h] :][:9].reshape(3, 3)
            total += (table + (own / share[0][v] - heard[h])[:, None] - said[h]).min()
    return total


def capped(network, limit):
    network = network.copy()
    clip(network, limit)
    return network


def test_messages_of_a_shorter_step_are_taken_over_once(monkeypatch):
    taken, begin = [], ReducedDepth.initialize
    monkeypatch.setattr(ReducedDepth, "initialize", lambda *given: taken.append(given) or begin(*given))
    model = limited(model_of(ONE), encoding_layers_nodes=0, encoding_layers_kept=1)
    certificate = Certificate(NetworkBuilder(model), Evaluator(model).evaluate(model.first_states), 1 << 12)
    for _ in range(3):
        certificate.tighten(1)
    assert len(taken) == 1


def shares(flat):
    """Among how many edges each variable shares out what it knows."""
    for v in range(flat.first.size - 1):
        to = flat.to[flat.first[v] : flat.first[v + 1]]
        behind = int((to < v).sum())
        yield max(behind, to.size - behind, 1)
