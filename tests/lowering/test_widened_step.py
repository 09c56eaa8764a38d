"""The unsharded step with its short floats held wide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.lowering.numerics import check_numbers, widened_step
from meshdsl.trace import trace

HALF = jnp.bfloat16


def of(dtype):
    """A step that computes in ``dtype``: loops, conditionals, literals, products, sums and bits."""

    def layer(x, w):
        y = jnp.tanh(lax.dot(x, w, preferred_element_type=dtype))
        return lax.cond(y[0, 0] > 0, lambda y: y * y, lambda y: 1 - y, y), jnp.sum(y, 0)

    def step(x, w, key):
        noise = jax.random.bits(key, x.shape) % 7
        x, sums = lax.scan(layer, (x + noise).astype(dtype), w.astype(dtype))
        count = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, jnp.ones((), dtype)))[1]
        return x, sums, jnp.sort(jnp.cumsum(x, 0)) * count, jnp.zeros((3,), dtype)

    return step


def drawn():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 4)).astype(np.float32), rng.normal(size=(3, 4, 4)).astype(np.float32), jax.random.key(1)


def test_it_is_the_step_in_wide_floats():
    args = drawn()
    wide = widened_step(trace(of(HALF), args))(*args)
    for got, expected in zip(wide, of(jnp.float32)(*args), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_bits_are_those_of_the_short_float():
    def step(x):
        return lax.bitcast_convert_type(x * 3, jnp.uint16), md.rule("a -> a")(lambda y: y + 1)(x)

    x = jnp.arange(8, dtype=HALF)
    for got, expected in zip(widened_step(trace(step, (x,)))(x), step(x), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_nothing_is_short():
    assert widened_step(trace(of(jnp.float32), drawn())) is None


def running(x):
    """A sum of 320 values, one after the other, in bfloat16."""
    return lax.scan(lambda total, y: (total + y, None), jnp.zeros(x.shape[1:], HALF), x.astype(HALF))[0]


def test_a_result_may_be_as_far_off_as_the_step_itself():
    x = np.full((320, 2), 1.01, np.float32)
    alone, wide = running(x), widened_step(trace(running, (x,)))(x)
    off = float(jnp.max(jnp.abs(wide[0] - alone.astype(jnp.float32)) / alone.astype(jnp.float32)))
    assert off > 0.02
    nearer = jnp.asarray(wide[0], HALF)
    report = check_numbers([alone], [nearer], ["total"], widened=lambda: wide)
    assert "the unsharded step differs by" in str(report)
    for widened, other in ((lambda: None, nearer), (lambda: wide, nearer * 3), (lambda: wide, alone * 0)):
        with pytest.raises(md.CheckError):
            check_numbers([alone], [other], ["total"], widened=widened)
    with pytest.raises(md.CheckError):
        check_numbers([alone], [nearer], ["total"], tolerance=1e-3, widened=lambda: wide)


def test_check_asks_for_it():
    x = np.full((320, 2), 1.01, np.float32)
    md.parallelize(running, md.Mesh(x=2), {"x": "x=S(1)"}).check(x)
