"""Outputs compared leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.errors import CheckError
from meshdsl.lowering.check import check_numbers

BIG = np.array([1.0, -2.0, 4.0], np.float32)


def failure(expected, got, **options):
    with pytest.raises(CheckError) as caught:
        check_numbers([BIG, expected], [BIG, got], ["loss", "params/w"], **options)
    return str(caught.value).splitlines()


def test_report_names_the_worst_first():
    report = check_numbers([BIG, BIG], [BIG, BIG + np.float32(2e-5)], ["a", "b"])
    assert str(report).splitlines() == [
        "2 outputs agree, 1 of them exactly; the worst:",
        "  b: relative error 5.01e-06, allowed 2e-04",
        "  a: relative error 0.00e+00, allowed 2e-04",
    ]
    assert report.worst == pytest.approx(5.01e-6, rel=1e-2)


def test_error_is_relative_to_the_leafs_largest_value():
    assert failure(BIG, BIG * np.float32(1.001)) == [
        "1 of 2 outputs differ from the unsharded step",
        "  params/w: relative error 1.00e-03, allowed 2e-04",
    ]
    check_numbers([BIG], [BIG * np.float32(1.001)], ["w"], tolerance=1e-2)


def test_floor_from_the_largest_of_the_tree():
    tiny = np.array([1e-9, 0], np.float32)
    check_numbers([BIG, tiny], [BIG, -tiny], ["w", "b"])
    with pytest.raises(CheckError):
        check_numbers([tiny], [-tiny], ["b"])


def test_small_leaves_still_count():
    small = np.array([0.1, 0.2], np.float32)
    assert "relative error 5.00e-01" in failure(small, small + np.float32(0.1))[1]


def test_integers_and_bools_are_exact():
    assert failure(np.array([1, 2, 3]), np.array([1, 2, 4])) == [
        "1 of 2 outputs differ from the unsharded step",
        "  params/w: 1 of 3 int64 values differ",
    ]
    assert "1 of 2 bool values differ" in failure(np.array([True, False]), np.array([True, True]))[1]


def test_keys_are_exact():
    assert "2 of 2 uint32 values differ" in failure(jax.random.key(1), flipped())[1]


def flipped():
    return jax.random.wrap_key_data(~jax.random.key_data(jax.random.key(1)))


def test_non_finite_values_stay():
    wild = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    check_numbers([wild], [wild.copy()], ["w"])
    assert "infinities or NaNs differ" in failure(wild, wild[[0, 2, 1, 3]])[1]
    assert "infinities or NaNs differ" in failure(wild, np.nan_to_num(wild))[1]
    assert "1 values are not finite, and are in the unsharded step" in failure(BIG, np.array([1, -2, np.inf], "f4"))[1]


def test_tolerance_depends_on_the_dtype():
    half = jnp.asarray([1.0, 2.0], jnp.bfloat16)
    check_numbers([half], [half * 1.01], ["w"])
    assert "allowed 2e-02" in failure(half, half * 1.1)[1]


def test_types_are_compared():
    assert "float64[3] instead of float32[3]" in failure(BIG, BIG.astype(np.float64))[1]
    assert "float32[2] instead of float32[3]" in failure(BIG, BIG[:2])[1]
