"""Small steps within a limit of memory, against exhaustive search: the cheapest plan that fits, or none does."""

from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.errors import MemoryLimitError
from meshdsl.ir.solution import Pins
from meshdsl.layouts import Layout, Mesh
from meshdsl.planner.memory.branch_and_bound import BranchAndBound
from meshdsl.planner.objective import Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.trace import trace
from meshdsl.util.runtime import Deadline
from tests.planner.graphs import ONE, STEPS, TWO, fitter_of, problem_of, shape, solved
from tests.sweeps import swept

FEW = [name for name in STEPS if name != "gradient"]  # few enough plans for all of them to be made


def every_plan(model):
    """Bytes and cost of every plan, the smallest first."""
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    evaluator, fitter = Evaluator(model), fitter_of(model, model.problem.pins)
    plans = (evaluator.evaluate(np.array(rows)) for rows in product(*states))
    return sorted((fitter.peak(plan).bytes, plan.cost) for plan in plans)


def cheaper_from(plans):
    """The bytes from which on a cheaper plan fits, and a little less."""
    sizes, least = [], np.inf
    for size, cost in plans:
        if cost < least:
            sizes += [size - 1, size - 0.5, size] if sizes else [size]
            least = cost
    return sizes


def solved_within(model, limit):
    problem = model.problem
    return solved(problem.program, problem.mesh, problem.pins, limit)


@pytest.mark.parametrize(("name", "mesh"), [*((name, ONE) for name in FEW), ("matmul", TWO)], ids=str)
def test_the_plan_is_the_cheapest_that_fits_and_proved(name, mesh):
    model = problem_of(name, mesh)
    plans = every_plan(model)
    for limit in cheaper_from(plans):
        found = solved_within(model, limit)
        cheapest = min(cost for size, cost in plans if size <= limit)
        assert found.peak <= limit
        assert found.seconds == pytest.approx(model.scale.seconds(cheapest), rel=1e-9)
        assert found.seconds * (1 - 1e-6) < found.lower_bound <= found.seconds


@swept("less", [1, 0.5], kept=(1,))
@pytest.mark.parametrize("name", FEW)
def test_the_least_possible_is_said_where_nothing_fits(name, less):
    model = problem_of(name, ONE)
    smallest = every_plan(model)[0][0]
    with pytest.raises(MemoryLimitError, match=f"the least possible is {smallest / 1e3:.3g}"):
        solved_within(model, smallest - less)


def sorted_sums(shares):
    """A small step on a mesh on which bytes of a share are rounded, and all of its plans."""
    program, laid = trace(lambda a: jnp.sort(jnp.cumsum(a, 0), 0), (shape(25, 25),)), Layout.parse("x=S(0) y=S(0)")
    model = Model(make_problem(program, Mesh(x=shares, y=shares), Pins((laid,), (laid,), (None,))))
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    fitter = fitter_of(model, model.problem.pins)
    return fitter, [fitter.evaluator.evaluate(np.array(rows)) for rows in product(*states)]


def test_a_plan_that_fills_the_memory_exactly_fits_where_shares_of_it_are_rounded():
    fitter, plans = sorted_sums(5)
    fits = [plan for plan in plans if fitter.peak(plan).bytes <= 300]
    known = max(fits, key=lambda plan: plan.cost)
    found = BranchAndBound(fitter.model, fitter.evaluator, fitter.pricing().points, fitter.peak, known).cheapest(300)
    assert found.best.cost == min(plan.cost for plan in fits) < known.cost


def test_a_bound_is_none_where_time_is_up_at_once():
    fitter, plans = sorted_sums(5)
    fitter.model.deadline = Deadline(0.0)
    found = BranchAndBound(fitter.model, fitter.evaluator, fitter.pricing().points, fitter.peak, plans[0]).cheapest(1e9)
    assert found.best is plans[0] and found.bound == 0.0
