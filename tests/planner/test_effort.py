"""How much planning is worth: what ends early is near what is proved, says so, and is the same everywhere."""

from math import inf

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from bench.planner.cases import RULES, program_of
from meshdsl.errors import ArgumentError, PlanFileError
from meshdsl.models import mlp
from meshdsl.planner.bounds.tighten import RisingBound
from meshdsl.planner.limits import EFFORTS, SearchLimits

PROGRAM = mlp.program()
TOLERATED = {"fast": 0.03, "default": 0.01, "prove": 0.0}


def planned(effort, mesh="data=2,a=2,b=2"):
    over = md.Mesh.parse(mesh, "dgx-h100")
    return md.parallelize(PROGRAM.step, over, rules="batch:data", effort=effort).plan(*PROGRAM.args)


@pytest.fixture(scope="module")
def plans():
    return {effort: planned(effort) for effort in EFFORTS}


def test_what_ends_early_is_near_what_is_proved(plans):
    best = plans["prove"]
    for effort, plan in plans.items():
        assert plan.seconds <= best.seconds / (1 - TOLERATED[effort])
        assert plan.lower_bound <= best.seconds * (1 + 1e-9)


def test_a_plan_says_its_effort_where_something_is_open(plans, tmp_path):
    for effort, plan in plans.items():
        plan.save(tmp_path / "plan.json")
        assert md.load_plan(tmp_path / "plan.json").effort == plan.effort == effort
        assert (f"effort {effort}" in str(plan)) == (plan.gap > 0 and effort != "prove")
        assert ('"effort"' in (tmp_path / "plan.json").read_text()) == (effort != "prove")


def test_a_file_with_an_unknown_effort_is_damaged(plans, tmp_path):
    plans["fast"].save(file := tmp_path / "plan.json")
    file.write_text(file.read_text().replace('"effort":"fast"', '"effort":"fats"'))
    with pytest.raises(
        PlanFileError, match="effort: 'fats' is none of 'fast', 'default', 'prove'; did you mean 'fast'"
    ):
        md.load_plan(file)


def test_plan_and_bound_are_logged_as_they_meet(caplog):
    with caplog.at_level("DEBUG", logger="meshdsl.progress"):
        planned("default", "data=2,a=2")
    said = [record.args for record in caplog.records if record.name == "meshdsl.progress"]
    assert said and all(len(pair) == 2 for pair in said)


@pytest.mark.parametrize("effort, wide", [("fast", 4096), ("default", 8192)])
def test_uneven_dims_are_padded_only_where_they_take_time(effort, wide):
    def step(w, v, x, z):
        return jnp.tanh(x @ w).sum() + (z @ v).sum()

    def notes(width):
        shapes = (width, width), (1001, 8), (width, width), (8, 1001)
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return " ".join(md.parallelize(step, md.Mesh(data=4, model=2, topology="cpu"), effort=effort).plan(*args).notes)

    assert "(1001) does not divide over the mesh and is left unpadded: that costs about" in notes(wide)
    assert "padded to 1008" in notes(64)


def test_fast_knows_how_few_collectives_a_bucket_takes():
    """At no latency at all, it would repeat no work, and wait for collectives that no bucket takes."""
    program, mesh = program_of("dlrm"), md.Mesh.parse("data=8", "dgx-h100")
    plans = [md.parallelize(program.step, mesh, rules=RULES, effort=e).plan(*program.args) for e in ("fast", "default")]
    assert plans[0].seconds <= plans[1].seconds / (1 - TOLERATED["fast"])


def test_less_work_tolerates_less():
    """What is cheap to prove is proved; no work at all tolerates nothing."""
    for effort, limits in EFFORTS.items():
        gaps = [limits.tolerated_gap(work) for work in (0, limits.worth_work // 2, limits.worth_work, 10**12)]
        assert gaps == sorted(gaps) and gaps[0] == 0 and gaps[2:] == [TOLERATED[effort]] * 2
    assert EFFORTS["prove"] == SearchLimits()


def test_a_bound_rises_no_further_than_it_is_of_use():
    asked = []

    def step(bound):
        return lambda useful: asked.append((bound, useful)) or bound

    bound = RisingBound(step(1.0), step(3.0), step(2.0), known=0.5)
    assert bound.at_least(0.5) == 0.5 and not asked
    assert bound.at_least(1.5, useful=4.0) == 3.0 and asked == [(1.0, 4.0), (3.0, 4.0)]
    assert bound.at_least() == 3.0 and asked[2:] == [(2.0, inf)] and bound.at_least() == 3.0


@pytest.mark.parametrize(("wrong", "said"), [("fats", "; did you mean 'fast'?"), ("much", ""), (3, ""), (None, "")])
def test_another_word_is_refused(wrong, said):
    message = f"effort: {wrong!r} is none of 'fast', 'default', 'prove'{said}"
    with pytest.raises(ArgumentError) as error:
        md.parallelize(jnp.sin, "data=2", effort=wrong)
    assert str(error.value).splitlines()[-1].endswith(message)
    with pytest.raises(ArgumentError) as error:
        md.search(jnp.sin, jnp.ones(4), devices=2, topology="cpu", effort=wrong)
    assert message in str(error.value)
