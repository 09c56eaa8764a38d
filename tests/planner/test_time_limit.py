"""A limit in seconds: the best plan so far, with its gap, said clearly."""

import re

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.models import gpt
from meshdsl.planner.bounds.certificate import Certificate
from meshdsl.planner.encoding.networks import NetworkBuilder
from meshdsl.planner.encoding.projection import projections
from meshdsl.util.runtime import Deadline
from meshdsl.util.text import percent_text
from tests.planner.graphs import limited, problem_of, searched

PROGRAM = gpt.program(gpt.Config(4, 64, 4, seq=64, vocab=128), gpt.RULES["data"], batch=32)


def planned(mesh="data=2,model=2", **more):
    return md.parallelize(PROGRAM.step, mesh, rules=PROGRAM.rules, **more).plan(*PROGRAM.args)


SAID = r"planning stopped at the time limit of 1 us: best plan so far, within [\d.]+% of the optimum"


def test_when_time_is_up_the_best_plan_so_far_is_given_with_its_gap():
    plan, full = planned(time_limit=1e-6), planned()
    said = plan.notes[-1]
    assert re.fullmatch(SAID, said)
    assert said in str(plan) and percent_text(plan.gap) in said
    assert 0 < plan.lower_bound <= full.seconds * (1 + 1e-9) and full.seconds <= plan.seconds * (1 + 1e-9)
    assert full.gap < plan.gap < 1


@pytest.mark.sweep
def test_on_many_axes_too_there_is_a_plan_that_is_of_use():
    plan, whole = planned("data=2,a=2,b=2", time_limit=1e-6), planned("data=2")
    assert re.fullmatch(SAID, plan.notes[-1]) and 0 < plan.lower_bound < plan.seconds < whole.seconds


def test_on_many_axes_the_bound_is_seen_in_parts_when_time_is_up():
    """All axes together take several times as long, for little before messages have been passed."""
    bounds = []
    for clock in (Deadline(), Deadline(1e-9)):
        model = limited(problem_of("gradient", md.Mesh(x=2, y=2, z=2)), search_joint_pairs=0)
        model.deadline = clock
        best, bound = searched(model)
        bounds.append(bound)
        assert clock.has_stopped == (clock.seconds is not None)
    seen = sum(Certificate(NetworkBuilder(each.model), each.plan(best)).bound for each in projections(model))
    assert bounds[1] == pytest.approx(model.scale.seconds(seen))
    assert 0 < bounds[1] < bounds[0]


def test_a_limit_that_is_not_reached_changes_nothing():
    assert planned(time_limit=1e6) == planned()


def test_a_plan_that_has_to_fit_still_does():
    memory = 0.98 * planned().memory
    assert planned(memory=memory, time_limit=1e-6).memory <= memory


def test_a_step_that_was_stopped_runs():
    step = md.parallelize(lambda w, x: jnp.tanh(x @ w).sum(0), "data=2", {"x": "data=S(0)"}, time_limit=1e-6)
    w, x = jnp.ones((8, 4)), jnp.arange(32.0).reshape(4, 8)
    assert jnp.allclose(step(w, x), jax.jit(lambda w, x: jnp.tanh(x @ w).sum(0))(w, x))


@pytest.mark.parametrize("wrong", [0, -1.0, "10s", True, float("nan")])
def test_what_is_no_time_is_refused(wrong):
    with pytest.raises(ArgumentError, match=r"time_limit: .*not a number of seconds above 0; None is no limit"):
        md.parallelize(jnp.sin, "data=2", time_limit=wrong)
