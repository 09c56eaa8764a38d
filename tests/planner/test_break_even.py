"""Choices that change what is sent, made by cost on both sides of where they break even."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology

MESH = md.Mesh(data=4, topology=Topology("even", 1e12, 1e12, 1e12, 1e12, 0.0, (Link(1e-6, 1e9),)))


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def sent(step, pins, *args):
    """Kind and dtype of what a step sends whose results are whole everywhere."""
    plan = md.parallelize(step, MESH, pins, {"**": "data=B"}).plan(*args)
    assert plan.gap < 1e-6
    return [(c.kind, c.shape, c.dtype) for c in plan.collectives]


@pytest.mark.parametrize(("made", "read"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_gathers_stand_before_or_after_a_cast_where_there_are_fewer_bytes(made, read):
    (found,) = sent(lambda x: jnp.tanh(x.astype(read)), {"x": "data=S(0)"}, array(512, 512, dtype=made))
    assert found == ("all-gather", (512, 512), "bfloat16")


def test_gathers_stand_before_what_is_repeated_and_after_what_is_summed():
    (found,) = sent(lambda x: jnp.broadcast_to(x[:, None], (512, 64, 32)) * 2, {"x": "data=S(0)"}, array(512, 32))
    assert found[:2] == ("all-gather", (512, 1, 32))
    (found,) = sent(lambda x: jnp.sum(jnp.exp(x), 1), {"x": "data=S(0)"}, array(512, 512))
    assert found[:2] == ("all-gather", (512,))


def test_partial_sums_are_added_before_they_are_reduced():
    pins = {"x": "data=S(1)", "w": "data=S(0)", "v": "data=S(0)"}
    found = sent(lambda x, w, v: 2 * (x @ w) - (x @ v) / 3 + x @ w, pins, *[array(512, 512)] * 3)
    assert [kind for kind, *_ in found] == ["all-reduce"]


@pytest.mark.parametrize(("batch", "kinds"), [(16, {"all-gather"}), (4096, {"reduce-scatter", "all-gather"})])
def test_of_a_small_batch_the_factors_of_a_gradient_are_gathered_of_a_large_one_its_sum_is_reduced(batch, kinds):
    pins = {"w": "data=B", "x": "data=S(0)", "dy": "data=S(0)"}
    plan = md.parallelize(lambda w, x, dy: w - 0.1 * (x.T @ dy), MESH, pins).plan(
        array(1024, 1024), array(batch, 1024), array(batch, 1024)
    )
    assert {c.kind for c in plan.collectives} == kinds
    assert {c.shape[0] for c in plan.collectives} == ({batch} if batch == 16 else {1024})


def test_a_partial_sum_is_reduced_before_it_is_rounded():
    pins = {"x": "data=S(1)", "w": "data=S(0)"}
    found = sent(lambda x, w: (x @ w).astype(jnp.bfloat16), pins, array(512, 512), array(512, 512))
    assert [(kind, dtype) for kind, _, dtype in found if kind != "all-gather"] == [("reduce-scatter", "float32")]
    assert all(dtype == "bfloat16" for kind, _, dtype in found if kind == "all-gather")


def test_it_is_rounded_before_where_that_is_stated():
    pins = {"x": "data=S(1)", "w": "data=S(0)"}
    found = sent(lambda x, w: md.constrain((x @ w).astype(jnp.bfloat16), "data=P"), pins, *[array(512, 512)] * 2)
    assert found == [("all-reduce", (512, 512), "bfloat16")]


def test_a_sum_is_sent_before_it_is_widened_and_after_where_that_is_stated():
    pins = {"x": "data=S(1)", "w": "data=S(0)"}
    args = [array(512, 512, dtype=jnp.bfloat16)] * 2
    assert sent(lambda x, w: (x @ w).astype(jnp.float32), pins, *args) == [("all-reduce", (512, 512), "bfloat16")]
    found = sent(lambda x, w: md.constrain((x @ w).astype(jnp.float32), "data=P"), pins, *args)
    assert found == [("all-reduce", (512, 512), "float32")]


@pytest.mark.parametrize(("stated", "dtype_over_b"), [("a=P", "float32"), ("a=P b=P", "bfloat16")])
def test_it_is_rounded_before_on_the_stated_axes_alone(stated, dtype_over_b):
    def step(x, w):
        return md.constrain((x @ w).astype(jnp.bfloat16), stated).astype(jnp.float32)

    pins = {"x": "a=S(1) b=S(1)", "w": "a=S(0) b=S(0)"}
    args, whole = [array(64, 512), array(512, 64)], {"**": "a=S(0) b=S(1)"}
    plan = md.parallelize(step, md.Mesh(a=2, b=2, topology=MESH.topology), pins, whole).plan(*args)
    dtypes = {c.axes: c.dtype for c in plan.collectives if c.kind == "reduce-scatter"}
    assert dtypes == {("a",): "bfloat16", ("b",): dtype_over_b}


def test_of_the_largest_there_is_no_rounding_to_ask_for():
    (found,) = sent(lambda x: jnp.max(x, 1).astype(jnp.bfloat16), {"x": "data=S(1)"}, array(512, 512))
    assert found == ("all-reduce", (512,), "bfloat16")
