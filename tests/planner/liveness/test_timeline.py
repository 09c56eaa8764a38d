"""Layouts of all tensors at once are those of each; the memory of a plan is the same by numbers and by names."""

import numpy as np
import pytest

import meshdsl as md
from meshdsl.pins import make_pins
from meshdsl.planner.liveness.peak import Liveness, ProgramPoint
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.memory.fit import PeakCache, PlanMaterializer
from meshdsl.planner.objective import Evaluator, layouts_of, trees_of
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.trace import trace
from tests.planner.graphs import layout_of
from tests.planner.liveness.test_peak import ONE, STACK, branches, stacked, stored
from tests.planner.memory.test_dual import mixed_step

STEPS = {
    "mixed": mixed_step(),
    "branches": (branches, (ONE,)),
    "stacked": (stacked, (STACK,)),
    "stored": (stored, (ONE,)),
}


def model_of(name, mesh, **pinned):
    step, args = STEPS[name]
    program = trace(step, args)
    return Model(make_problem(program, mesh, make_pins(program, mesh, **pinned)))


def drawn(model, seed):
    """A random state that the pins allow."""
    rng = np.random.default_rng(seed)
    return np.array([rng.choice(np.argwhere(np.isfinite(model.unary[n]))) for n in range(len(model.nodes))])


@pytest.mark.parametrize("mesh", [md.Mesh(x=2, y=2), md.Mesh(x=2, y=2, z=2)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_layouts_of_all_ports_are_those_of_each(name, mesh):
    model = model_of(name, mesh)
    rows = drawn(model, 1)
    own, uses = layouts_of(model, rows)
    for n, node in enumerate(model.nodes):
        for p, port in enumerate(node.ports):
            if port.defines or port.use:
                found = own[port.value.id] if port.defines else uses[port.use]
                assert found == layout_of(model, n, p, rows[n])
    assert set(own) == {v.id for v in model.problem.index.values}


@pytest.mark.parametrize("mesh", [md.Mesh(x=4), md.Mesh(x=2, y=1, z=2)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_values_that_are_read_elsewhere_are_told_once_with_all_other_layouts(name, mesh):
    model = model_of(name, mesh)
    layouts = model.ports.layouts(drawn(model, 2))
    ports, expected = {}, {}
    for i, (n, p) in enumerate((n, p) for n, node in enumerate(model.nodes) for p in range(len(node.ports))):
        ports[n, p] = int(layouts[i])
    for value in (v.id for v in model.problem.index.values):
        source, *readers = model.wiring.ends_of(value)
        others = {ports[reader] for reader in readers} - {ports[source]}
        expected |= {value: (ports[source], tuple(sorted(others)))} if others else {}
    found = [(v, (read.own, read.others)) for read in model.ports.resharded(layouts) for v in read.values]
    assert found and dict(found) == expected and len(found) == len(expected)


@pytest.mark.parametrize("name", STEPS)
def test_a_plan_that_is_held_costs_what_it_does_near_itself(name):
    model = model_of(name, md.Mesh(x=2, y=2, z=2))
    for seed in range(3):
        rows = drawn(model, seed)
        found = []
        for view in (model.restricted_to_plan(rows), model.restricted((), rows)):
            choice = Evaluator(view).evaluate(rows)
            found.append((choice.cost, choice.edges))
        assert found[0] == found[1]


def test_axes_of_one_dim_are_in_the_order_of_the_pin():
    model = model_of("stacked", md.Mesh(x=2, y=2), layouts={"*": "y=S(1) x=S(1)"})
    own, _ = layouts_of(model, model.first_states)
    assert str(own[model.problem.program.graph.inputs[0].id]) == "y=S(1) x=S(1)"


@pytest.mark.parametrize("topology", ["cpu", "tpu-v5e"])
@pytest.mark.parametrize("name", STEPS)
def test_a_plan_and_its_layouts_by_name_take_the_same_memory(name, topology):
    mesh = md.Mesh(x=2, y=2, topology=topology)
    model = model_of(name, mesh)
    placer, evaluator, graph = PlanMaterializer(model), Evaluator(model), model.problem.program.graph
    peaks = set()
    for seed in range(5):
        choice = evaluator.evaluate(drawn(model, seed))
        there = copy_timeline(graph, mesh, *layouts_of(model, choice.rows), trees_of(model, choice))
        one, other = Liveness(placer.timeline_of_plan(choice)), Liveness(there)
        peak, same = one.peak(), other.peak()
        assert (peak.bytes, peak.op, set(peak.copies)) == (same.bytes, same.op, set(same.copies))
        assert sum(copy.bytes for copy in peak.copies) == peak.bytes and one.bytes_by_op() == other.bytes_by_op()
        peaks.add(peak.bytes)
    assert len(peaks) > 1


@pytest.mark.parametrize("mesh", [md.Mesh(x=2, y=2), md.Mesh(x=4)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_what_points_hold(name, mesh):
    """By value, and the points that hold more than a limit: against all operations of the step, loops included."""
    model = model_of(name, mesh)
    choice = Evaluator(model).evaluate(drawn(model, 3))
    lives = Liveness(PlanMaterializer(model).timeline_of_plan(choice))
    peak = lives.peak()
    assert lives.bytes_by_value(peak.path).sum() == peak.bytes
    assert lives.points_over(peak.bytes, 24, 48) == []
    points = lives.points_over(0.5 * peak.bytes, 24, 48)
    assert points[0] == (peak.bytes, peak.path)
    assert [held for held, _ in points] == sorted((held for held, _ in points), reverse=True)
    every = lives.bytes_by_op()
    for held, path in points:
        assert (
            held == lives.bytes_by_value(path).sum() == lives.peak_at(ProgramPoint(held, path)).bytes > 0.5 * peak.bytes
        )
        inner = lives.placed.timeline.index.ops[path[-1]]
        assert every[inner.id] == held
        assert sum(copy.bytes for copy in lives.peak_at(ProgramPoint(held, path)).copies) == held


def test_the_fullest_point_of_what_has_no_price():
    model = model_of("mixed", md.Mesh(x=4))
    evaluator = Evaluator(model)
    weigher, choice = PeakCache(evaluator, frozenset()), evaluator.evaluate(model.first_states)
    peak = weigher.peak(choice)
    assert weigher.unpriced_peak(choice, peak.bytes, ()) is None
    limit = peak.bytes // 4
    assert weigher.unpriced_peak(choice, limit, ()).path == peak.path
    priced = {copy.value.id for copy in peak.copies}
    other = weigher.unpriced_peak(choice, limit, priced)
    left = [0] if other is None else [c.bytes for c in other.copies if c.value.id not in priced]
    assert (other is None) == (sum(left) <= limit)
    assert weigher.unpriced_peak(choice, limit, [v.id for v in weigher._materializer.timeline.index.values]) is None
