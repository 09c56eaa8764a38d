"""Parts of sums that are cast before they are reduced, as stated: what is sent, and how far off the numbers are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import PinError

MESH, DEVICES = md.Mesh(data=8), 8
RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=shape).astype(np.float32) for shape in ((512, 64), (64, 32)))
KINDS = {"data=B": "all-reduce", "data=S(0)": "reduce-scatter"}


def gradient(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def half(x):
    return x.astype(jnp.bfloat16)


def unasked(w, x):
    return w - half(gradient(w, x)).astype(jnp.float32)


def asked(w, x):
    return w - md.constrain(half(gradient(w, x)), "data=P").astype(jnp.float32)


def planned(step, layout, *args, mesh=MESH):
    sharded = md.parallelize(step, mesh, {"w": layout, "x": "data=S(0)"})
    return sharded, sharded.plan(*args)


def reduced(plan):
    """What is sent to reduce sums."""
    return [c for c in plan.collectives if c.kind in KINDS.values()]


def lowered_reductions(sharded, *args):
    """Kinds and element types in the program before the compiler has changed it."""
    text = sharded.lower(*args).as_text()
    found = re.findall(r'"stablehlo\.(all_reduce|reduce_scatter)".*?-> tensor<[\dx]*?x?([a-z]+\d+)>', text, re.DOTALL)
    return [(kind.replace("_", "-"), dtype) for kind, dtype in found]


@pytest.mark.parametrize("layout", KINDS)
def test_by_default_sums_are_reduced_as_they_were_computed(layout):
    sharded, plan = planned(unasked, layout, W, X)
    assert [(c.kind, c.dtype) for c in reduced(plan)] == [(KINDS[layout], "float32")]
    assert lowered_reductions(sharded, W, X) == [(KINDS[layout], "f32")]
    assert not plan.notes


@pytest.mark.parametrize("layout", KINDS)
def test_asked_half_of_the_bytes_are_sent_and_the_numbers_are_within_the_rounding_of_the_parts(layout):
    sharded, plan = planned(asked, layout, W, X)
    _, before = planned(unasked, layout, W, X)
    assert [(c.kind, c.dtype) for c in reduced(plan)] == [(KINDS[layout], "bfloat16")]
    assert sum(c.bytes for c in reduced(plan)) == sum(c.bytes for c in reduced(before)) / 2
    assert lowered_reductions(sharded, W, X) == [(KINDS[layout], "bf16")]
    assert sharded.verify(W, X).equal and sharded.check(W, X).ok
    parts = np.array([gradient(W, x) for x in np.split(X, DEVICES)], np.float64)
    off = np.abs(np.asarray(sharded(W, X)) - (W - parts.sum(0)))
    assert (off <= jnp.finfo(jnp.bfloat16).eps * np.abs(parts).sum(0) + 1e-4).all()
    assert (off > np.abs(np.asarray(jax.jit(unasked)(W, X)) - (W - parts.sum(0)))).any()


def test_the_plan_says_so_and_its_file_too(tmp_path):
    _, plan = planned(asked, "data=B", W, X)
    (note,) = plan.notes
    assert re.fullmatch(
        r"partial sums over data are cast from float32 to bfloat16 before the reduction, as constrained: "
        r"test_partial_sum_casts\.py:\d+",
        note,
    )
    assert note in str(plan)
    plan.save(tmp_path / "p.json")
    again = md.load_plan(tmp_path / "p.json")
    assert again == plan
    run = md.parallelize(asked, again.mesh, plan=again)
    np.testing.assert_array_equal(run(W, X), planned(asked, "data=B", W, X)[0](W, X))


def test_in_the_body_of_a_scan():
    def step(w, x):
        def layer(_, w):
            sent = md.constrain(half(gradient(w, x)), "data=P").astype(jnp.float32)
            return None, w - sent / jnp.sqrt(jnp.sum(sent * sent))

        return jax.lax.scan(layer, None, w)[1]

    w = np.stack([W, 2 * W, 3 * W])
    sharded, plan = planned(step, "data=B", w, X)
    assert [(c.kind, c.dtype, c.trips) for c in reduced(plan)] == [("all-reduce", "bfloat16", 3)]
    assert lowered_reductions(sharded, w, X) == [("all-reduce", "bf16")]
    assert sharded.verify(w, X).equal and sharded.check(w, X).ok


def test_who_reads_the_cast_otherwise_reads_what_was_reduced_before():
    def step(w, x):
        g = half(gradient(w, x))
        return md.constrain(g, "data=P"), g

    sharded, _ = planned(step, "data=B", W, X)
    got = np.asarray(sharded(W, X)[1], np.float64)
    whole = np.asarray(jax.jit(gradient)(W, X), np.float64)
    assert (np.abs(got - whole) <= 0.5 * jnp.finfo(jnp.bfloat16).eps * np.abs(whole) + 1e-4).all()


def test_what_has_no_sum_is_an_error_as_ever():
    with pytest.raises(
        PinError, match=r"data=P: a value of bool has no such reduction; it can be P\(max\) or P\(min\)"
    ):
        planned(lambda w, x: md.constrain(gradient(w, x) > 0, "data=P"), "data=B", W, X)
