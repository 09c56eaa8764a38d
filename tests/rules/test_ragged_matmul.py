"""Ragged matmuls, proved."""

import numpy as np
import pytest
from jax import lax

from tests.rules.data import floats
from tests.rules.prover import prove, sample

SIZES = np.array([2, 1, 3], "int32")
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
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
