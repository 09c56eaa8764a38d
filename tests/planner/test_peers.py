"""The peers that the planner is measured against: their choices are plans, and none is below the bound."""

import pytest

from bench.planner.peers import axis_by_axis, by_names, greedy
from meshdsl.planner.search import search
from tests.planner.graphs import ONE, STEPS, TWO, exhaustive, problem_of


@pytest.mark.parametrize("choose", [greedy, by_names, axis_by_axis])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_no_peer_is_better_than_the_planner(choose, name, mesh):
    model = problem_of(name, mesh)
    best, bound = search(model)
    found = choose(model)
    assert best.cost <= found.cost < float("inf")
    assert bound <= model.scale.seconds(found.cost)


def test_without_sharing_and_on_one_axis_the_integer_program_is_the_optimum():
    model = problem_of("two layers", ONE)
    assert axis_by_axis(model).cost == exhaustive(model)
