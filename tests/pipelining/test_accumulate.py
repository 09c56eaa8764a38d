"""Microbatches: the same numbers, one reduction per step, and clear errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.api.program import parallelize_program
from meshdsl.cli.plan import plan_facts
from meshdsl.errors import ArgumentError, PipelineError, PlanFileError
from meshdsl.pins import UserPins
from meshdsl.pipelining import to_microbatches, whole_function
from meshdsl.trace import trace
from tests.pipelining import stacks
from tests.pipelining.steps import OPTIMIZER, language, language_step, normalised

MESH = md.Mesh(data=2, model=2)
DATA = {"batch/*": "data=S(0)"}


def arguments(**sizes):
    params, tokens = language(**sizes)
    return params, OPTIMIZER.init(params), jax.random.key(0), tokens


def close(got, expected, tolerance):
    def one(a, b):
        a, b = (jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else x for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(np.asarray(b)).max(initial=1e-6))

    jax.tree.map(one, got, expected)


def test_a_training_step_gives_the_same_numbers():
    args = arguments()
    sharded = md.parallelize(language_step, "data=2", DATA, pipeline=md.Pipeline(microbatches=4))
    close(sharded(*args), jax.jit(language_step)(*args), 1e-4)
    sharded.verify(*args)


def test_gradients_are_reduced_once_per_step_and_less_memory_is_needed():
    args = arguments(batch=512, width=64)
    whole, plan = (
        md.parallelize(language_step, "data=8", DATA | {"params/**": "data=B"}, pipeline=pipeline).plan(*args)
        for pipeline in (None, md.Pipeline(8))
    )
    reduced = [c for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter")]
    assert reduced and all(c.trips == 1 for c in reduced)
    assert {c.source.partition(":")[0] for c in reduced} == {"steps.py"}
    assert plan.memory < 0.5 * whole.memory
    assert (whole.pipeline, plan.pipeline.microbatches) == (None, 8)


def test_float64_agrees_to_nine_digits():
    with jax.enable_x64(True):
        args, mesh = stacks.arguments(dtype=np.float64), md.Mesh(data=2)
        program = to_microbatches(trace(stacks.step, args), md.Pipeline(8), mesh, UserPins())
        results = jax.jit(whole_function(program.graph))(*jax.tree.leaves(args))
        close(list(results), jax.tree.leaves(stacks.step(*args)), 1e-9)


def averaged(params, batch, turns):
    """What each microbatch gives alone, averaged."""
    parts = [normalised(params, jax.tree.map(lambda x: jnp.split(x, turns)[i], batch)) for i in range(turns)]
    return jax.tree.map(lambda *xs: sum(xs) / turns, *parts)


def test_batch_statistics_are_an_error_or_each_microbatchs_own():
    rng = np.random.default_rng(1)
    params = {"w": jnp.asarray(rng.normal(size=(8, 16))), "v": jnp.asarray(rng.normal(size=(16, 4)))}
    batch = {"x": jnp.asarray(rng.normal(size=(16, 8))), "y": jnp.asarray(rng.normal(size=(16, 4)))}
    with pytest.raises(PipelineError) as error:
        md.parallelize(normalised, "data=2", pipeline=md.Pipeline(4)).plan(params, batch)
    text = str(error.value)
    assert text.startswith("microbatches: these operations need the whole batch at once:\n  ")
    assert "steps.py:" in text and "Pipeline(per_microbatch=True) computes" in text
    sharded = md.parallelize(normalised, "data=2", DATA, pipeline=md.Pipeline(4, per_microbatch=True))
    close(sharded(params, batch), averaged(params, batch, 4), 1e-4)
    sharded.check(params, batch)


@pytest.mark.parametrize(
    ("step", "row"),
    [
        (lambda w, x: jnp.sort(x, 0) @ w, "sort at test_accumulate.py:"),
        (lambda w, x: w * 2, "no operation reads the batch"),
    ],
)
def test_a_loop_over_microbatches_is_not_empty(step, row):
    with pytest.raises(PipelineError, match="runs per microbatch:\n  ") as error:
        md.parallelize(step, "data=2", pipeline=md.Pipeline(2, batch="x")).plan(jnp.ones((3, 3)), jnp.ones((8, 3)))
    assert row in str(error.value)


def test_a_loss_over_the_batch_may_divide_by_what_it_holds_if_only_the_update_reads_it():
    def step(w, batch):
        total, grad = jax.value_and_grad(lambda w: jnp.sum(batch["mask"] * (batch["x"] @ w) ** 2))(w)
        return w - 0.1 * grad / batch["mask"].sum(), total

    rng = np.random.default_rng(2)
    batch = {"x": jnp.asarray(rng.normal(size=(8, 4)), jnp.float32), "mask": jnp.asarray(rng.integers(0, 2, 8) * 1.0)}
    w = jnp.ones(4)
    close(md.parallelize(step, "data=2", pipeline=md.Pipeline(4))(w, batch), step(w, batch), 1e-5)


def test_results_per_example_are_put_together():
    def step(w, x):
        made = jnp.sin(x @ w) + jnp.arange(8.0)[:, None]
        return w - made.sum(0) * 0.1, made, made.max(), jnp.argsort(made[:, 0])

    args = jnp.ones((3, 4)), jnp.arange(24.0).reshape(8, 3)
    close(md.parallelize(step, "data=2", pipeline=md.Pipeline(2))(*args), step(*args), 1e-5)


@pytest.mark.parametrize(
    ("pipeline", "text"),
    [
        (md.Pipeline(6), "the batch of 16 (batch/inputs) does not divide into 6 microbatches; use 2 or 4 or 8"),
        (md.Pipeline(4, batch="bach/*"), "batch='bach/*': matches no input; did you mean 'batch/"),
        (md.Pipeline(4, batch="key"), "key key<fry>[]: has no dim to split"),
        (md.Pipeline(4, batch="params/**"), "the leading dims of the batch differ: params/embed float32[32,16], "),
    ],
)
def test_batches_that_do_not_divide(pipeline, text):
    with pytest.raises(PipelineError) as error:
        md.parallelize(language_step, MESH, pipeline=pipeline).plan(*arguments())
    assert text in str(error.value)


def test_what_is_no_pipeline():
    with pytest.raises(ArgumentError, match="microbatches: 0 is an int, not a positive number of microbatches"):
        md.Pipeline(microbatches=0)
    with pytest.raises(ArgumentError, match=r"pipeline: 8 is an int, not a pipeline; write md\.Pipeline"):
        md.parallelize(language_step, MESH, pipeline=8)
    with pytest.raises(ArgumentError, match="pipeline: 'x' is a str, not a pipeline"):
        md.Program(language_step, (), pipeline="x")


def test_a_plan_file_keeps_the_microbatches(tmp_path):
    args, file = arguments(), tmp_path / "plan.json"
    pipeline = md.Pipeline(4, batch="batch/*")
    plan = md.parallelize(language_step, MESH, DATA, pipeline=pipeline).plan(*args)
    plan.save(file)
    loaded = md.load_plan(file)
    assert plan_facts(loaded)["pipeline"]["microbatches"] == 4
    assert parallelize_program(md.Program(language_step, args, pipeline=pipeline), MESH).options.pipeline == pipeline
    assert loaded == plan and loaded.pipeline.asked == pipeline
    again = md.parallelize(language_step, MESH, DATA, plan=loaded)
    assert again.plan(*args) is loaded
    with pytest.raises(PlanFileError, match=r"pipeline: 4 microbatches, .* in the plan, 2 microbatches"):
        md.parallelize(language_step, MESH, DATA, plan=loaded, pipeline=md.Pipeline(2)).plan(*args)
