"""Layers, schedules and chunks that are no pipeline: errors before anything is compiled, with what would do."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.errors import PipelineError
from tests.pipelining.stacks import LAYOUTS, arguments, plain_step, traced


def two_stacks(params, batch):
    def loss(params):
        x = batch["x"] @ params["embed"]
        for _ in range(2):
            x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params["layers"])
        return jnp.mean(x**2)

    return jax.grad(loss)(params)


def kept_inside(params, batch):
    def loss(params):
        x = batch["x"] @ params["embed"]
        x, every = jax.lax.scan(lambda x, w: ((y := x + jnp.tanh(x @ w["up"]) @ w["down"]), y), x, params["layers"])
        return jnp.mean(x**2) + jnp.mean(jnp.sin(every)), every

    return jax.grad(loss, has_aux=True)(params)


def with_keys(params, batch):
    def layer(carry, w):
        x, key = carry
        key, mine = jax.random.split(key)
        x = x + jnp.where(jax.random.bernoulli(mine, 0.5, x.shape), jnp.tanh(x @ w["up"]) @ w["down"], 0)
        return (x, key), None

    def loss(params):
        (x, _), _ = jax.lax.scan(layer, (batch["x"] @ params["embed"], jax.random.key(0)), params["layers"])
        return jnp.mean(x**2)

    return jax.grad(loss)(params)


def backwards(params, batch):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return jax.lax.scan(layer, batch["x"] @ params["embed"], params["layers"], reverse=True)[0].mean()


def by_number(params, batch):
    def layer(i, x):
        return x + jnp.tanh(x @ params["layers"]["up"][i]) @ params["layers"]["down"][i]

    return jax.lax.fori_loop(0, 8, layer, batch["x"] @ params["embed"]).mean()


def one_by_one(params, batch):
    def loss(params):
        x = batch["x"] @ params["embed"]
        for i in range(8):
            x = x + jnp.tanh(x @ params["layers"]["up"][i]) @ params["layers"]["down"][i]
        return jnp.mean(x**2)

    return jax.grad(loss)(params)


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (two_stacks, "exactly one layer scan can be pipelined; found several:\n  pipe: the scan at test_errors.py:"),
        (
            two_stacks,
            ', over params/layers/down and 1 more\nlayouts={"...": "pipe=B"} for the parameters of the others',
        ),
        (kept_inside, "uses what the layers compute, and cannot run in their stages"),
        (with_keys, "it carries random keys; split one key into a key per layer, and scan over those"),
        (backwards, "it runs from the last layer to the first; reverse the stacks, and scan forward"),
        (
            one_by_one,
            "layers that are indexed one by one cannot be pipeline stages:\n  float32[8, 16, 8], split over pipe\n",
        ),
        (
            by_number,
            "layers that are indexed one by one cannot be pipeline stages:\n  float32[8, 8, 16], split over pipe, in",
        ),
    ],
)
def test_layers_that_are_no_pipeline(function, text):
    with pytest.raises(PipelineError) as error:
        md.parallelize(function, "pipe=2", LAYOUTS, pipeline=md.Pipeline(4, batch="batch/*")).plan(*arguments())
    assert text in str(error.value)


def test_a_schedule_without_stages_is_noted():
    asked, plain = md.Pipeline(4, "interleaved", 2), md.Pipeline(4, batch="batch/*")
    noted, meant = (traced(each, 2, *arguments(), layouts={}).notes for each in (asked, plain))
    assert "no stages for interleaved: no scan over layers is pinned to be split over an axis" in "".join(noted)
    assert "no stages for 1f1b: no scan" in "".join(meant)  # the mesh has an axis pipe
    silent = md.parallelize(plain_step, "data=2", pipeline=plain).plan(*arguments()).notes
    assert "no stages" not in "".join(silent)


def test_layers_over_two_axes():
    layouts = {"params/layers/up": "pipe=S(0)", "params/layers/down": "rest=S(0)"}
    with pytest.raises(PipelineError) as error:
        md.parallelize(plain_step, md.Mesh(pipe=2, rest=2), layouts, pipeline=md.Pipeline(4)).plan(*arguments())
    assert str(error.value).startswith("exactly one axis can be the pipeline; layers are split over several:\n  ")
    assert "rest: the scan at stacks.py:" in str(error.value) and "split them over one of " in str(error.value)


def test_schedules_and_chunks_that_there_are_not():
    with pytest.raises(md.MeshDSLError, match="recompute: 'all', not 'stage' or 'none'"):
        md.Pipeline(4, recompute="all")
    with pytest.raises(md.MeshDSLError, match="schedule: no schedule '1f1'; did you mean '1f1b'"):
        md.Pipeline(4, schedule="1f1")
    with pytest.raises(
        md.MeshDSLError, match="'1f1b' has one chunk per stage, not 2; 'interleaved' and 'zb' take several"
    ):
        md.Pipeline(4, chunks=2)
    table = md.make_schedule("1f1b", 4, 4)
    with pytest.raises(md.MeshDSLError, match="microbatches: 8, and the schedule is for 4"):
        md.Pipeline(8, table)
    with pytest.raises(md.MeshDSLError, match=r"schedule: 3 is an int, not the name of a schedule or an md\.Schedule"):
        md.Pipeline(4, 3)
    with pytest.raises(PipelineError, match="the schedule is for 4 ranks, and there are 2"):
        traced(md.Pipeline(4, table), 2, *arguments())
    with pytest.raises(md.MeshDSLError, match="groups of 4, the number of ranks; 2 do not divide\nuse 4 microbatches"):
        traced(md.Pipeline(2, "interleaved", 2), 4, *arguments())
    with pytest.raises(PipelineError, match="8 layers are too few for 5 chunks for each of 2 stages; use at least 10 "):
        traced(md.Pipeline(4, "interleaved", 5), 2, *arguments())
    with pytest.raises(PipelineError, match=r"layers=\(3, 3\) are 6 layers, and there are 8"):
        traced(md.Pipeline(4, layers=(3, 3)), 2, *arguments())
    with pytest.raises(PipelineError, match=r"layers=\(8,\) has 1 numbers; 2 stages take 2"):
        traced(md.Pipeline(4, layers=(8,)), 2, *arguments())
    with pytest.raises(md.MeshDSLError, match=r"layers: \[3, 5\] is a list, not numbers of layers per stage"):
        md.Pipeline(4, layers=[3, 5])
