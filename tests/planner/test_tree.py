"""The tree of shared moves against brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.planner.hub import make_hub
from meshdsl.planner.tree import tree


def closure(seed, n):
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 30, (n, n)).astype(float)
    np.fill_diagonal(costs, 0)
    for via in range(n):
        costs = np.minimum(costs, costs[:, via, None] + costs[None, via])
    return costs


def brute_force(costs, own, wanted):
    """The cheapest arborescence from ``own`` over any superset of ``wanted``: every node picks a parent."""
    n, best = len(costs), np.inf
    others = [v for v in range(n) if v != own]
    for parents in product(range(-1, n), repeat=len(others)):
        parent = dict(zip(others, parents))
        if any(parent[w] == -1 for w in wanted if w != own) or not all(rooted(parent, v, own) for v in others):
            continue
        best = min(best, sum(costs[p, v] for v, p in parent.items() if p != -1))
    return best


def rooted(parent, v, own):
    seen = set()
    while v != own:
        if v in seen or (seen and parent[v] == -1):
            return False
        if parent[v] == -1:
            return True
        seen.add(v)
        v = parent[v]
    return True


@given(st.integers(0, 10**6), st.sets(st.integers(0, 4), max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_tree_is_the_cheapest(seed, wanted):
    costs = closure(seed, 5)
    cost, edges = tree(costs, 0, wanted)
    assert cost == brute_force(costs, 0, wanted - {0})
    made = {0}
    for source, target in edges:
        assert source in made
        made.add(target)
    assert wanted <= made | {0}
    assert sum(costs[e] for e in edges) == cost


@given(st.integers(0, 10**6), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_hub_states_bound_the_tree(seed, readers):
    """With parts that sum to at most one over all readers but any one, no tree is cheaper than the best hub."""
    costs = closure(seed, 5)
    rng = np.random.default_rng(seed)
    layouts = tuple(np.unique(rng.integers(0, 5, 3)) for _ in range(readers))
    parts = (1.0, 1.0) if readers == 2 else (1 / (readers - 1),) * readers
    hub = make_hub(costs, np.arange(5), layouts, parts)
    for own in range(5):
        for choice in product(*(range(len(r)) for r in layouts)):
            of_hub = hub.paid + sum(table[:, c] for table, c in zip(hub.reads, choice))
            bound = of_hub[hub.own == own].min()
            exact, _ = tree(costs, own, {int(r[c]) for r, c in zip(layouts, choice)})
            assert bound <= exact + 1e-9
            if readers == 2:
                assert bound == pytest.approx(exact)
