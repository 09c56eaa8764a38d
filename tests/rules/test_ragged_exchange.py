"""Ragged exchanges, proved: in rounds, as simulated devices run them, whichever collective is planned."""

import numpy as np
import pytest

from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, S
from meshdsl.primitives.ragged_exchange import ragged_exchange, ragged_exchange_p
from tests.rules.data import floats
from tests.rules.prover import prove, rows_of, sample
from tests.rules.samples import drawn

SIZES = np.array([[1, 0, 2, 1, 0, 2], [6, 0, 0, 0, 0, 0], [0] * 6, [1] * 6, [0, 0, 0, 0, 3, 0], [0, 1, 0, 2, 0, 3]])
CASES = [
    sample("ragged_exchange", lambda x, n: ragged_exchange(x, n, 12), floats(6, 6, 6), SIZES, fixed=(1,)),
    sample("ragged_exchange", lambda x, n: ragged_exchange(x, n, 6), floats(6, 12, 6), SIZES.T, fixed=(1,)),
    sample(
        "ragged_exchange",
        lambda x, n: ragged_exchange_p.bind(x, n, length=12, ragged=True),
        floats(6, 6, 6, 6),
        np.stack([SIZES] * 6).astype("int32"),
        fixed=(1,),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case):
    assert prove(case) == []


@pytest.mark.parametrize("number, pattern, port", [(0, "rounds", 2), (1, "rounds", 0), (2, "ragged", 0)])
def test_balanced_routing_fills_the_smaller_side_and_rounds_have_slots_for_the_larger(number, pattern, port):
    op, _ = drawn(CASES[number], np.random.default_rng(0))
    ranks = len(op.inputs[0].shape) - 3
    (row,) = [row for row in rows_of(op) if row.collectives]
    assert (row.inputs, row.outputs) == ((S(ranks), B), (S(ranks),))
    assert row.collectives == (Exchange(pattern, port, ranks),)
