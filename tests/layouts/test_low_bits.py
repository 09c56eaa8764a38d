"""Formats of fewer bits: what they lose, and which a budget allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.layouts.low_bits import BLOCK, FORMATS, LowBits
from meshdsl.lowering.local.collectives import restored, rounded


@pytest.mark.parametrize("name", FORMATS)
def test_the_stated_error_is_that_of_normal_numbers(name):
    x = jax.random.normal(jax.random.key(0), (4, 100_003))
    lost = restored(rounded(x, name), x.shape[1:], name) - x
    error = float(jnp.sqrt(jnp.mean(lost**2) / jnp.mean(x**2)))
    assert 0.95 * FORMATS[name].error < error <= FORMATS[name].error


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, BLOCK, BLOCK + 1, 16 * BLOCK + 5, 100_000])
def test_nothing_infinite_becomes_finite(name, count):
    x = np.zeros((3, count), np.float32)
    x[0, count // 2], x[1, count // 2] = np.nan, -np.inf
    made = np.asarray(jax.jit(lambda x: restored(rounded(x, name), (count,), name))(x))
    assert rounded(x, name).nbytes == 3 * FORMATS[name].sent(count) and not made[2].any()
    assert np.isnan(made[0, count // 2]) and not np.isfinite(made[1, count // 2])
    assert name == "float8_e4m3fn" or made[1, count // 2] == -np.inf
    assert not np.delete(made[1], count // 2).any()  # a mask leaves the rest as it is


def test_the_largest_floats_stay_finite():
    largest = np.full((1, 256), np.finfo(np.float32).max)
    for name in FORMATS:
        assert np.isfinite(restored(rounded(largest, name), (256,), name)).all()


@pytest.mark.parametrize("name", FORMATS)
def test_no_array_is_short_in_its_last_dim(name):
    """A TPU pads the last dim to 128: bytes in a dim of their own, of 2 or 4, would take up to 64 times their size."""
    x = jax.ShapeDtypeStruct((8, 256, 1024), jnp.float32)
    traced = jax.make_jaxpr(lambda x: restored(rounded(x, name), x.shape[1:], name))(x)
    made = [value.aval.shape[-1] for line in traced.eqns for value in line.outvars if value.aval.ndim]
    assert made and not [length for length in made if 1 < length < 128]


def test_formats_within_a_budget():
    assert LowBits.of(0.002).allowed("float32") == ("bfloat16",) and not LowBits.of(0.002).allowed("bfloat16")
    assert LowBits.of("0.01").allowed("float32") == ("bfloat16", "int8")
    assert LowBits.of(1).allowed("float16") == ("int8", "float8_e4m3fn") and not LowBits.of(1).allowed("float64")
    assert str(LowBits.of(0.03)) == "0.03" and str(LowBits.of("0.03:int8,bfloat16")) == "0.03:int8,bfloat16"
    assert LowBits.of(np.float32(0.5)) == LowBits.of(0.5)
    assert LowBits.of("0.03:float8_e4m3fn") == md.LowBits(0.03, "float8_e4m3fn")


NONE = "0.001: no format rounds so little: of normal numbers, bfloat16 0.17%, int8 0.65%, float8_e4m3fn 2.60% of"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (0.001, f"low_bits={NONE}"),
        ("0.01:float8_e4m3fn", "no format rounds so little: of normal numbers, float8_e4m3fn 2.60% of"),
        (0, "low_bits: 0 is an int, not an error budget above 0, and at most 1, such as 0.01"),
        (True, "low_bits: True is a bool, not"),
        (float("nan"), "low_bits: nan is a float, not"),
        (float("inf"), "low_bits: inf is a float, not an error budget above 0, and at most 1, such as 0.01"),
        ("0.01:", "low_bits: no format ''"),
        ("much", "low_bits: 'much' is not an error budget such as '0.01'"),
        ("0.1:int9", "low_bits: no format 'int9'; did you mean 'int8'?"),
    ],
)
def test_other_budgets_are_refused_before_anything_is_traced(given, text):
    with pytest.raises(ArgumentError) as found:
        md.parallelize(lambda x: x, "data=8", low_bits=given)
    assert text in str(found.value)


def test_no_formats_are_refused():
    with pytest.raises(ArgumentError, match="low_bits: formats is empty; known: bfloat16, int8, float8_e4m3fn"):
        md.LowBits(0.01, formats=())
