"""Trees to sets of layouts against ``steiner_tree``; the sets that consumers may need, against all of their choices."""

from itertools import product

import numpy as np
import pytest

from meshdsl.planner.costs.steiner import steiner_tree
from meshdsl.planner.encoding.steiner_variables import contains, reachable_sets, tree_costs
from meshdsl.planner.limits import SearchLimits


def random_costs(rng, size):
    """Distances that obey the triangle inequality; the last layout can only be a leaf."""
    inner = rng.integers(1, 30, (size, size)).astype(float)
    np.fill_diagonal(inner, 0.0)
    inner[:-1, -1] = np.inf
    for k in range(size):
        inner = np.minimum(inner, inner[:, k, None] + inner[k])
    costs = inner.copy()
    costs[:-1, -1] = (inner[:-1, :-1] + rng.integers(1, 30, size - 1)).min(axis=1)
    return costs, inner


@pytest.mark.parametrize("seed", range(5))
def test_the_trees_are_the_cheapest(seed):
    rng = np.random.default_rng(seed)
    costs, inner = random_costs(rng, 6)
    layouts = np.array([0, 1, 3, 4, 5])
    sets = rng.permutation(np.arange(1, 1 << layouts.size))
    found = tree_costs(costs, inner, layouts, sets)
    for mask, row in zip(sets.tolist(), found):
        wanted = [int(layout) for i, layout in enumerate(layouts) if mask >> i & 1]
        assert [steiner_tree(costs, inner, own, wanted)[0] for own in range(6)] == row.tolist()


def test_the_sets_are_those_that_readers_may_ask_for_together():
    reads = [np.array([4, 1, 4]), np.array([1, 7]), np.array([9])]
    layouts, sets = reachable_sets(reads, 100, SearchLimits())
    every = {frozenset(choice) for choice in product(*map(np.ndarray.tolist, reads))}
    assert {frozenset(layouts[[bool(s >> i & 1) for i in range(len(layouts))]].tolist()) for s in sets} == every
    for read in reads:
        member = contains(layouts, sets, read)
        assert all(
            member[i, j] == (read[j] in layouts[[bool(s >> k & 1) for k in range(len(layouts))]])
            for i, s in enumerate(sets)
            for j in range(len(read))
        )


def test_too_many_sets_are_none():
    assert reachable_sets([np.arange(8)] * 3, 91, SearchLimits()) is None
    layouts, sets = reachable_sets([np.arange(8)] * 3, 92, SearchLimits())
    assert len(layouts) == 8 and len(sets) == 8 + 28 + 56
    assert reachable_sets([np.arange(100)], 1000, SearchLimits()) is None
    assert len(reachable_sets([np.arange(7)] * 7, 1000, SearchLimits())[1]) == 127
    assert reachable_sets([np.arange(13)] * 13, 10_000, SearchLimits()) is None
    assert reachable_sets([np.arange(20)] * 6, 1 << 20, SearchLimits()) is None


def test_trees_to_more_layouts_than_a_plan_is_exact_for_cost_no_more_than_its_trees():
    rng = np.random.default_rng(0)
    costs, inner = random_costs(rng, 8)
    every = tree_costs(costs, inner, np.arange(8), np.array([255]))[0]
    found = [steiner_tree(costs, inner, own, range(8))[0] for own in range(8)]
    assert (every <= found).all() and (every > 0).all()
