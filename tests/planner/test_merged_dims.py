"""Merged dims are split through minor factors: rows of a batch under ``vmap`` over devices stay divisible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology

SLOW_LINKS = Topology("slow links", 1e8, 1e8, 1e8, 4e9, 0.0, (Link(0.0, 1e6),))
SLOW_DEVICES = Topology("slow devices", 1e5, 1e5, 1e5, 4e9, 0.0, (Link(0.0, 1e9),))
MESH = md.Mesh(data=4, model=2, topology=SLOW_LINKS)
NUMBERS = ("NHWC", "HWIO", "NHWC")


def array(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


def loss(ws, x, y):
    for w in ws:
        x = jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS))
    return jnp.mean((x.mean((1, 2)) - y) ** 2)


def flat(ws, x, y):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x, y))


def device(ws, x, y):
    grads = lax.pmean(jax.grad(loss)(ws, x, y), "batch")
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads)


def on_devices(ws, x, y):
    return jax.vmap(device, (None, 0, 0), None, axis_name="batch")(ws, x, y)


def test_a_convolution_on_devices_is_split_as_one_on_the_whole_batch():
    ws, x, y = [array(3, 3, 2, 4), array(3, 3, 4, 4)], array(4, 2, 3, 3, 2), array(4, 2, 4)
    one = md.parallelize(flat, MESH, {"x": "data=S(0) model=S(0)"})
    sharded = md.parallelize(on_devices, MESH, {"x": "data=S(0) model=S(1)"})
    plan = sharded.plan(ws, x, y)
    assert plan.bytes == one.plan(ws, x.reshape(8, 3, 3, 2), y.reshape(8, 4)).bytes > 0
    assert sharded.verify(ws, x, y).equal and sharded.check(ws, x, y).ok


def test_axes_that_do_not_fill_the_major_factor_leave_the_minor_one_whole():
    """Blocks of the rows of two devices are not contiguous: half of a block, half of the next one."""
    x = array(4, 6, 8)
    for axes, moved in (
        ({"data": 4, "model": 2}, False),
        ({"data": 2, "model": 2}, True),
        ({"model": 2, "data": 4}, True),
    ):
        mesh = md.Mesh(**axes, topology=SLOW_DEVICES)
        sharded = md.parallelize(lambda x: jnp.tanh(x.reshape(24, 8)), mesh, {"x": "data=S(0) model=S(1)"})
        assert bool(sharded.plan(x).collectives) == moved and sharded.verify(x).equal and sharded.check(x).ok


@pytest.mark.parametrize("shape", [(24, 8), (2, 12, 8), (4, 2, 3, 8), (2, 2, 6, 2, 4), (96, 2)])
def test_reshapes_there_and_back(shape):
    """Every factor has axes of its own, so that nothing moves."""
    x, mesh = array(4, 6, 8), md.Mesh(a=2, b=2, c=2, topology=SLOW_DEVICES)

    def step(x):
        return jnp.sin(jnp.tanh(x.reshape(shape)).reshape(x.shape))

    sharded = md.parallelize(step, mesh, {"x": "a=S(0) b=S(0) c=S(1)"})
    assert not sharded.plan(x).collectives and sharded.verify(x).equal and sharded.check(x).ok


def test_a_plan_from_a_file(tmp_path):
    x, pins = array(4, 6, 8), {"x": "data=S(0) model=S(1)"}

    def step(x):
        return jnp.tanh(x.reshape(24, 8))

    plan = md.parallelize(step, MESH, pins).plan(x)
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and not plan.collectives
    np.testing.assert_allclose(md.parallelize(step, MESH, pins, plan=loaded)(x), step(x), rtol=1e-5)


def test_values_with_equal_blocks_are_each_sent():
    """Both are the same elements on a device, so that a compiler would gather once."""
    x = array(4, 2, 3)

    def step(x):
        y = jnp.tanh(x)
        a = md.constrain(y.reshape(8, 3), "data=S(0) model=S(0)")
        b = md.constrain(y.transpose(1, 0, 2).reshape(2, 12), "data=S(1) model=S(0)")
        return jnp.sin(md.constrain(a, "data=S(0) model=B")), jnp.cos(md.constrain(b, "data=S(1) model=B"))

    sharded = md.parallelize(step, MESH, {"x": "data=S(0) model=S(1)"})
    assert len(sharded.plan(x).collectives) == 2 and sharded.verify(x).equal and sharded.check(x).ok
