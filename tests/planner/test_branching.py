"""Small steps within a limit of memory, against exhaustive search: the cheapest plan that fits, or none does."""

from itertools import product

import numpy as np
import pytest

from meshdsl.errors import MemoryLimitError
from meshdsl.planner import solve
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.fit import Fitter
from tests.planner.graphs import ONE, STEPS, TWO, problem_of

FEW = [name for name in STEPS if name != "gradient"]  # few enough plans for all of them to be made


def every_plan(model):
    """Bytes and cost of every plan, the smallest first."""
    states = [np.argwhere(np.isfinite(model.unit(n))) for n in range(len(model.nodes))]
    evaluator, fitter = Evaluator(model), Fitter(model, model.problem.pins)
    plans = (evaluator.evaluate(np.array(rows)) for rows in product(*states))
    return sorted((fitter.peak(plan).bytes, plan.cost) for plan in plans)


def cheaper_from(plans):
    """The bytes from which on a cheaper plan fits, and the most with which it does not."""
    sizes, least = [], np.inf
    for size, cost in plans:
        if cost < least:
            sizes += [size - 1, size] if sizes else [size]
            least = cost
    return sizes


def solved(model, limit):
    problem = model.problem
    return solve(problem.program, problem.mesh, problem.pins, limit)


@pytest.mark.parametrize(("name", "mesh"), [*((name, ONE) for name in FEW), ("matmul", TWO)], ids=str)
def test_the_plan_is_the_cheapest_that_fits_and_proved(name, mesh):
    model = problem_of(name, mesh)
    plans = every_plan(model)
    for limit in cheaper_from(plans):
        found = solved(model, limit)
        cheapest = min(cost for size, cost in plans if size <= limit)
        assert found.peak <= limit
        assert found.seconds == pytest.approx(model.scale.seconds(cheapest), rel=1e-9)
        assert found.seconds * (1 - 1e-6) < found.lower_bound <= found.seconds


@pytest.mark.parametrize("name", FEW)
def test_the_least_possible_is_said_where_nothing_fits(name):
    model = problem_of(name, ONE)
    smallest = every_plan(model)[0][0]
    with pytest.raises(MemoryLimitError, match=f"the least possible is {smallest / 1e3:.3g}"):
        solved(model, smallest - 1)
