"""Ragged matmuls, proved."""

import numpy as np
import pytest
from jax import lax

from tests.rules.data import floats
from tests.rules.prover import prove, rows_of, sample
from tests.rules.samples import drawn

SIZES = np.array([2, 1, 3], "int32")
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
BATCHED = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))
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
def test_rule(case):
    assert prove(case) == []


def test_batches_are_split_with_their_group_sizes():
    """By hand, since jax 0.10.2 cannot ``vmap`` a product with batch dims, as proofs do."""
    product = sample(
        "ragged_dot_general",
        lambda x, y, n: lax.ragged_dot_general(x, y, n, BATCHED),
        floats(6, 6, 12),
        floats(6, 3, 12, 24),
        np.tile(SIZES, (6, 1)),
    )
    op, _ = drawn(product, np.random.default_rng(0))
    found = {" ".join(map(str, (*row.inputs, *row.outputs))) for row in rows_of(op)}
    assert found >= {"S(0) S(0) S(0) S(0)", "S(2) S(2) B P", "B S(3) B S(2)"}
    assert not any(row.startswith("S(1)") or " S(1)" in row for row in found)
