"""Outputs compared leaf by leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import CheckError
from meshdsl.lowering.numerics import check_numbers, perturb

BIG = np.array([1.0, -2.0, 4.0], np.float32)


def failure(expected, got, **options):
    with pytest.raises(CheckError) as caught:
        check_numbers([BIG, expected], [BIG, got], ["loss", "params/w"], **options)
    return str(caught.value).splitlines()


def test_report_names_the_worst_first():
    report = check_numbers([BIG, BIG], [BIG, BIG + np.float32(2e-5)], ["a", "b"])
    assert str(report).splitlines() == [
        "2 of 2 outputs agree, 1 of them exactly; largest errors:",
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


def test_zeros_are_measured_against_one():
    nothing = np.zeros(3, np.float32)
    check_numbers([nothing], [nothing + np.float32(1e-7)], ["loss"])
    with pytest.raises(CheckError, match=r"relative error 1\.00e-03"):
        check_numbers([nothing], [nothing + np.float32(1e-6)], ["loss"])


def test_small_leaves_still_count():
    small = np.array([0.1, 0.2], np.float32)
    assert "relative error 5.00e-01" in failure(small, small + np.float32(0.1))[1]


def test_digits_that_rounding_decides_do_not_count():
    noisy = np.array([1e-3, -1e-3, 1e-3], np.float32)
    runs = [[BIG, noisy * np.float32(1.02)], [BIG, noisy * np.float32(1.05)]]
    off = noisy * np.float32(1.15)
    report = check_numbers([BIG, noisy], [BIG, off], ["w", "b"], nudged=lambda: runs)
    worst = max(report.leaves, key=lambda leaf: leaf.error)
    assert str(worst) == "b: relative error 3.75e-02, allowed 5e-02 (perturbing the arguments changes it by 1e-02)"
    assert "relative error" in failure(noisy, -noisy, nudged=lambda: runs)[1]
    assert "relative error" in failure(noisy, off, nudged=lambda: runs, tolerance=1e-4)[1]
    assert "relative error" in failure(BIG, BIG * np.float32(1.1), nudged=lambda: [[BIG, BIG]] * 3)[1]


def test_nudging_moves_floats_by_their_rounding():
    for dtype in ("float32", "bfloat16", "float64"):
        x = np.ones(1000, jnp.dtype(dtype))
        moved = np.abs(perturb(x, 0).astype(np.float64) - 1)
        assert perturb(x, 0).dtype == x.dtype and 0 < moved.max() <= 2 * float(jnp.finfo(dtype).eps)
    ids = np.arange(3)
    coarse = np.abs(perturb(np.ones(50, np.float32), 0, least=2**-7) - 1)
    assert 2**-7 <= coarse.max() <= 2**-6
    assert perturb(ids, 0) is ids and perturb(1.5, 0) == 1.5


def adam_of_a_bias(bias, x):
    """A bias of the keys moves all scores of a query alike, so its gradient is nothing but rounding."""

    def attention(bias):
        scores = jnp.einsum("btd,bsd->bts", x, x + bias)
        return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)

    gradient = jax.grad(attention)(bias)
    return bias - 1e-3 * gradient / (jnp.abs(gradient) + 1e-8)


def test_adam_on_a_gradient_that_is_only_rounding():
    x = np.random.default_rng(0).normal(size=(16, 8, 4)).astype(np.float32)
    sharded = md.parallelize(adam_of_a_bias, "data=8", {"x": "data=S(0)"})
    args = np.zeros(4, np.float32), x
    with pytest.raises(CheckError):
        sharded.check(*args, tolerance=2e-4)
    assert sharded.check(*args).leaves[0].noise > 0


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


def test_non_finite_values_stay_non_finite():
    wild = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    check_numbers([wild], [wild.copy()], ["w"])
    check_numbers([wild], [wild[[0, 0, 0, 3]]], ["w"])  # sums of what overflows, in another order
    assert "2 values are infinite with the opposite sign" in failure(wild, wild[[0, 2, 1, 3]])[1]
    assert "3 values are finite, but not finite in the unsharded step" in failure(wild, np.nan_to_num(wild))[1]
    assert "3 values are not finite, but finite in the unsharded step" in failure(np.ones(4, np.float32), wild)[1]
    assert "1 value is not finite, but finite in the unsharded step" in failure(BIG, np.array([1, -2, np.inf], "f4"))[1]


def test_the_report_says_where_it_says_nothing():
    wild = np.array([np.nan, np.inf, 1.0], np.float32)
    loose = [[wild, np.float32(2) * BIG]]
    report = check_numbers([wild, BIG], [wild, -BIG], ["wild", "w"], nudged=lambda: loose)
    assert str(report).splitlines() == [
        "1 of 2 outputs agree, 1 of them exactly; "
        "1 inconclusive: rounding changes them as much; 1 not finite everywhere; largest errors:",
        "  w: relative error 2.00e+00, allowed 4e+00 (perturbing the arguments changes it by 1e+00)",
        "  wild: relative error 0.00e+00, allowed 2e-04 (2 values are not finite, in the unsharded step too)",
    ]


def test_tolerance_depends_on_the_dtype():
    half = jnp.asarray([1.0, 2.0], jnp.bfloat16)
    check_numbers([half], [half * 1.01], ["w"])
    assert "allowed 2e-02" in failure(half, half * 1.1)[1]


def test_types_are_compared():
    assert "float64[3] instead of float32[3]" in failure(BIG, BIG.astype(np.float64))[1]
    assert "float32[2] instead of float32[3]" in failure(BIG, BIG[:2])[1]
