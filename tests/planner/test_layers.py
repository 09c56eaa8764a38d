"""A network that is made of blocks of equal layers is the one that is made of all nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.layouts import Layout
from meshdsl.planner import blocks as blocks_module
from meshdsl.planner import joint as joint_module
from meshdsl.planner.blocks import Blocks
from meshdsl.planner.bound import Certificate
from meshdsl.planner.eliminate import eliminate
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.messages import Messages, cap
from meshdsl.planner.model import Model
from meshdsl.planner.network import Network
from meshdsl.planner.prices import Prices
from meshdsl.planner.problem import make_problem
from meshdsl.planner.shorter import Shorter
from meshdsl.planner.solution import Pins
from meshdsl.trace import trace
from tests.planner.graphs import ONE, TWO, minimum, shape

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
    values = {v: model.nodes[n].ports[p].value for v, (n, p) in model.problem.defined.items()}
    some = dict.fromkeys([v for v, value in values.items() if value.shape == (8, 16)], 1e-9)
    some[max(v for v in values if v not in some)] = 2e-9
    reads = {end: price for v, price in some.items() for end in model.problem.used.get(v, ())}
    return Prices(own=some, read=reads, later=reads)


def optimum(joint, network):
    """The least cost of a network, and the plan that has it."""
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), 1 << 24)
    assert found.exact
    return found.cost + network.constant, joint.rows(network.named(network.order, found.states))


@pytest.mark.parametrize("prices", [False, True])
def test_copies_of_a_block_cover_all_nodes_once_and_are_wired_alike(monkeypatch, prices):
    monkeypatch.setattr(blocks_module, "MANY", 0)
    model = model_of(TWO)
    if prices:
        model.prices = priced(model)
    blocks = Blocks(model, True).all
    covered = [n for block in blocks for copy in block.copies for n in copy[: len(block.nodes)].tolist()]
    assert sorted(covered) == list(range(len(model.nodes)))
    assert max(len(block.copies) for block in blocks) >= LAYERS - 4
    used = model.problem.used
    readers = [[used.get(p.value.id, []) for p in node.ports if p.defines] for node in model.nodes]
    for block in blocks:
        names = [*block.nodes, *block.outside]
        for copy in block.copies.tolist():
            to = dict(zip(names, copy, strict=True))
            for n in block.nodes:
                assert [[(to[m], p) for m, p in ends] for ends in readers[n]] == readers[to[n]]
                assert model.units[n] is model.units[to[n]]


def stated(layers):
    """Layers, each of which states a layout for what the one before it has made, and one for its own."""

    def step(x):
        for before, after in layers:
            x = md.constrain(jnp.sin(md.constrain(x, before)) * 3, after)
        return x

    return Model(make_problem(trace(step, (shape(3200, 800),)), ONE, Pins((Layout(),), (Layout(),), (None,))))


@pytest.mark.parametrize("odd", ["x=S(0)", "", "x=B"])
def test_layers_whose_values_are_read_in_other_states_are_not_equal(monkeypatch, odd):
    model = stated([(odd if i == 5 else "x=S(1)", "x=S(0)") for i in range(9)])
    whole, best = Joint(model), Evaluator(model).evaluate(model.whole)
    monkeypatch.setattr(blocks_module, "MANY", 0)
    blocks = Joint(model)
    assert len(Blocks(model, True).all) > 1
    for make in (Joint.plans, lambda joint: joint.bounds(best, 1 << 12).network):
        (cost, _), (same, _) = (optimum(joint, make(joint)) for joint in (whole, blocks))
        assert cost == same


def test_layers_none_of_which_are_equal_leave_no_more_variables_than_without_them(monkeypatch):
    model = stated([(at, "") for at in ("x=S(0)", "x=S(1)", "x=B", "", "x=S(0)", "x=B", "x=S(1)", "", "x=B")])
    without = Joint(model).plans()
    monkeypatch.setattr(blocks_module, "MANY", 0)
    blocks = Blocks(model, True)
    assert blocks.layers.size and len(blocks.all) == 1
    assert len(Joint(model).plans().unary) == len(without.unary)


@pytest.mark.parametrize("pinned", ["", "x=S(1)"], ids=["", "a layer pinned"])
@pytest.mark.parametrize("prices", [False, True])
def test_networks_of_blocks_cost_what_those_of_all_nodes_do(monkeypatch, pinned, prices):
    model = model_of(ONE, pinned)
    evaluator, whole = Evaluator(model), Joint(model)
    monkeypatch.setattr(blocks_module, "MANY", 0)
    assert len(Blocks(model, True).all) > 1
    blocks = Joint(model)
    if prices:
        model.prices = priced(model)
        whole, blocks = whole.priced(model), blocks.priced(model)
    best = evaluator.evaluate(model.whole)
    for make in (Joint.plans, lambda joint: joint.bounds(best, 1 << 12).network):
        (cost, _), (same, rows) = (optimum(joint, make(joint)) for joint in (whole, blocks))
        assert cost == same
    paid, rows = optimum(blocks, blocks.plans())
    assert prices or evaluator.evaluate(rows).cost <= paid


@pytest.mark.parametrize("few", [1, 9])
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("pinned", ["", "x=S(1)"], ids=["", "a layer pinned"])
def test_the_plan_of_a_shorter_step_stretched_over_all_layers_is_as_good_as_the_best(monkeypatch, pinned, weighs, few):
    model = model_of(ONE, pinned, 12)
    best, _ = optimum(whole := Joint(model), whole.plans())
    monkeypatch.setattr(blocks_module, "MANY", 0)
    monkeypatch.setattr(blocks_module, "FEW", few)
    joint = Joint(model)
    model.weighs = weighs
    network, _ = joint.searched()
    assert joint.shortened == (few == 1)
    domains, tables = network.listed()
    found = eliminate(domains, tables, [0] * len(domains), 1 << 24)
    rows = joint.stretched(network.named(network.order, found.states))
    assert Evaluator(model).evaluate(rows).cost <= best * (1 + 1e-12)


def test_in_any_states_networks_of_blocks_cost_what_those_of_all_nodes_do(monkeypatch):
    monkeypatch.setattr(joint_module, "LARGEST", 0)
    model, rng = model_of(TWO), np.random.default_rng(0)
    whole = Joint(model)
    monkeypatch.setattr(blocks_module, "MANY", 0)
    blocks, best = Joint(model), Evaluator(model).evaluate(model.whole)
    for make in (Joint.plans, lambda joint: joint.bounds(best, 1 << 12).network):
        for _ in range(5):
            chosen = [int(rng.integers(len(states.cost))) for states in whole.states]
            assert minimum(make(blocks), chosen) == pytest.approx(minimum(make(whole), chosen), rel=1e-14)


@pytest.mark.parametrize("prices", [False, True])
def test_messages_that_begin_with_those_of_a_shorter_step_prove_as_much_sooner(monkeypatch, prices):
    monkeypatch.setattr(blocks_module, "MANY", 0)
    monkeypatch.setattr(blocks_module, "FEW", 1)
    model = model_of(ONE)
    if prices:
        model.prices = priced(model)
    evaluator, joint = Evaluator(model), Joint(model)
    best = evaluator.evaluate(model.whole)
    whole = joint.bounds(best, 1 << 12)
    network, few = whole.network, Network(None, len(model.nodes))
    for stamp in whole.shorter.stamps:
        few.stamp(stamp)
    assert len(few.unary) < len(network.unary)
    cost, _ = optimum(joint, network.copy())
    limit = evaluator.objective(best) + 1.0
    flat, made, unaware = whole.shorter.passing(limit), *(Messages(capped(network, limit)) for _ in range(2))
    whole.shorter.begin(made, limit)
    for messages in (flat, made):
        v, w = messages.ends
        alike = [(int(a), int(b)) for a, b in zip(*whole.shorter.like(v, w), strict=True)]
        same = [few.near.get(a, {}).get(b) is network.near[c][d] for (a, b), c, d in zip(alike, v, w, strict=True)]
        assert np.mean(same) > 0.9
    for messages in (flat, made, unaware):
        messages.run(1)
        assert messages.bound <= cost * (1 + 1e-12)
    assert (flat.bound, flat.cost) == pytest.approx((made.bound, made.cost), rel=1e-12)
    assert made.lower >= unaware.lower and made.cost <= unaware.cost


def test_messages_between_all_copies_point_to_states_of_all_nodes(monkeypatch):
    monkeypatch.setattr(blocks_module, "MANY", 0)
    monkeypatch.setattr(blocks_module, "FEW", 1)
    model = model_of(TWO)
    best = Evaluator(model).evaluate(model.whole)
    shorter = Joint(model).bounds(best, 1 << 12).shorter
    messages = shorter.passing(best.cost + 1.0)
    messages.run(8)
    states = shorter.states(messages)
    monkeypatch.setattr(joint_module, "LARGEST", 0)
    network = Joint(model).bounds(best, 1 << 12).network
    assert len(network.unary) > messages.order.size
    cost = minimum(network, states[: len(model.nodes)])
    assert messages.bound <= cost <= (messages.cost + messages.constant) * (1 + 1e-12)


def capped(network, limit):
    network = network.copy()
    cap(network, limit)
    return network


def test_messages_of_a_shorter_step_are_taken_over_once(monkeypatch):
    monkeypatch.setattr(blocks_module, "MANY", 0)
    monkeypatch.setattr(blocks_module, "FEW", 1)
    taken, begin = [], Shorter.begin
    monkeypatch.setattr(Shorter, "begin", lambda *given: taken.append(given) or begin(*given))
    model = model_of(ONE)
    certificate = Certificate(Joint(model), Evaluator(model).evaluate(model.whole), 1 << 12)
    for _ in range(3):
        certificate.tighten(1)
    assert len(taken) == 1
