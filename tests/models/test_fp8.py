"""Products in float8: numbers that float8 has, gradients, what is sent, and what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.models import gpt, llama
from meshdsl.models.fp8 import dot_general, multiplier

PLAIN = (((1,), (0,)), ((), ()))
SIZES = {"layers": 2, "embed": 4096, "heads": 32, "seq": 2048, "vocab": 512}


def whole(rng, *shape):
    """Returns numbers that both formats have at the scale of the largest, which is 7."""
    numbers = rng.integers(-7, 8, shape)
    numbers.flat[0] = 7
    return jnp.asarray(numbers, jnp.float32)


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((8, 16), (16, 4), PLAIN),
        ((2, 8, 16), (16, 4), (((2,), (0,)), ((), ()))),
        ((2, 3, 4, 5), (4, 5, 6, 7), (((2, 3), (0, 1)), ((), ()))),
        ((2, 4, 5), (6, 5, 4), (((1, 2), (2, 1)), ((), ()))),
        ((3, 4, 2, 5), (5, 2, 3, 6), (((3,), (0,)), ((2, 0), (1, 2)))),
    ],
)
def test_products_of_numbers_that_float8_has_are_those_of_lax(left, right, numbers):
    """So are both gradients; a dim out of its place would change them."""
    rng = np.random.default_rng(0)
    x, w = whole(rng, *left), whole(rng, *right)
    made, backward = jax.vjp(lambda x, w: dot_general(x, w, numbers), x, w)
    expected, exact = jax.vjp(lambda x, w: lax.dot_general(x, w, numbers), x, w)
    np.testing.assert_allclose(made, expected, rtol=1e-6)
    gradient = whole(rng, *expected.shape)
    for found, known in zip(backward(gradient), exact(gradient), strict=True):
        np.testing.assert_allclose(found, known, rtol=1e-6)


def test_rounding_loses_what_three_and_two_bits_of_mantissa_lose():
    x, w, g = (jax.random.normal(jax.random.key(i), (64, 64), jnp.bfloat16) for i in range(3))
    made, backward = jax.vjp(lambda x, w: dot_general(x, w, PLAIN), x, w)
    expected, exact = jax.vjp(lambda x, w: x @ w, x, w)
    for found, known, least, most in zip(
        (made, *backward(g)), (expected, *exact(g)), (0.02, 0.04, 0.04), (0.05, 0.08, 0.08), strict=True
    ):
        assert found.dtype == jnp.bfloat16
        known = known.astype(jnp.float32)
        lost = jnp.linalg.norm(found.astype(jnp.float32) - known) / jnp.linalg.norm(known)
        assert least < lost < most


def test_all_products_multiply_two_float8_tensors():
    x = jnp.ones((4, 8))
    text = str(jax.make_jaxpr(jax.grad(lambda x, w: dot_general(x, w, PLAIN).sum(), (0, 1)))(x, jnp.ones((8, 2))))
    assert text.count("dot_general[") == 3
    assert text.count(":f8_e4m3fn") >= 3 and text.count(":f8_e5m2") >= 1


def test_zeros_and_numbers_that_are_not_finite():
    x, w = jnp.zeros((4, 8)), jnp.ones((8, 2))
    assert not dot_general(x, w, PLAIN).any()
    for bad in (jnp.nan, jnp.inf):
        assert jnp.isnan(dot_general(x.at[1, 2].set(bad), w, PLAIN)[1]).all()


def test_numbers_whose_scale_is_no_normal_number_are_zeros():
    """Devices take such a scale for 0, and dividing by it would make NaN of finite numbers."""
    size = 1e-36
    x, w = jnp.full((4, 8), size), jnp.ones((8, 2))
    assert (dot_general(x, w, PLAIN) == 0).all() and (dot_general(w.T, x.T, PLAIN) == 0).all()
    for gradient in jax.grad(lambda x, w: (size * dot_general(x, w, PLAIN)).sum(), (0, 1))(w.T, w):
        assert (gradient == 0).all()


@pytest.mark.parametrize(("left", "right"), [("int32", "int32"), ("complex64", "complex64"), ("float32", "int8")])
def test_operands_that_are_no_floats_are_refused(left, right):
    with pytest.raises(ArgumentError, match=f"{left} x {right}: products in float8 are of floats"):
        dot_general(jnp.ones((4, 8), left), jnp.ones((8, 2), right), PLAIN)


def test_static_scales_are_one_and_clip():
    x, w = jnp.full((1, 1), 1000.0), jnp.full((1, 1), 2.0)
    assert dot_general(x, w, PLAIN, static=True) == 448 * 2
    assert dot_general(x, w, PLAIN) == pytest.approx(2000)


def test_weights_are_gathered_in_float8():
    def step(w, batch):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((dot_general(batch, w, PLAIN) - batch) ** 2))(w)

    w, batch = (jax.random.normal(jax.random.key(i), (n, 256)) for i, n in enumerate((256, 1024)))
    sharded = md.parallelize(step, md.Mesh(data=8), md.fsdp())
    sent = {c.kind: c.bytes for c in sharded.plan(w, batch).collectives}
    assert sent["all-gather"] == 256 * 256 * 7 / 8 and sent["reduce-scatter"] == 4 * 256 * 256 * 7 / 8
    sharded.verify(w, batch)
    sharded.check(w, batch)


@pytest.mark.parametrize("family", [gpt, llama])
def test_models_gather_their_weights_in_float8(family):
    more = {"hidden": 16384, "groups": 8, "head": 128} if family is llama else {}
    config = family.Config(**SIZES, **more, products="float8", dtype="bfloat16")
    program = family.program(config, family.RULES["fsdp"], batch=64)
    mesh = md.Mesh(data=8, topology="dgx-h100")
    plan = md.parallelize(program.step, mesh, rules=program.rules).plan(*program.args)
    by_layer = {c.bytes for c in plan.collectives if c.kind == "all-gather" and c.trips == 2}
    assert by_layer == {4096 * 16384 * 7 // 8}


def test_a_stated_sharding_is_refused():
    with pytest.raises(ArgumentError, match="products in float8 take none"):
        dot_general(jnp.ones((4, 8)), jnp.ones((8, 2)), PLAIN, out_sharding=jax.sharding.PartitionSpec("x"))


def test_an_unknown_variant_is_named():
    said = "no variant 'float16' of products; did you mean 'float8'\\?; it is one of 'plain', 'float8', 'float8_static'"
    with pytest.raises(ArgumentError, match=said):
        multiplier("float16")


def test_second_derivatives_are_refused():
    """Their tangents would be cast to float8 without a scale, which loses those that are small."""
    w = jnp.ones((8, 4))
    gradient = jax.grad(lambda w: (dot_general(jnp.ones((4, 8)), w, PLAIN) ** 2).sum())
    assert bool((gradient(w) > 0).all())
    with pytest.raises(ArgumentError, match="products in float8 have no second derivatives"):
        jax.grad(lambda w: gradient(w).sum())(w)
