"""Scans, sorts and choices along one dim, transforms and decompositions of matrices, proved."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshdsl.rules import rows_of
from tests.rules.data import complexes, floats, ints, strange, unit
from tests.rules.prover import Sample, drawn, prove, sample
from tests.sweeps import swept

CASES = []


def case(*args, **options):
    CASES.append(sample(*args, **options))


for name in "cumsum cumprod cummax cummin cumlogsumexp".split():
    case(name, lambda x, name=name: getattr(lax, name)(x, axis=1), unit(6, 12))
case("cumsum", lambda x: lax.cumsum(x, axis=0, reverse=True), ints(6, 6))
case("cummax", lambda x: lax.cummax(x, axis=0, reverse=True), strange(12))
case("cumlogsumexp", lambda x: lax.cumlogsumexp(x, axis=0), strange(12))
case("sort", lambda x: lax.sort(x, dimension=0), floats(6, 12))
case("sort", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), floats(6, 6), ints(6, 6))
case("sort", lambda x: jnp.argsort(x, axis=1), floats(6, 6))
case("sort", lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), ints(12, low=0, high=3), np.arange(12.0))
case("sort", lambda x: lax.sort(x, dimension=1), strange(36).reshape(3, 12))
case("top_k", lambda x: lax.top_k(x, 2), np.arange(72.0, dtype="float32").reshape(6, 12) * 5 % 72)
case("top_k", lambda x: lax.top_k(x, 3), ints(4, 12, low=0, high=4))
case("top_k", lambda x: lax.top_k(x, 2), strange(72).reshape(12, 6))
case("approx_top_k", lambda x: lax.approx_max_k(x, 6), np.arange(36.0, dtype="float32").reshape(6, 6) * 5 % 36)

case("fft", lambda x: lax.fft(x, "FFT", (6,)), complexes(6, 6))
case("fft", lambda x: lax.fft(x, "RFFT", (6,)), floats(12, 6))
case("fft", lambda x: lax.fft(x, "IRFFT", (6,)), complexes(6, 4))

MATRICES = unit(6, 3, 3) + 3 * np.eye(3, dtype="float32")
SYMMETRIC = MATRICES + MATRICES.transpose(0, 2, 1)


def solve(left):
    return lambda a, b: lax.linalg.triangular_solve(a, b, left_side=left, lower=True)


case("triangular_solve", solve(True), MATRICES[0], floats(3, 6), fixed=(0,))
case("triangular_solve", solve(False), MATRICES[0], floats(6, 3), fixed=(0,))
case("cholesky", lambda a: lax.linalg.cholesky(a, symmetrize_input=False), SYMMETRIC, fixed=(0,))
for name, function in {
    "eigh": jnp.linalg.eigh,
    "lu": lax.linalg.lu,
    "qr": jnp.linalg.qr,
    "geqrf": jnp.linalg.qr,
    "householder_product": jnp.linalg.qr,
}.items():
    case(name, function, SYMMETRIC, fixed=(0,))
for left, shape in ((True, (3, 6)), (False, (6, 3))):
    reflect = partial(lax.linalg.ormqr, left=left)
    case("ormqr", reflect, MATRICES[0], unit(3), floats(*shape), fixed=(0, 1))
case("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 3), ints(6, 3, low=0, high=3))
case("tridiagonal_solve", lax.linalg.tridiagonal_solve, unit(4), unit(4) + 3, unit(4), floats(4, 6), fixed=(0, 1, 2))


def test_where_equal_keys_may_change_places_the_dim_is_not_split():
    args = (np.zeros(6, "float32"), np.zeros(6, "float32"))
    unstable = Sample("sort", lambda x, y: lax.sort((x, y), num_keys=1, is_stable=False), args)
    assert [str(row) for row in rows_of(drawn(unstable, np.random.default_rng(0))[0])] == ["B, B -> B, B"]


def traces(item):
    """JAX versions differ in which primitives a function becomes."""
    return item.name in str(jax.make_jaxpr(item.function)(*item.args))


@swept("case", [item for item in CASES if traces(item)], ids=str, kind=lambda case: case.name)
def test_rule(case):
    assert prove(case) == []


SOLVES = {
    "B, S(2) -> S(2)": ("triangular_solve", solve(True), MATRICES, floats(6, 3, 4)),
    "B, S(1) -> S(1)": ("triangular_solve", solve(False), MATRICES, floats(6, 4, 3)),
    "B, B, B, S(2) -> S(2)": (
        "tridiagonal_solve",
        lax.linalg.tridiagonal_solve,
        unit(6, 4),
        unit(6, 4) + 3,
        unit(6, 4),
        floats(6, 4, 2),
    ),
}


@pytest.mark.parametrize("columns", SOLVES)
def test_batched_solve(columns):
    """Only the table: JAX does not notice in time that other blocks have batches of two lengths."""
    name, function, *args = SOLVES[columns]
    op, _ = drawn(Sample(name, function, tuple(args)), np.random.default_rng(0))
    whole = ", ".join("B" for _ in args)
    batch, linear = whole.replace("B", "S(0)"), whole[:-1] + "P"
    expected = [f"{whole} -> B", f"{batch} -> S(0)", columns, f"{linear} -> P"]
    assert [str(row) for row in rows_of(op)] == expected


def test_svd():
    """Only the table: LAPACK does not return from infinite operands, which other placements give it."""
    op = drawn(Sample("svd", jnp.linalg.svd, (MATRICES,)), np.random.default_rng(0))[0]
    assert [str(row) for row in rows_of(op)] == ["B -> B, B, B", "S(0) -> S(0), S(0), S(0)"]
