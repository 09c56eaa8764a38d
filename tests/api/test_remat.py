import re

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md

MESH = md.Mesh(data=4, model=2)
LAYERS, WIDTH = 5, 64


def layer(x, weights):
    up, down = weights
    return x + jnp.tanh(jax.nn.gelu(x @ up) @ down)


def updated(loss, weights):
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def unrolled(weights, x):
    def loss(weights):
        y = x
        for i in range(LAYERS):
            y = layer(y, [w[i] for w in weights])
        return (y**2).mean()

    return updated(loss, weights)


def scanned(weights, x):
    return updated(lambda weights: (jax.lax.scan(lambda y, w: (layer(y, w), None), x, weights)[0] ** 2).mean(), weights)


def sharded(step, **options):
    return md.parallelize(step, MESH, {"x": "data=S(0)"}, donate_argnums=0, **options)


@pytest.fixture(scope="module")
def args():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (LAYERS, WIDTH, 2 * WIDTH), (LAYERS, 2 * WIDTH, WIDTH), (4096, WIDTH)
    up, down, x = (0.1 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return (up, down), x


@pytest.mark.parametrize(("step", "share"), [(unrolled, 0.55), (scanned, 0.4)])
def test_the_compiled_step_recomputes_what_the_plan_says(step, share, args, tmp_path):
    free = sharded(step).plan(*args)
    small = sharded(step, memory=share * free.memory, remat="auto")
    plan = small.plan(*args)
    assert plan.memory <= share * free.memory and plan.recomputation.values
    held = small.verify(*args).held
    assert held.compiled_flops == held.flops
    assert held.compiled_memory == pytest.approx(held.memory, rel=0.1)
    small.check(*args)

    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and sharded(step, plan=loaded).plan(*args) == plan

    first, again, rest, last = plan.waterfall
    assert (first.bytes, first.seconds) == plan.recomputation.fastest
    assert first.bytes + again.bytes + rest.bytes == last.bytes == plan.memory
    assert "computed again" in str(plan)


def test_a_plan_that_fits_computes_nothing_again(args):
    free = sharded(scanned).plan(*args)
    plan = sharded(scanned, remat="auto").plan(*args)
    assert (plan.seconds, plan.recomputation) == (free.seconds, None)
    assert (
        "nothing is computed again: the fastest plan that keeps everything fits the memory (remat='auto')" in plan.notes
    )


def test_where_nothing_fits_the_error_says_the_least_with_recomputation():
    def step(w, x):
        def loss(w):
            y = jax.lax.stop_gradient(x @ w)
            y = jax.experimental.io_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
            return (jnp.sin(y * (x @ w)) ** 2).mean()

        return w - jax.grad(loss)(w)

    with pytest.raises(md.MemoryLimitError) as caught:
        md.parallelize(step, "data=8", memory="2kB", remat="auto").plan(jnp.ones((16, 16)), jnp.ones((64, 16)))
    first, *_, but_one, last = str(caught.value).splitlines()
    assert first.startswith("no plan fits memory=2 kB per device; the least ")
    assert but_one == "that is with activations computed again (remat='auto'); a plan that keeps them all needs more"
    assert re.fullmatch(r"io_callback at test_remat.py:\d+ has effects and runs once: its results are kept", last)


def test_remat_is_off_or_auto():
    with pytest.raises(md.ArgumentError, match="remat: 'atuo' is not 'off' or 'auto'; did you mean 'auto'"):
        sharded(scanned, remat="atuo")
    with pytest.raises(md.ArgumentError, match="remat: True is not 'off' or 'auto'"):
        md.Program(scanned, (), remat=True)


@pytest.mark.parametrize("part", [0.98, 0.9])
def test_a_limit_at_which_only_other_values_live_finds_a_plan(part):
    """The residuals do not live where the plan that keeps everything exceeds the limit."""

    def step(params, x):
        def loss(params):
            y = x
            for w in params:
                y = jnp.tanh(jnp.sin(y @ w))
            return jnp.mean(y**2)

        return updated(loss, params)

    args = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((2048, 64), jnp.float32)
    free = md.parallelize(step, "data=4", md.data_parallel()).plan(*args)
    limit = part * free.memory
    plan = md.parallelize(step, "data=4", md.data_parallel(), memory=limit, remat="auto").plan(*args)
    assert plan.memory <= limit and plan.recomputation.values
