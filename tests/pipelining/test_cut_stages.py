"""Steps that ``md.stage`` cuts: stages that are not alike have the numbers of the plain step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError, PipelineError
from meshdsl.pins import UserPins
from meshdsl.pipelining import stage_buffers, to_microbatches, whole_function
from meshdsl.trace import trace
from tests.sweeps import swept

SHAPES = ({"w": (4, 6)}, {"w": (6, 9), "b": (9,)}, {"up": (9, 5), "down": (5, 7)}, {"w": (7, 6)})


def arguments(batch=8, dtype=np.float64):
    rng = np.random.default_rng(0)
    params = [{name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in each.items()} for each in SHAPES]
    x, y = (jnp.asarray(rng.normal(size=(batch, 4)), dtype) for _ in range(2))
    return params, {"x": x, "y": y, "mask": jnp.asarray(rng.integers(0, 2, batch))}


def loss(params, batch):
    """Four parts of different widths; tied embeddings, a penalty from two parts, a mask that only the last reads."""
    x = batch["x"] @ params[0]["w"]
    penalty = jnp.mean(x**2)
    x = md.stage(x)
    x, penalty = md.stage((jnp.tanh(x @ params[1]["w"] + params[1]["b"]), penalty))
    hidden = jax.nn.relu(x @ params[2]["up"])
    x = md.stage(x[:, :7] + hidden @ params[2]["down"])
    made = x @ params[3]["w"] @ params[0]["w"].T
    penalty = penalty + jnp.mean(hidden**2)
    return jnp.mean((made - batch["y"]) ** 2 * batch["mask"][:, None]) + 0.01 * penalty, made


def step(params, batch):
    """Gradient descent with clipping, and what every example comes to."""
    (value, made), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.maximum(norm, 1), params, gradient), value, norm, made


def two_stacks(params, batch):
    """An encoder and a decoder, each a scan over the same stack of weights; every example drops its own elements."""

    def loss(params):
        stack, start = jnp.stack([params[1]["b"]] * 3), batch["x"] @ params[0]["w"] @ params[1]["w"]
        encoded, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x * w), None), start, stack)
        encoded = md.stage(encoded)
        kept = jax.random.bernoulli(jax.random.key(0), 0.5, encoded.shape)
        decoded, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x * w) + encoded, None), jnp.where(kept, encoded, 0), stack)
        return jnp.mean((decoded @ params[2]["up"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def traced(pipeline, stages, *args, function=step):
    mesh = md.Mesh(pipe=stages)
    return to_microbatches(trace(function, args, cuts=True), pipeline, mesh, UserPins())


@swept(
    ("stages", "function", "pipeline", "parts", "ticks"),
    [
        (4, step, md.Pipeline(2, axis="pipe"), (1, 1, 1, 1), 8),
        (2, step, md.Pipeline(2, "interleaved", 2, axis="pipe"), (1, 1, 1, 1), 8),
        (2, loss, md.Pipeline(4, "gpipe", axis="pipe", layers=(1, 3)), (1, 3), 5),
        (2, two_stacks, md.Pipeline(2, schedule=md.make_schedule("1f1b", 2, 2), axis="pipe"), (1, 1), 4),
        (3, loss, md.Pipeline(4, axis="pipe"), (2, 1, 1), 6),
    ],
    every=2,
)
def test_the_numbers_are_those_of_the_plain_step(stages, function, pipeline, parts, ticks, monkeypatch):
    monkeypatch.setattr(
        stage_buffers,
        "uninitialized",
        lambda shape, dtype: jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else 7, dtype),
    )
    with jax.enable_x64(True):
        args = arguments()
        program = traced(pipeline, stages, *args, function=function)
        got = jax.jit(whole_function(program.graph))(*jax.tree.leaves(args))
        for a, b in zip(got, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10)
    assert (program.pipeline.layers, program.pipeline.ticks) == (parts, ticks)


def pictures(params, batch):
    """A convolution, a pool, dropout, a classifier, for which a stage is another function each."""

    def loss(params):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=dims)
        x = md.stage(jax.nn.relu(x))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        kept = jax.random.bernoulli(jax.random.key(0), 0.8, x.shape)
        logits = jnp.where(kept, x, 0).reshape(x.shape[0], -1) @ params["dense"]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], 1).mean()

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def test_planned_stages_split_the_batch_over_other_axes(tmp_path):
    rng = np.random.default_rng(1)
    params = {"conv": rng.normal(size=(3, 3, 3, 16)) / 5, "dense": rng.normal(size=(4 * 4 * 16, 10)) / 30}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    batch = {"x": jnp.asarray(rng.normal(size=(64, 8, 8, 3)), jnp.float32), "y": jnp.asarray(rng.integers(0, 10, 64))}
    mesh, data = md.Mesh(pipe=2, data=2), {"batch/*": "data=S(0)"}
    sharded = md.parallelize(pictures, mesh, data, pipeline=md.Pipeline(2, axis="pipe"))
    plan = sharded.plan(params, batch)
    sharded.check(params, batch)
    sharded.verify(params, batch)
    moved = [c for c in plan.collectives if c.axes == ("pipe",) and c.kind == "collective-permute"]
    assert {c.bytes for c in moved} == {64 // 2 // 2 * 8 * 8 * 16 * 4}  # half a microbatch's activations
    assert {c.phase for c in moved} == {"forward", "backward"}
    assert "1f1b over pipe: 2 microbatches through 2 stages" in str(plan) and plan.pipeline.noun == "parts"
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded.pipeline.costs == plan.pipeline.costs is not None
    assert md.parallelize(pictures, mesh, data, plan=loaded).plan(params, batch) is loaded


def measured(params, batch):
    """A gradient, and what is said of all examples: the largest and smallest, whether any is, how many, a counter."""

    def loss(params):
        x = md.stage(batch["x"] @ params[0]["w"])
        x = md.constrain(x @ params[1]["w"], "data=S(0)")
        return jnp.mean(x**2), x

    (_, x), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    count, last = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] / 2), (0, x))
    return gradient, x.max(), x.min(0), jnp.any(x > 9), jnp.sum(x > 0), jnp.sum(batch["mask"]), count, last.sum()


def counted(params, batch):
    gradient, _, _, _, *numbers = measured(params, batch)
    return gradient, numbers


@swept(
    ("function", "note"),
    [
        (measured, "data, model cannot split the work of stages: a maximum or minimum over all examples is needed"),
        (
            counted,
            "data, model split the work of stages by examples only; each device holds the weights of its stages whole",
        ),
    ],
    every=2,
)
def test_what_stages_find_of_all_examples(function, note):
    sharded = md.parallelize(function, md.Mesh(pipe=2, data=2, model=2), pipeline=md.Pipeline(2, axis="pipe"))
    args = arguments(dtype=np.float32)
    args[0].pop()
    sharded.check(*args)
    sharded.verify(*args)  # a mask that nothing reads is not exchanged
    text = str(sharded.plan(*args))
    assert note in text
    assert "layout constraints inside of stages are ignored, the first at test_cut_stages.py:" in text


def wide(params, batch):
    """A stage in the middle that takes most of the time, and most of the memory."""

    def loss(params):
        x = md.stage(batch["x"] @ params["first"])
        x = md.stage(jnp.sin(jnp.sin(x @ params["up"]) @ params["down"]))
        return jnp.mean((x @ params["last"] - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def test_unequal_stages_are_predicted_stage_by_stage():
    shapes = {"first": (32, 64), "up": (64, 2048), "down": (2048, 64), "last": (64, 32)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((4096, 32), jnp.float32))
    sharded = md.parallelize(
        wide, md.Mesh(pipe=3, data=2), {"batch/*": "data=S(0)"}, pipeline=md.Pipeline(4, axis="pipe")
    )
    plan = sharded.plan(params, batch)
    found, costs = plan.pipeline, plan.pipeline.costs
    spent = costs.forward + costs.backward + costs.handing + costs.others
    assert found.forecast.lockstep == pytest.approx(spent) == pytest.approx(plan.seconds)
    first, middle, last = found.forecast.balance
    assert middle > 10 * max(first, last)
    at_work = 4 * (found.loads[1].forward + found.loads[1].backward) / 2  # split over data
    assert at_work < costs.forward + costs.backward < 2 * at_work
    compiled = sharded.lower(params, batch).compile().memory_analysis()
    held = compiled.temp_size_in_bytes + compiled.argument_size_in_bytes + compiled.output_size_in_bytes
    assert plan.memory == pytest.approx(held - compiled.alias_size_in_bytes, rel=0.2)
    assert found.memory[1] > 2 * max(found.memory[0], found.memory[2])


def test_without_an_axis_it_is_the_identity():
    args = arguments(dtype=np.float32)
    plain, cut = (trace(step, args, cuts=cuts).graph for cuts in (False, True))
    assert [op.name for op in plain.ops] == [op.name for op in cut.ops if op.name != "stage"]
    assert sum(op.name == "stage" for op in cut.ops) == 6  # there and back
    x = jnp.arange(3.0)
    value, tangent = jax.jvp(lambda x: md.stage((x, 1 * x))[0] ** 2, (x,), (x,))
    np.testing.assert_array_equal(tangent, 2 * value)
    np.testing.assert_array_equal(jax.vmap(jax.grad(lambda x: md.stage(x) ** 2))(x), 2 * x)


def past(params, batch):
    x = batch["x"] @ params[0]["w"]
    later = md.stage(jnp.tanh(x) @ params[1]["w"])
    return jnp.mean((later @ params[2]["up"]).sum(1) + x.sum(1))


def worst(params, batch):
    return jax.grad(lambda params: jnp.max(md.stage(batch["x"] @ params[0]["w"]) ** 2))(params)


def again(params, batch):
    return jax.grad(lambda params: jax.checkpoint(lambda params: loss(params, batch)[0])(params))(params)


@pytest.mark.parametrize(
    ("function", "pipeline", "text"),
    [
        (past, {}, "cannot be a pipeline:\n  add at test_cut_stages.py:"),
        (past, {}, "reads values of parts 0, 1; pass them through md.stage"),
        (loss, {"layers": (1, 2)}, r"layers=(1, 2) are 3 parts, and there are 4"),
        (step, {"schedule": "interleaved", "chunks": 3}, "4 parts are too few for 3 chunks for each of 2 stages"),
        (step, {"schedule": "zb"}, "'zb' splits the backward of a layer; parts take '1f1b', 'gpipe' or 'interleaved'"),
        (
            step,
            {"recompute": "none"},
            "recompute='none' applies to scanned layers; parts are recomputed from their inputs",
        ),
        (worst, {}, "these operations need the whole batch at once:\n  eq at test_cut_stages.py:"),
        (again, {}, "is recomputed in the backward pass; put jax.checkpoint inside of parts"),
        (step, {"axis": "pip"}, "no axis 'pip' with several devices; did you mean 'pipe'?"),
        (
            lambda params, batch: (batch["x"] @ params[0]["w"]).sum(),
            {},
            "for a step that md.stage cuts, and this one has no cut",
        ),
    ],
)
def test_parts_that_are_no_pipeline(function, pipeline, text):
    pipeline = md.Pipeline(4, **{"axis": "pipe", "batch": "batch/*", **pipeline})
    with pytest.raises(PipelineError) as error:
        md.parallelize(function, "pipe=2", pipeline=pipeline).plan(*arguments(dtype=np.float32))
    assert text in str(error.value)


def test_what_is_no_cut():
    with pytest.raises(ArgumentError, match="stage takes arrays:\n  'x' is a str"):
        md.stage({"a": jnp.ones(3), "b": "x"})
    with pytest.raises(ArgumentError, match="axis: 3 is an int, not the name of a mesh axis"):
        md.Pipeline(4, axis=3)
