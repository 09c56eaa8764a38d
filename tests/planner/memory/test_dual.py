"""Bounds that know the memory limit: what they price is there in every plan, and no plan that fits is below them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.solution import Pins
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.topology import Link, Topology
from meshdsl.models import gpt
from meshdsl.pins import make_pins
from meshdsl.planner.costs.steiner import steiner_tree
from meshdsl.planner.encoding.fanout import add_max_reader_bound
from meshdsl.planner.encoding.hubs import HubTables
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.memory.dual import LagrangianBound, dual_bound, start_bound
from meshdsl.planner.memory.lower_bound import MemoryLowerBound
from meshdsl.planner.memory.pricing import PricedPoints
from meshdsl.planner.mrf.network import Network
from meshdsl.planner.objective import Evaluator, layouts_of, trees_of
from meshdsl.planner.problem.build import make_problem, repin
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.planner.search.search import search
from meshdsl.trace import trace
from meshdsl.util.runtime import worker_pool
from tests.planner.graphs import CHAINS, fitter_of, limited, minimum, shape, solved
from tests.sweeps import swept

PROGRAM = gpt.program(gpt.Config(6, 128, 4, seq=32, vocab=128), gpt.RULES["fsdp"], batch=64)


def mixed(w, b, xs):
    """Views, results over operands, a loop that hands on, and values that are read again later."""
    flat = xs.reshape(-1, 64)
    kept = jnp.sin(flat @ w)
    over = jnp.cos(kept) + b

    def layer(c, x):
        y = jnp.tanh(c @ w) + x[:64].astype(c.dtype)
        return y, y @ w

    last, ys = jax.lax.scan(layer, over[:64], xs)
    return (
        w - 0.1 * (last.T @ kept[:64]),
        b + jnp.sum(ys, (0, 1)),
        jnp.transpose(flat),
        jax.lax.optimization_barrier(kept),
    )


def gpt_step():
    return PROGRAM.step, PROGRAM.args


def mixed_step():
    return mixed, (shape(64, 64), shape(64), shape(4, 64, 64))


def looped_step():
    """The result of the body lies in the place of the carry, not over what it is made from."""
    return lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0], (shape(64, 64),) * 2


def thrice_step():
    """A matrix that is read three times."""
    return lambda w, x: jnp.tanh(jnp.sin(x @ w) @ w) @ w, (shape(64, 64), shape(8, 64))


def model_of(step, args, mesh, donated, **stated):
    program = trace(step, args)
    gone = frozenset(range(len(program.inputs) - 1)) if donated else frozenset()
    pins = make_pins(program, mesh, donated=gone, **stated)
    return Model(make_problem(program, mesh, pins)), pins


def chains(graph, around=()):
    """All operations, after those whose bodies they stand in."""
    for op in graph.ops[:-1]:
        yield (*around, op)
        for body in op.bodies:
            yield from chains(body, (*around, op))


@swept("made", [mixed_step, looped_step, thrice_step, gpt_step], left=(gpt_step,), ids=lambda made: made.__name__)
@swept("donated", [False, True], kept=(True,))
@swept("topology", ["cpu", "tpu-v5e"], kept=("tpu-v5e",))
def test_the_floor_is_never_above_the_predicted_memory(made, donated, topology):
    mesh, rng = md.Mesh(x=2, y=2, topology=topology), np.random.default_rng(3)
    model, pins = model_of(*made(), mesh, donated)
    graph, evaluator = model.problem.program.graph, Evaluator(model)
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    floors = {chain[-1].id: MemoryLowerBound(model, pins.donated, chain) for chain in chains(graph)}
    shares = []
    for rows in (model.first_states, *(np.array([rng.choice(s) for s in states]) for _ in range(4))):
        choice = evaluator.evaluate(rows)
        there = copy_timeline(graph, mesh, *layouts_of(model, choice.rows), trees_of(model, choice))
        points = Liveness(there, pins.donated).bytes_by_op()
        shares += [floors[op].bytes(choice) / points[op] for op in floors if points[op]]
    assert 0.2 < max(shares) <= 1 + 1e-12


@pytest.mark.parametrize("axes", [{"data": 8}], ids=str)
def test_the_bound_is_above_the_one_without_memory_and_below_every_plan_that_fits(axes):
    """Also where the plan was found in neighbourhoods, and rounds are not affordable."""
    mesh = md.Mesh(**axes, topology="dgx-h100")
    model, pins = model_of(*gpt_step(), mesh, True, rules=Rules.of(PROGRAM.rules))
    if len(axes) > 2:
        model = limited(model, search_joint_pairs=0, memory_dual_entries=0)
    fitter = fitter_of(model, pins)
    limit = 0.85 * fitter.peak(search(model, lambda _: False).plan).bytes
    found = search(model, lambda choice: fitter.peak(choice).bytes <= limit)
    fit = fitter.fit(found.plan, limit)
    least = dual_bound(fitter, fit)
    assert fitter.peak(fit.plan).bytes <= limit and model.scale.seconds(least) > found.lower_bound() * 1.01
    assert least <= fit.plan.cost
    assert model.prices.resident == {}
    assert dual_bound(fitter, replace(fit, plan=found.plan, limit=10 * limit)) == 0.0


def test_in_the_network_a_plan_pays_no_more_than_is_said_of_it():
    """States that cost more than it are dropped: were it less, its own might be."""
    mesh, rng = md.Mesh(x=8, topology="tpu-v5e"), np.random.default_rng(0)
    model, pins = model_of(lambda x, w: (x - (x * w).T, jnp.sin(x) @ w), (shape(64, 64),) * 2, mesh, False)
    model = limited(model, encoding_reduction_entries=0)
    evaluator = Evaluator(model)
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    for chain in chains(model.problem.program.graph):
        floor = MemoryLowerBound(model, pins.donated, chain)
        for price in 1e-12 * rng.uniform(0.1, 10, 20):
            plan = evaluator.evaluate(np.array([rng.choice(s) for s in states]))
            dual = LagrangianBound(floor, (plan,), 0.0, True)
            model.prices = floor.prices(price)
            joint = NetworkBuilder(model)
            chosen = [int(np.flatnonzero((s.rows == row).all(1))[0]) for s, row in zip(joint.domains.states, plan.rows)]
            assert minimum(joint.bounds(plan, 1 << 15).network, chosen) <= dual.cost_at(price, plan)
            model.prices = Prices()


def test_a_copy_that_is_kept_while_another_one_is_read_pays():
    """No more than is said of the plan, and more than without that copy; all other copies are counted besides."""
    model, pins = model_of(*thrice_step(), md.Mesh(x=8, topology="dgx-h100"), True)
    model = limited(model, encoding_reduction_entries=0, encoding_hub_stake=0.0)
    evaluator, rng, price = Evaluator(model), np.random.default_rng(0), 1e-9
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    (floor,) = (
        f
        for chain in chains(model.problem.program.graph)
        if (f := MemoryLowerBound(model, pins.donated, chain)).path_ends_unless
    )
    found = list[tuple[float, float]]()
    for _ in range(100):
        plan = evaluator.evaluate(np.array([rng.choice(s) for s in states]))
        least = list[float]()
        for prices in (floor.prices(price), replace(floor.prices(price), path_copy_unless={})):
            joint = NetworkBuilder(model.with_prices(prices))
            chosen = [int(np.flatnonzero((s.rows == row).all(1))[0]) for s, row in zip(joint.domains.states, plan.rows)]
            least.append(minimum(joint.bounds(plan, 1 << 15).network, chosen))
        assert least[1] <= least[0] <= LagrangianBound(floor, (plan,), 0.0, True).cost_at(price, plan)
        (kept,) = floor._resident.smallest_unless(floor.path_ends_unless, model.ports.layouts(plan.rows), plan.edges)
        found.append((kept, model.scale.seconds(least[0] - least[1]) / price))
    whole = 64 * 64 * 4
    assert {0, whole} <= {kept for kept, _ in found} and max(paid for _, paid in found) == pytest.approx(whole, 1e-3)


@pytest.mark.parametrize("readers", [3, 5])
def test_the_dearest_moves_count_whole_and_cost_no_more_than_all_do(readers):
    model, _ = model_of(lambda x: [x + i for i in range(1, 1 + readers)], (shape(64, 64),), md.Mesh(x=8), False)
    (value,) = model.problem.program.graph.inputs
    ends, closure = model.wiring.ends_of(value.id), model.domain(value.id)
    assert len(ends) == readers + 1 and not closure.partial.all()
    layouts = [np.arange(closure.layouts.size)] * len(ends)
    network = Network(None, len(ends))
    for n, read in enumerate(layouts):
        network.add_variable(n, np.zeros(read.size))
    variables = list(zip(range(len(ends)), layouts, strict=True))
    assert not add_max_reader_bound(network, HubTables(model, network.memo), value.id, variables, 1e30, 10)
    assert add_max_reader_bound(network, HubTables(model, network.memo), value.id, variables, 1e30, 1 << 20)
    rng = np.random.default_rng(0)
    for _ in range(50):
        own, *read = chosen = rng.integers(closure.layouts.size, size=len(ends)).tolist()
        cost, dearest = steiner_tree(closure.costs, closure.transit_costs, own, read)[0], closure.costs[own, read].max()
        assert dearest / 1.01 <= minimum(network.copy(), chosen) <= dearest <= cost


@swept("pairs", [True, False], kept=(False,))
def test_three_axes_within_a_limit_are_no_worse_than_two_of_as_many_devices(pairs):
    """Where all axes are too many to be looked at jointly, and steps so large that no two axes move by themselves."""
    two, three = md.Mesh(data=4, model=2, topology=CHAINS), md.Mesh(pod=2, data=2, model=2, topology=CHAINS)
    seconds, limit = [], 0.0
    for mesh in (two, three):
        model, pins = model_of(*gpt_step(), mesh, True)
        if seconds:
            model = limited(model, search_joint_pairs=0, **({} if pairs else {"memory_priced_nodes": 0}))
        fitter = fitter_of(model, pins)
        free = search(model, lambda _: False).plan
        limit = limit or 0.85 * fitter.peak(free).bytes
        best = fitter.improve(fitter.bisect(fitter.fit(free, limit))).plan
        assert fitter.peak(best).bytes <= limit
        seconds.append(model.scale.seconds(best.cost))
    assert seconds[1] <= seconds[0] * 1.001


def test_on_many_axes_two_move_by_themselves_before_all_do():
    """All in groups end elsewhere, from where no plan was found that fits."""
    topology = Topology("two links", 1e8, 1e8, 1e8, 4e9, 1e-7, (Link(1e-6, 1e8, 2), Link(2e-6, 2e7)))
    program = trace(lambda a, b: jnp.tanh(a @ b + jnp.sum(a)) @ b.T @ b, (shape(32, 16), shape(16, 32)))
    pins = Pins((md.Layout(),) * 2, (md.Layout(),), (None,))
    model = Model(make_problem(program, md.Mesh(x=2, y=1, z=2, w=2, topology=topology), pins))
    model = limited(model, search_joint_pairs=0, memory_branch_nodes=-1)
    fitter = fitter_of(model, pins)
    fit = fitter.fit(search(model, lambda _: False).plan, 3225)
    assert fitter.peak(fit.plan).bytes <= 3225


@pytest.mark.sweep
@pytest.mark.parametrize("off", [0.25, 2.0])
def test_from_a_price_that_is_off_the_bound_rises_to_what_it_is_at_a_good_one(off):
    model, pins = model_of(*gpt_step(), md.Mesh(data=8, topology="dgx-h100"), True, rules=Rules.of(PROGRAM.rules))
    fitter = fitter_of(model, pins)
    free = search(model, lambda _: False).plan
    limit = 0.85 * fitter.peak(free).bytes
    fit = fitter.fit(free, limit)
    plans, bounds = (free, *fit.pricing.infeasible, fit.plan), fit.pricing.points.lower_bounds
    duals = [LagrangianBound(held, plans, limit, True) for held in bounds if held.bytes(free) > limit]
    dual = max(duals, key=lambda dual: dual.highest)
    good, _ = dual.at(dual.price)
    alone, _ = dual.at(off * dual.price)
    assert alone < 0.99 * good <= dual.best(4, off * dual.price) <= fit.plan.cost


@pytest.mark.sweep
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}], ids=str)
def test_the_bound_of_a_large_step_is_begun_beside_the_search(axes):
    mesh, rules = md.Mesh(**axes, topology="dgx-h100"), Rules.of(PROGRAM.rules)
    model, pins = model_of(*gpt_step(), mesh, True, rules=rules)
    fitter, large = fitter_of(model, pins), fitter_of(limited(model, memory_dual_nodes=0), pins)
    free = search(model, lambda _: False).plan
    limit = 0.85 * fitter.peak(free).bytes
    first = large.fit(free, limit)
    with worker_pool() as submit:
        small = start_bound(fitter, fitter.fit(free, limit), submit)
        assert small is None, "more prices may be tried"
        pending = start_bound(large, first, submit)
        fit = large.improve(large.bisect(first))
    alone, _ = LagrangianBound(pending.held, (first.plan,), limit, True).at(pending.price)
    assert 0 < pending.result.result() == alone <= fit.plan.cost
    anew = dual_bound(large, fit)
    assert alone <= dual_bound(large, fit, pending) <= fit.plan.cost
    other = pending._replace(price=pending.price * 2)
    assert dual_bound(large, fit, other) == max(alone, anew), "the price has changed: both are asked"


def test_what_memory_holds_at_least_is_known_under_other_pins():
    mesh = md.Mesh(data=4, model=2, topology="dgx-h100")
    model, pins = model_of(*gpt_step(), mesh, True)
    fitter = fitter_of(model, pins)
    free = search(model, lambda _: False).plan
    points = fitter.fit(free, 0.85 * fitter.peak(free).bytes).pricing.points
    program = model.problem.program
    stated = make_pins(program, mesh, layouts={"params/*": "model=S(0)"}, donated=pins.donated)
    again = model.repinned(repin(model.problem, stated))
    known, anew = PricedPoints(again, pins.donated, points), PricedPoints(again, pins.donated)
    rng = np.random.default_rng(0)
    states = [np.argwhere(np.isfinite(again.unary[n])) for n in range(len(again.nodes))]
    plans = [Evaluator(again).evaluate(np.array([rng.choice(s) for s in states])) for _ in range(4)]
    floors = known.lower_bounds
    assert floors and all(floor.model is again for floor in floors)
    for floor, op in zip(floors, sorted(points._peaks), strict=True):
        other = anew.lower_bound(op)
        assert [floor.bytes(plan) for plan in plans] == [other.bytes(plan) for plan in plans]
        assert floor.path_copy_prices(1.0) == other.path_copy_prices(1.0)


@pytest.mark.sweep
def test_the_bound_is_no_looser_where_another_plan_is_the_cheapest_at_its_price():
    """A network that is tight around that plan alone proves half of this."""
    program = trace(lambda x: (x * x, x @ x, x + x), (shape(8, 8),))
    mesh = md.Mesh(x=2, y=2, z=2, topology="cpu")
    found = solved(program, mesh, make_pins(program, mesh), 489.6)
    assert 0.2 * found.seconds < found.lower_bound <= found.seconds
