"""Plans within a limit from known ones: with some operations held, the others are decided anew."""

import meshdsl as md
from bench.programs import deep_gpt
from meshdsl.planner import fit
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.prices import Prices
from meshdsl.planner.redecided import redecided
from meshdsl.planner.search import search
from tests.planner.graphs import TWO, problem_of


def begun():
    """The networks of a small step, and a bad plan of it."""
    model = problem_of("gradient", TWO)
    evaluator = Evaluator(model)
    return Joint(model), evaluator, evaluator.evaluate(model.whole)


def test_where_all_fits_a_bad_plan_becomes_the_best():
    joint, evaluator, bad = begun()
    found = redecided(joint, evaluator, bad, [Prices()], lambda _, other: other)
    assert found.cost == search(joint.model)[0].cost < bad.cost


def test_where_nothing_else_fits_the_plan_stays():
    joint, evaluator, bad = begun()
    assert redecided(joint, evaluator, bad, [Prices()], lambda best, _: best) is bad


def test_a_layer_that_keeps_all_is_faster_within_little_less_memory(monkeypatch):
    program = deep_gpt(1)

    def planned(memory):
        sharded = md.parallelize(program.step, "data=4,model=2", program.layouts, memory=memory)
        return sharded.plan(*program.args)

    limit = 0.96 * planned("1TB").memory
    found = planned(limit)
    monkeypatch.setattr(fit, "redecided", lambda joint, evaluator, best, prices, fitting: best)
    assert found.memory <= limit
    assert found.seconds < 0.95 * planned(limit).seconds
