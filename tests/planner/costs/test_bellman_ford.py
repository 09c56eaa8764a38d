"""Cheapest ways between layouts: the compiled passes against all pairs by the textbook (Floyd 1962)."""

import numpy as np
import pytest

from meshdsl.planner.costs.kernels import bellman_ford


@pytest.mark.parametrize("seed", range(8))
def test_passes_over_moves_find_the_cheapest_ways(seed):
    rng = np.random.default_rng(seed)
    ends, moves = 12, 30
    source, target = rng.integers(0, ends, (2, moves))
    price = rng.integers(0, 50, moves).astype(float)
    costs = np.full((ends, ends), np.inf)
    np.fill_diagonal(costs, 0.0)
    expected = costs.copy()
    np.minimum.at(expected, (source, target), price)
    for middle in range(ends):
        expected = np.minimum(expected, expected[:, middle, None] + expected[middle])
    bellman_ford(source, target, price, costs)
    assert np.array_equal(costs.T, expected)


def test_without_moves_nothing_gets_cheaper():
    none = np.zeros(0, dtype=np.int64)
    costs = np.array([[0.0, np.inf], [np.inf, 0.0]])
    bellman_ford(none, none, np.zeros(0), costs)
    assert costs.tolist() == [[0.0, np.inf], [np.inf, 0.0]]
