"""What stages of a pipeline keep, chosen by the planner."""

from dataclasses import replace
from math import inf

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from tests.pipelining.steps import OPTIMIZER, language, language_step
from tests.sweeps import swept

LAYERS, WIDTH, HIDDEN = 8, 16, 64
MESH = md.Mesh(pipe=4, data=2)
SCHEDULES = ("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zb", 1), ("zb", 2)
LAYOUTS = {"params/layers/*": "pipe=S(0)", "batch/*": "data=S(0)"}
ARGUMENTS = (
    {"embed": (8, WIDTH), "layers": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}},
    {"x": (256, 8), "y": (256, 8)},
)


def step(params, batch):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w["up"])) @ w["down"], None

    def loss(params):
        x, _ = jax.lax.scan(layer, batch["x"] @ params["embed"], params["layers"])
        return jnp.mean((x @ params["embed"].T - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradient), value


def arguments():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32),
        ARGUMENTS,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )


def sharded(pipeline, **options):
    return md.parallelize(step, MESH, LAYOUTS, pipeline=pipeline, **options)


def plans():
    """The plans with each ``recompute``, and that of the planner's choice."""
    args = arguments()
    stated = {how: sharded(md.Pipeline(8, recompute=how), memory=1e9).plan(*args) for how in ("stage", "none")}
    return stated, lambda **more: sharded(md.Pipeline(8), remat="auto", **more).plan(*args)


def test_stages_keep_what_is_worth_it():
    stated, auto = plans()
    free = auto(memory=1e9)
    assert free.pipeline.asked.recompute == "none" and free.recomputation.stages == "none"
    assert free.seconds < min(plan.seconds for plan in stated.values())
    assert free.memory < stated["none"].memory
    assert {value.name.partition(" ")[0] for value in free.recomputation.values} <= {
        "tanh",
        "sub",
        "one_minus_square",
        "cos",
        "sin",
    }
    assert "microbatches' activations stashed" in str(free) and "computed again" in str(free)


def test_less_memory_computes_more_again():
    stated, auto = plans()
    limits = [stated["none"].memory, stated["stage"].memory + 40_000, stated["stage"].memory]
    found = [auto(memory=limit) for limit in limits]
    assert [plan.seconds for plan in found] == sorted(plan.seconds for plan in found)
    for plan, limit in zip(found, limits, strict=True):
        assert plan.memory <= limit
        assert plan.seconds <= min(each.seconds for each in stated.values() if each.memory <= limit)
        assert plan.waterfall[0].name == "keep all"
        assert plan.waterfall[-1][1:] == (plan.memory, plan.seconds)


def test_a_limit_below_the_least_found_is_an_error_that_says_it():
    _, auto = plans()
    with pytest.raises(md.MemoryLimitError, match=r"the least found is(?s:.*)with activations computed again \(remat"):
        auto(memory=20_000)


@swept(
    ("schedule", "chunks", "tight"),
    [(*schedule, tight) for schedule in SCHEDULES for tight in (False, True)],
    kept=(("1f1b", 1, True), ("zb", 2, False)),
)
def test_the_numbers_are_those_of_one_device(schedule, chunks, tight):
    args, pipeline = arguments(), md.Pipeline(8, schedule, chunks)
    least = sharded(pipeline, memory=1e9).plan(*args).memory
    run = sharded(replace(pipeline, recompute="none"), remat="auto", memory=0.98 * least if tight else 1e9)
    assert run.plan(*args).recomputation.stages
    run.check(*args)
    run.verify(*args)


def test_ticks_in_which_no_microbatch_ends_send_nothing_for_its_end():
    args = arguments()
    run = sharded(md.Pipeline(8, "zb", 2), memory=125_000)
    assert run.plan(*args).memory <= 125_000
    run.verify(*args)


def test_random_masks_and_losses_of_layers():
    params, batch = language()
    args = params, OPTIMIZER.init(params), jax.random.key(0), batch
    layouts = {"params/layers/*": "pipe=S(0)", "batch/*": "data=S(0)"}
    run = md.parallelize(
        language_step, md.Mesh(pipe=2, data=2), layouts, pipeline=md.Pipeline(4, recompute="none"), remat="auto"
    )
    assert run.plan(*args).recomputation.ops
    run.check(*args)


def test_a_saved_plan_is_that_plan(tmp_path):
    args = arguments()
    for memory, stages in (1e9, "none"), (75_000, "stage"):
        run = sharded(md.Pipeline(8, recompute="none"), remat="auto", memory=memory)
        plan = run.plan(*args)
        assert plan.recomputation.stages == stages
        plan.save(tmp_path / "plan.json")
        again = sharded(md.Pipeline(8, recompute="none"), plan=md.load_plan(tmp_path / "plan.json"), memory=memory)
        assert again.plan(*args) == plan
    again.check(*args)


@pytest.mark.sweep
def test_a_frontier_of_pipelines():
    curve = sharded(md.Pipeline(8), remat="auto").frontier(*arguments(), points=4)
    seconds = [point.plan.seconds for point in curve.points]
    assert seconds == sorted(seconds, reverse=True) and curve.points[-1].limit == inf
    assert {point.plan.recomputation.stages for point in curve.points if point.plan.recomputation} == {"stage", "none"}


def test_parts_that_are_cut_by_hand_are_computed_again_from_their_inputs():
    def cut(params, batch):
        def loss(params):
            x = md.stage(jnp.tanh(batch @ params[0]))
            return jnp.mean((x @ params[1]) ** 2)

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    args = [jnp.ones((8, 8))] * 2, jnp.ones((8, 8))
    plan = md.parallelize(cut, md.Mesh(pipe=2), pipeline=md.Pipeline(2, axis="pipe"), remat="auto").plan(*args)
    assert plan.recomputation is None
    assert any("parts that md.stage cuts are computed again from their inputs" in note for note in plan.notes)


def test_a_time_limit_that_is_up_is_why_nothing_was_tried():
    plan = sharded(md.Pipeline(8), remat="auto", time_limit=1e-6).plan(*arguments())
    assert plan.recomputation is None and plan.pipeline.asked.recompute == "stage"
    assert any("the time limit was up before recomputation was tried (remat='auto')" in note for note in plan.notes)


def test_a_search_bounds_stages_whichever_way_they_recompute():
    def step(params, batch):
        def loss(params):
            x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)
            return jnp.mean((x - batch["y"]) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    args = jnp.zeros((4, 256, 256)), {"x": jnp.zeros((8192, 256)), "y": jnp.zeros((8192, 256))}
    program = md.Program(step, args, {"params": "pipe=S(0)"}, remat="auto")
    (found,) = md.search(program, devices=2, axes=("pipe",), microbatches=(4,), effort="fast").candidates
    assert found.plan.recomputation.stages == "none"
    assert found.least <= found.plan.seconds
