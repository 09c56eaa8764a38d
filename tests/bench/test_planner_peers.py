"""The peers that the planner is measured against: their choices are plans, and none is below the bound."""

import pytest

import meshdsl as md
from bench.planner.cases import plan_on, program_of, traced_step
from bench.planner.peers import axis_by_axis, by_names, greedy
from bench.planner.run import bytes_sent_by
from bench.planner.steps import PEERS, plans_of
from tests.planner.graphs import ONE, STEPS, TWO, exhaustive, problem_of, searched


@pytest.mark.parametrize("choose", [greedy, by_names, axis_by_axis])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("mesh", [ONE, TWO], ids=str)
def test_no_peer_is_better_than_the_planner(choose, name, mesh):
    model = problem_of(name, mesh)
    best, bound = searched(model)
    found = choose(model)
    assert best.cost <= found.cost < float("inf")
    assert bound <= model.scale.seconds(found.cost)


def test_without_sharing_and_on_one_axis_the_integer_program_is_the_optimum():
    model = problem_of("two layers", ONE)
    assert axis_by_axis(model).cost == exhaustive(model)


def test_the_parts_of_the_benchmark_that_compare_plans_run_on_small_steps():
    plan = plan_on(traced_step("mlp"), "data=2,model=2")
    others = {who: bytes_sent_by(plan, choose(plan.model)) for who, choose in PEERS.items()}
    assert bytes_sent_by(plan, plan.choice) < others["greedy"]
    plans = plans_of(program_of("mlp"), md.Mesh(data=2, model=2))
    assert plans.keys() == {"ours", *PEERS}
    assert all(plan.seconds >= plans["ours"][1].seconds > 0 for _, plan in plans.values())
