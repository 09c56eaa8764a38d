"""Plans within a limit from known ones: with some operations held, the others are decided anew."""

import jax
import optax

import meshdsl as md
from meshdsl.planner import fit
from meshdsl.planner.extract import Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.prices import Prices
from meshdsl.planner.redecided import redecided
from meshdsl.planner.search import search
from tests.planner.graphs import TWO, problem_of, shape


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


def test_layers_that_keep_all_are_faster_within_little_less_memory(monkeypatch):
    opt = optax.adam(1e-3)

    def step(params, state, x, y):
        def loss(params):
            h = x
            for w, b in params:
                h = jax.nn.gelu(h @ w + b)
            return ((h - y) ** 2).mean()

        updates, state = opt.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = [(shape(512, 512), shape(512))] * 4
    args = params, jax.eval_shape(opt.init, params), shape(8192, 512), shape(8192, 512)

    def planned(memory):
        return md.parallelize(step, "data=2,model=2", {"x": "data=S(0)"}, memory=memory).plan(*args)

    limit = 0.97 * planned("1TB").memory
    found = planned(limit)
    monkeypatch.setattr(fit, "redecided", lambda joint, evaluator, best, prices, fitting: best)
    assert found.memory <= limit
    assert found.seconds < 0.98 * planned(limit).seconds
