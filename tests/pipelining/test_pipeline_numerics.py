"""Pipelines: the numbers of the plain step under every schedule, whatever the bubbles hold."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import PipelineError
from meshdsl.ir.graph import walk
from meshdsl.pipelining import stage_buffers, whole_function
from meshdsl.pipelining.tick_loops import TickTable
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import part_of
from tests.pipelining.stacks import FEATURES, HIDDEN, LAYOUTS, WIDTH, arguments, plain_step, step, traced
from tests.pipelining.steps import language, language_loss
from tests.sweeps import swept


def close(got, expected, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1e-6, np.abs(np.asarray(b)).max()))


@pytest.fixture
def nan_in_bubbles(monkeypatch):
    def fill(shape, dtype):
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 7, dtype)

    monkeypatch.setattr(stage_buffers, "uninitialized", fill)


@swept(
    ("stages", "microbatches", "schedule", "chunks"),
    [
        *((4, 2, "1f1b", 1), (8, 16, "1f1b", 1), (2, 4, "gpipe", 1), (4, 2, "zb", 1), (2, 4, "zb", 2)),
        *((2, 8, "interleaved", 4), (4, 8, "interleaved", 2)),
    ],
    kept=((8, 16, "1f1b", 1), (2, 4, "gpipe", 1), (4, 2, "zb", 1), (2, 8, "interleaved", 4)),
)
def test_the_numbers_are_those_of_the_plain_step(stages, microbatches, schedule, chunks, nan_in_bubbles):
    with jax.enable_x64(True):
        args = arguments(dtype=np.float64)
        program = traced(md.Pipeline(microbatches, schedule, chunks), stages, *args)
        assert program.pipeline.ranks == stages
        close(jax.jit(whole_function(program.graph))(*jax.tree.leaves(args)), step(*args), 1e-9)


@swept(
    ("layers", "stages", "pipeline", "dealt"),
    [
        (5, 4, md.Pipeline(2, layers=(1, 2, 1, 1)), (1, 2, 1, 1)),
        (5, 2, md.Pipeline(2, "interleaved", 2), (1, 1, 2, 1)),
    ],
    kept=((5, 2, md.Pipeline(2, "interleaved", 2), (1, 1, 2, 1)),),
)
def test_stages_of_unequal_length(layers, stages, pipeline, dealt, nan_in_bubbles):
    with jax.enable_x64(True):
        args = arguments(layers, dtype=np.float64)
        program = traced(pipeline, stages, *args)
        close(jax.jit(whole_function(program.graph))(*jax.tree.leaves(args)), step(*args), 1e-9)
    assert program.pipeline.layers == dealt
    assert f"stages of {' '.join(map(str, dealt))} layers in" in str(program.pipeline)


def test_layers_that_do_not_divide_are_planned():
    args = arguments(layers=3, batch=32)
    args[1].pop("mask")
    layouts = {**LAYOUTS, "batch/*": "data=S(0)"}
    sharded = md.parallelize(plain_step, md.Mesh(pipe=2, data=2), layouts, pipeline=md.Pipeline(2))
    plan = sharded.plan(*args)
    assert "3 layers do not divide over pipe: their arrays are sharded freely" in str(plan)
    assert "forward and backward tasks in lockstep, to scale" in str(plan) and "balance" in str(plan)
    (first, second), (n, m) = plan.pipeline.forecast.balance, plan.pipeline.layers
    assert first / n == pytest.approx(second / m) and {n, m} == {1, 2}
    sharded.check(*args)
    sharded.verify(*args)
    with pytest.raises(md.MeshDSLError, match="dim 0 of size 3 does not divide over pipe=2; nearest sizes that work"):
        md.parallelize(plain_step, md.Mesh(pipe=2), LAYOUTS).plan(*args)
    with pytest.raises(md.MeshDSLError, match=r"embed float32\[4,8\]: dim 0 of size 4 does not divide over pipe=3"):
        layouts = {"params/embed": "pipe=S(0)"}
        md.parallelize(plain_step, md.Mesh(pipe=3), layouts, pipeline=md.Pipeline(2)).plan(*args)


@swept(("name", "stages", "microbatches", "chunks"), [("zb-v", 2, 4, 1), ("interleaved", 2, 4, 2)], every=2)
def test_tables_run_wherever_their_stages_live(name, stages, microbatches, chunks, tmp_path, nan_in_bubbles):
    md.make_schedule(name, stages, microbatches, chunks).save(tmp_path / "table.csv")
    schedule = md.Schedule.load(tmp_path / "table.csv")
    with jax.enable_x64(True):
        args = arguments(dtype=np.float64)
        program = traced(md.Pipeline(microbatches, schedule), stages, *args)
        close(jax.jit(whole_function(program.graph))(*jax.tree.leaves(args)), step(*args), 1e-9)
    assert program.pipeline.asked.chunks == schedule.chunks
    assert str(program.pipeline).startswith(f"table over pipe: {microbatches} microbatches through {stages} stages")


def evaluation(params, batch):
    """The loss, the largest activations of the layers, and what every example comes to."""

    def layer(carry, weights):
        x, total = carry
        hidden = jnp.tanh(x @ weights["up"])
        made = x + jnp.where(batch["mask"][:, None] > 0, hidden, 2 * hidden) @ weights["down"]
        return (made, total + jnp.mean(hidden**2)), jnp.max(hidden)

    start = batch["x"] @ params["embed"], jnp.zeros((), batch["x"].dtype)
    (x, total), largest = jax.lax.scan(layer, start, params["layers"])
    logits = x @ params["embed"].T
    return jnp.mean((logits - batch["y"]) ** 2) + total, largest, logits, logits.argmax(-1)


def around(params, batch):
    """What the layers start from goes past them, too, and is read twice there."""

    def loss(params):
        start = jnp.tanh(batch["x"] @ params["embed"])
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), start, params["layers"])
        return jnp.mean(((x * start + start) @ params["embed"].T - batch["y"]) ** 2)

    return jax.value_and_grad(loss)(params)


@swept("pipeline", [md.Pipeline(4), md.Pipeline(2, "interleaved", 2, recompute="none"), md.Pipeline(3, "zb")], every=2)
def test_what_goes_past_the_layers(pipeline, nan_in_bubbles):
    with jax.enable_x64(True):
        args = arguments(layers=4, batch=12, dtype=np.float64)
        program = traced(pipeline, 2, *args, function=around)
        close(jax.jit(whole_function(program.graph))(*jax.tree.leaves(args)), around(*args), 1e-9)


def encoder_and_decoder(params, batch):
    """Two stacks of layers, the second of which reads what the first comes to."""

    def loss(params):
        over = {name: {k: x.array for k, x in params[name].items()} for name in ("encoder", "decoder")}
        start = batch["x"] @ params["embed"]
        seen, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), start, over["encoder"])
        x, _ = jax.lax.scan(lambda x, w: (seen + jnp.tanh(x @ w["up"]) @ w["down"], None), start, over["decoder"])
        return jnp.mean((x @ params["embed"].T - batch["y"]) ** 2)

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_of_two_stacks_the_one_that_a_rule_names(name):
    params, batch = arguments(layers=4, batch=8)
    both = ("encoder", "decoder")
    stacks = {
        each: {k: md.named(x, f"{each}_layers rows columns") for k, x in params["layers"].items()} for each in both
    }
    sharded = md.parallelize(
        encoder_and_decoder, md.Mesh(pipe=2), rules=f"{name}_layers:pipe", pipeline=md.Pipeline(2, batch="batch/*")
    )
    args = stacks | {"embed": params["embed"]}, batch
    sharded.check(*args)
    assert sharded.plan(*args).pipeline.layers == (2, 2)
    other = both[name == "encoder"]
    assert sharded.plan(*args).layout(f"params/{other}/up").on("pipe") is not md.S(0)


def test_nothing_is_handed_on_where_nobody_is_to_have_it():
    made = Pipelined(md.Pipeline(3, md.make_schedule("zb-v", 4, 3)), "pipe", 4, layers=(1,) * 8)
    table = TickTable(made.table, made.buffer_slots)
    rows = [row for loop in table.loops for row in table.rows(loop)]
    assert table.shifts == [0, 1, 3]  # on to the next rank in the first half of the stages, back in the second
    for moves in ([row.forward.receive for row in rows if row.forward], [row.receive for row in rows if row.receive]):
        used = {tuple(slot is not None for slot in to[1:]) for to in moves}
        assert used > {(True, True)}


@swept(
    ("stages", "microbatches", "schedule", "chunks", "ticks"),
    [(4, 2, "1f1b", 1, 5), (2, 4, "gpipe", 1, 5), (2, 4, "interleaved", 2, 9)],
    every=2,
)
def test_an_evaluation_goes_forward_only(stages, microbatches, schedule, chunks, ticks, nan_in_bubbles):
    with jax.enable_x64(True):
        args = arguments(dtype=np.float64)
        program = traced(md.Pipeline(microbatches, schedule, chunks), stages, *args, function=evaluation)
        close(jax.jit(whole_function(program.graph))(*jax.tree.leaves(args)), evaluation(*args), 1e-9)
    found = program.pipeline
    assert (found.ticks, found.slots, set(found.stash)) == (ticks, 1, {1})
    assert f"{schedule}, forward only, over pipe: " in str(found) and "at most 1 stage inputs stashed" in str(found)
    assert len(found.timeline().splitlines()) == stages


def test_a_planned_evaluation():
    args = arguments(batch=32)
    layouts = {**LAYOUTS, "batch/*": "data=S(0)"}
    sharded = md.parallelize(evaluation, md.Mesh(pipe=2, data=2), layouts, pipeline=md.Pipeline(4))
    sharded.check(*args)
    sharded.verify(*args)


def test_a_balance_loss_is_each_microbatchs_own_in_stages_too():
    def gradients(params, batch):
        return jax.value_and_grad(language_loss)(params, batch, jax.random.key(0), balance=0.1)

    args, pipeline = language(batch=4), md.Pipeline(2, per_microbatch=True)
    with pytest.raises(PipelineError, match=r"mul at steps\.py:\d+\nPipeline\(per_microbatch=True\) computes these"):
        traced(md.Pipeline(2), 2, *args, function=gradients)
    staged, plain = (traced(pipeline, 2, *args, function=gradients, layouts=at) for at in (LAYOUTS, {}))
    assert (staged.pipeline.ranks, plain.pipeline.ranks) == (2, 1)
    got, expected = (jax.jit(whole_function(each.graph))(*jax.tree.leaves(args)) for each in (staged, plain))
    close(got, expected, 1e-4)


def test_a_planned_pipeline_hands_on_by_permutes_and_has_no_conditional():
    args = arguments(batch=32)
    args[1].pop("mask")
    layouts = {"params/layers/*": "pipe=S(0)", "params/layers/up": "pipe=S(0) model=S(2)", "batch/*": "data=S(0)"}
    sharded = md.parallelize(plain_step, md.Mesh(pipe=2, data=2, model=2), layouts, pipeline=md.Pipeline(4))
    plan = sharded.plan(*args)
    sharded.check(*args)
    sharded.verify(*args)
    assert " conditional(" not in sharded.lower(*args).compile().as_text()
    moved = [c for c in plan.collectives if c.kind == "collective-permute" and c.axes == ("pipe",)]
    assert {c.trips for c in moved} == {1, 4}
    assert {c.source.partition(":")[0] for c in plan.collectives} == {"stacks.py"}
    assert (plan.pipeline.ticks, plan.pipeline.stash, plan.pipeline.bubble) == (6, (3, 1), 0.2)
    found = plan.pipeline
    assert found.forecast.lockstep == pytest.approx(plan.seconds) and found.forecast.asynchronous < plan.seconds
    assert found.costs.exchanges == 10 >= sum(c.trips for c in moved)
    assert found.costs.kept == 8 * WIDTH * 4  # a microbatch, whole on every device
    assert found.stash_bytes == (3 * found.costs.kept, found.costs.kept)
    assert found.memory == (plan.memory, plan.memory - 2 * found.costs.kept)
    assert all(line in str(plan) for line in found.timeline(60).splitlines())
    assert "1f1b over pipe: 4 microbatches through 2 stages in 6 ticks, bubble 20.0%" in str(plan)


def test_1f1b_needs_no_more_memory_for_more_microbatches():
    def memory(schedule, m):
        args = arguments(batch=32 * m)
        args[1].pop("mask")
        sharded = md.parallelize(plain_step, "pipe=2", LAYOUTS, pipeline=md.Pipeline(m, schedule))
        compiled = sharded.lower(*args).compile().memory_analysis()
        return sharded.plan(*args).memory, compiled.temp_size_in_bytes

    growth = 12 * 32 * 2 * FEATURES * 4  # of the batch, which is there twice: as it is given, and in microbatches
    few, many = memory("1f1b", 4), memory("1f1b", 16)
    assert many[0] - few[0] < 2.1 * growth and many[1] < 1.02 * few[1]
    stash = (16 - 3) * 32 * WIDTH * 4  # what gpipe keeps more
    assert memory("gpipe", 16)[1] - many[1] == pytest.approx(stash, rel=0.1)  # and rows of more ticks


def test_chunks_shorten_the_bubble():
    plain, chunked = (
        traced(md.Pipeline(8, "interleaved", v), 4, *arguments(), function=plain_step).pipeline for v in (1, 2)
    )
    assert (plain.ticks, plain.bubble, plain.stash) == (14, 3 / 11, (7, 5, 3, 1))
    assert (chunked.ticks, chunked.bubble) == (26, 3 / 19)


def products(program, **ticks):
    """By part of a tick, how many products the four layers of a stage come to."""
    found = dict.fromkeys(ticks, 0)
    for graph, op in walk(program.graph):
        if op.name == "dot_general" and graph.trips % 4 == 0 and part_of(op.scope) in ticks:
            found[part_of(op.scope)] += graph.trips
    return {part: count / ticks[part] for part, count in found.items()}


def test_halves_of_a_backward_do_no_product_twice():
    program = traced(md.Pipeline(4, "zb"), 2, *arguments(), function=plain_step)
    assert products(program, forward=5, backward=5, weights=4) == {"forward": 8, "backward": 8 + 8, "weights": 8}


def test_nothing_is_computed_again_if_it_is_kept(nan_in_bubbles):
    pipeline = md.Pipeline(4, "zb", recompute="none")
    program = traced(pipeline, 2, *arguments(), function=plain_step)
    assert products(program, forward=5, backward=5, weights=4) == {"forward": 8, "backward": 8, "weights": 8}
    assert program.pipeline.stash == (3, 1) and "at most 3 microbatches' activations stashed" in str(program.pipeline)
    with jax.enable_x64(True):
        args = arguments(dtype=np.float64)
        program = traced(md.Pipeline(2, recompute="none"), 2, *args)
        close(jax.jit(whole_function(program.graph))(*jax.tree.leaves(args)), step(*args), 1e-9)


def stashed(function):
    """Elements that a rank keeps of four layers and one of five microbatches."""
    program = traced(md.Pipeline(4, recompute="none"), 2, *arguments(), function=function)
    made = (op.outputs[0].shape for op in program.graph.ops if op.name == "constrain" and part_of(op.scope) == "stash")
    return sum(prod(shape) for shape in made) / (2 * 3 * 4)


def test_layers_say_what_is_kept_of_them():
    def remat(params, batch):
        layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None))

        def loss(params):
            x, _ = jax.lax.scan(layer, batch["x"] @ params["embed"], params["layers"])
            return jnp.mean((x @ params["embed"].T - batch["y"]) ** 2)

        return jax.grad(loss)(params)

    assert stashed(remat) == (4 + 1) * WIDTH  # the input of each layer, and what the stage comes to
    assert stashed(plain_step) == (4 + 1) * WIDTH + 4 * HIDDEN  # tanh
