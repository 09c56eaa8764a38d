"""Plans within a limit from known ones: with some operations held, the others are decided anew."""

import pytest

import meshdsl as md
from bench import deep_steps
from bench.example_steps import deep_gpt
from meshdsl.pins import make_pins
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.memory import fit
from meshdsl.planner.memory.branch_and_bound import lns_on_many_axes, lns_within_memory
from meshdsl.planner.objective import Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model, Prices
from meshdsl.planner.search.search import search
from meshdsl.trace import trace
from tests.planner.graphs import TWO, fitter_of, limited, problem_of


def begun():
    """The networks of a small step, and a bad plan of it."""
    model = problem_of("gradient", TWO)
    evaluator = Evaluator(model)
    return NetworkBuilder(model), evaluator, evaluator.evaluate(model.first_states)


def test_where_all_fits_a_bad_plan_becomes_the_best():
    joint, evaluator, bad = begun()
    found = lns_within_memory(joint, evaluator, bad, [Prices()], lambda _, other: other)
    assert found.cost == search(joint.model).plan.cost < bad.cost


def test_where_nothing_else_fits_the_plan_stays():
    joint, evaluator, bad = begun()
    assert lns_within_memory(joint, evaluator, bad, [Prices()], lambda best, _: best) is bad


@pytest.mark.sweep
def test_a_layer_that_keeps_all_is_faster_within_little_less_memory(monkeypatch):
    program = deep_gpt(1)

    def planned(memory):
        sharded = md.parallelize(program.step, "data=4,model=2", program.layouts, memory=memory, effort="prove")
        return sharded.plan(*program.args)

    limit = 0.96 * planned("1TB").memory
    found = planned(limit)
    monkeypatch.setattr(fit, "lns_within_memory", lambda builder, evaluator, best, prices, fitting: best)
    assert found.memory <= limit
    assert found.seconds < 0.95 * planned(limit).seconds


@pytest.mark.sweep
def test_so_are_two_microbatches_on_many_axes(monkeypatch):
    """Where all axes are too many to be looked at jointly, from neighbourhood to neighbourhood."""
    program, mesh, found = (
        deep_steps.gradient_accumulation(1, 2, 256, 32),
        md.Mesh(pod=2, data=4, model=2, topology="dgx-h100"),
        [],
    )
    traced = trace(program.step, program.args)
    pins = make_pins(traced, mesh, program.layouts)

    def noted(model, evaluator, best, *others):
        found.extend((best, lns_on_many_axes(model, evaluator, best, *others)))
        return found[-1]

    monkeypatch.setattr(fit, "lns_on_many_axes", noted)
    model = limited(Model(make_problem(traced, mesh, pins)), search_joint_pairs=0)
    fitter = fitter_of(model, pins)
    free = search(model, lambda _: False).plan
    limit = 0.85 * fitter.peak(free).bytes
    best = fitter.improve(fitter.bisect(fitter.fit(free, limit))).plan
    peak = fitter.peak(best)
    assert peak.bytes <= limit
    assert best is found[-1]
    assert best.cost < 0.995 * found[0].cost
