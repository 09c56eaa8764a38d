"""Ragged matmuls, proved."""

from functools import partial

import numpy as np
import pytest
from jax import lax

from meshdsl.layouts import B, Layout
from meshdsl.lowering.local.registry import PROGRAMS, Local, run_local
from tests.rules.data import floats
from tests.rules.prover import prove, rows_of, sample
from tests.rules.samples import drawn

SIZES = np.array([2, 1, 3], "int32")
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def product(left, right, rows, groups):
    return lax.RaggedDotDimensionNumbers(((left, right), ((0,), (0,))), rows, groups)


CASES = [
    sample("ragged_dot_general", lax.ragged_dot, floats(6, 6), floats(3, 6, 12), SIZES, fixed=(2,)),
    sample(
        "ragged_dot_general",
        lambda x, y, n: lax.ragged_dot_general(x, y, n, CONTRACTED),
        floats(6, 6),
        floats(6, 12),
        SIZES,
        fixed=(2,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case, monkeypatch):
    """Without the local program, which runs these unchanged: jax 0.10.2 cannot ``vmap`` them twice, as proofs do."""
    monkeypatch.delitem(PROGRAMS, "ragged_dot_general")
    assert prove(case) == []


BATCHED = {
    "rows": sample(
        "ragged_dot_general",
        partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=product((2,), (2,), (1,), (1,))),
        floats(6, 6, 12),
        floats(6, 3, 12, 24),
        np.array([[2, 1, 3], [0, 6, 0]] * 3, "int32"),
    ),
    "contracted": sample(
        "ragged_dot_general",
        partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=product((1,), (1,), (1,), ())),
        floats(6, 6, 12),
        floats(6, 6, 24),
        np.array([[2, 1, 3], [0, 6, 0]] * 3, "int32"),
    ),
}


def test_batches_are_split_with_their_group_sizes():
    op, _ = drawn(BATCHED["rows"], np.random.default_rng(0))
    found = {" ".join(map(str, (*row.inputs, *row.outputs))) for row in rows_of(op)}
    assert found >= {"S(0) S(0) S(0) S(0)", "S(2) S(2) B P", "B S(3) B S(2)"}
    assert not any(row.startswith("S(1)") or " S(1)" in row for row in found)


@pytest.mark.parametrize("name", BATCHED)
def test_a_device_multiplies_one_batch_after_the_other(name):
    case = BATCHED[name]
    op, _ = drawn(case, np.random.default_rng(0))
    whole = Layout(x=B)
    (found,) = run_local(op, case.args, Local({"x": 2}, (whole,) * 3, (whole,)))
    np.testing.assert_array_equal(found, case.function(*case.args))
