"""Of plans that cost the same, the one with fewer distinct layouts."""

import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.ir.solution import Pins
from meshdsl.layouts.topology import Link, Topology
from meshdsl.planner.objective import Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search.search import search
from meshdsl.planner.search.tie_break import count_layouts, fewest_layouts
from meshdsl.trace import trace
from tests.planner.graphs import ONE, STEPS, TWO, layout_of, problem_of, shape

FREE = Topology("free", 1e30, 1e30, 1e30, 1e12, 0.0, (Link(0.0, 1e30),))


def apart(x, y, z):
    """Three chains that have nothing to do with each other, the last of which is turned."""
    return jnp.tanh(x) + 1, jnp.sin(y) * 2, jnp.cos(z.T) * 3


def model_of(mesh, *pins):
    program = trace(apart, (shape(64, 64), shape(64, 64), shape(64, 32)))
    layouts = tuple(map(md.Layout.parse, pins))
    return program, Pins(layouts, (md.Layout(),) * 3, (None,) * 3)


def evaluated(model, placed):
    """The plan in which every node takes its first state with only this placement, or its first one."""

    def row(n):
        states = np.argwhere(np.isfinite(model.unary[n]))
        ports = range(len(model.nodes[n].ports))
        fine = [s for s in states if {layout_of(model, n, p, s).on("x") for p in ports} <= {placed(n)}]
        return fine[0] if fine else states[0]

    evaluator = Evaluator(model)
    return evaluator, evaluator.evaluate(np.array([row(n) for n in range(len(model.nodes))]))


def test_chains_that_could_lie_in_several_ways_lie_alike():
    program, pins = model_of(ONE, "x=S(0)", "", "")
    model = Model(make_problem(program, ONE, pins))
    ways = {"tanh": md.S(0), "add": md.S(0), "sin": md.S(1), "mul": md.S(1)}
    named = [node.op.name if node.op else "" for node in model.nodes]

    def placed(n):
        what = model.nodes[n].label
        return ways.get(named[n], md.S(1) if what in ("input y", "output 1") else md.S(0))

    evaluator, mixed = evaluated(model, placed)
    found = fewest_layouts(model, evaluator, mixed, lambda _: True)
    assert found.cost <= mixed.cost and count_layouts(model, found) < count_layouts(model, mixed)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mesh", [TWO, md.Mesh(x=2, y=2, topology=FREE)], ids=["cpu", "free"])
def test_a_simpler_plan_costs_no_more_and_is_the_same_every_time(name, mesh):
    model = problem_of(name, mesh)
    best, evaluator = search(model).plan, Evaluator(model)
    found, again = (fewest_layouts(model, evaluator, best, lambda _: True) for _ in range(2))
    assert found.cost <= best.cost and count_layouts(model, found) <= count_layouts(model, best)
    assert np.array_equal(found.rows, again.rows) and found.edges == again.edges


def test_what_does_not_fit_is_not_taken():
    program, pins = model_of(ONE, "x=S(0)", "", "")
    model = Model(make_problem(program, ONE, pins))
    evaluator, mixed = evaluated(model, lambda n: md.S(1))
    assert fewest_layouts(model, evaluator, mixed, lambda _: False) is mixed
