"""Collectives over an axis of ``vmap`` plan and compute as the same step written over the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.sweeps import swept
from tests.trace.interpreter import run

N, D = 16, 24
W = jnp.cos(jnp.arange(float(D * D))).reshape(D, D) / 5
X = jnp.sin(jnp.arange(float(N * D))).reshape(N, D)
WIDE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((N, 1024), jnp.float32)
RING = [(j, (j + 1) % N) for j in range(N)]
BACK = [((j + 2) % N, j) for j in range(N)]


def over_batch(f, **how):
    return jax.vmap(f, axis_name="batch", **how)


def named_norm(h):
    mean = lax.pmean(h, "batch")
    return (h - mean) * lax.rsqrt(lax.pmean((h - mean) ** 2, "batch") + 1e-5)


def norm(h):
    mean = h.mean(0)
    return (h - mean) * lax.rsqrt(((h - mean) ** 2).mean(0) + 1e-5)


def named_layers(w, x):
    return over_batch(lambda h: lax.scan(lambda h, _: (jnp.tanh(named_norm(h) @ w), None), h, None, length=3)[0])(x)


def layers(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(norm(h) @ w), None), x, None, length=3)[0]


def named_statistics(w, x):
    def each(h):
        n = lax.psum(1, "batch")
        total = lax.psum({"sum": h, "squares": h**2}, "batch")
        return total["squares"] / n - (total["sum"] / n) ** 2

    return over_batch(each, out_axes=None)(x @ w)


def statistics(w, x):
    h = x @ w
    return (h**2).sum(0) / N - (h.sum(0) / N) ** 2


def named_contrast(w, x):
    return over_batch(lambda f: lax.all_gather(f, "batch") @ f)(x @ w)


def named_counts(w, x):
    return over_batch(lambda h: h / (1 + lax.psum((h > 0), "batch")))(x @ w)


def named_place(w, x):
    return over_batch(lambda h: h * (1 + lax.axis_index("batch")) / lax.axis_size("batch"))(x @ w)


def named_heads(w, x):  # two groups of rows, by a second name
    h = (x @ w).reshape(2, N // 2, -1)
    inner = jax.vmap(lambda h: h - lax.pmean(h, "inner") * lax.psum(h, ("inner", "outer")), axis_name="inner")
    return jax.vmap(inner, axis_name="outer")(h).reshape(x.shape)


def heads(w, x):
    h = (x @ w).reshape(2, N // 2, -1)
    return (h - h.mean(1, keepdims=True) * h.sum((0, 1))).reshape(x.shape)


# name -> the step over named axes, the same step without, whether its gradient is compared
PAIRS = {
    "pmean": (lambda w, x: over_batch(named_norm)(x @ w), lambda w, x: norm(x @ w), True),
    "scan": (named_layers, layers, True),
    "statistics": (named_statistics, statistics, True),
    "pmax": (
        lambda w, x: over_batch(lambda h: h / lax.pmax(jnp.abs(h), "batch"))(x @ w),
        lambda w, x: (x @ w) / jnp.abs(x @ w).max(0),
        False,  # jax does not differentiate pmax
    ),
    "pmin of scalars": (
        lambda w, x: over_batch(lambda h: h - lax.pmin(h.min(), "batch"))(x @ w),
        lambda w, x: (x @ w) - (x @ w).min(),
        False,
    ),
    "counts": (named_counts, lambda w, x: (x @ w) / (1 + ((x @ w) > 0).sum(0)), True),
    "all_gather": (named_contrast, lambda w, x: (x @ w) @ (x @ w).T, True),
    "all_gather tiled": (
        lambda w, x: over_batch(lambda h: lax.all_gather(h, "batch", tiled=True).reshape(N, -1) @ h)(x @ w),
        lambda w, x: (x @ w) @ (x @ w).T,
        True,
    ),
    "all_to_all": (
        lambda w, x: over_batch(lambda h: lax.all_to_all(h, "batch", 0, 0))(x @ w[:, :N]),
        lambda w, x: (x @ w[:, :N]).T,
        True,
    ),
    "psum_scatter": (
        lambda w, x: over_batch(lambda h: lax.psum_scatter(h[:N], "batch"))(x @ w),
        lambda w, x: (x @ w)[:, :N].sum(0),
        True,
    ),
    "axis_index": (named_place, lambda w, x: (x @ w) * (1 + jnp.arange(N))[:, None] / N, True),
    "two names": (named_heads, heads, True),
    "ring": (
        lambda w, x: over_batch(lambda h: h - lax.ppermute(h, "batch", RING))(x @ w),
        lambda w, x: (x @ w) - jnp.roll(x @ w, 1, 0),
        True,
    ),
    "ring of two steps in a scan": (
        lambda w, x: over_batch(
            lambda h: lax.scan(lambda c, _: (jnp.tanh(lax.ppermute(c, "batch", BACK) @ w), None), h, None, length=3)[0]
        )(x),
        lambda w, x: lax.scan(lambda c, _: (jnp.tanh(jnp.roll(c, -2, 0) @ w), None), x, None, length=3)[0],
        True,
    ),
    "without the axis": (
        lambda w, x: over_batch(lambda h: h * lax.psum(w, "batch")[0] + lax.pmean(w, "batch")[1])(x),
        lambda w, x: x * (N * w)[0] + (N * w / N)[1],
        True,
    ),
}
COLLECTIVES = {"psum", "pmax", "pmin", "psum_invariant", "all_gather", "all_to_all", "ppermute", "reduce_scatter"}


def steps(name):
    named, plain, differentiable = PAIRS[name]
    if not differentiable:
        return named, plain
    return tuple(jax.grad(lambda w, x, f=f: jnp.mean(jnp.sin(f(w, x)) ** 2)) for f in (named, plain))


@swept("name", PAIRS, every=2)
def test_no_collective_is_left_and_the_numbers_stay(name):
    named, plain = steps(name)
    program = trace(named, (W, X))
    assert COLLECTIVES.isdisjoint(op.name for _, op in walk(program.graph))
    np.testing.assert_allclose(run(program, W, X), named(W, X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(named(W, X), plain(W, X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_plans_as_the_step_without_names(name):
    layouts = {"x": "data=S(0)", "w": "data=B"}
    plans = [md.parallelize(f, "data=4,model=2", layouts).plan(*WIDE) for f in steps(name)]
    named, plain = plans
    assert named.bytes <= 1.02 * plain.bytes  # autodiff orders the sums of two gathers differently
    assert not named.notes
