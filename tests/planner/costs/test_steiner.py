"""The tree of shared moves against brute force."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import complete, layout_graph
from meshdsl.planner.costs.steiner import steiner_tree, tree_steps
from tests.fuzz.generator import SLOW_DEVICES


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
    cost, edges = steiner_tree(costs, costs, 0, wanted)
    assert cost == brute_force(costs, 0, wanted - {0})
    made = {0}
    for source, target in edges:
        assert source in made
        made.add(target)
    assert wanted <= made | {0}
    assert sum(costs[e] for e in edges) == cost


@pytest.mark.parametrize("own", ["x=P y=S(1)", "x=P y=S(2)"])
def test_every_move_leads_to_a_layout_that_is_wanted(own):
    """Ways may cross: what led to the crossing is not made a second time."""
    mesh, shape = Mesh(x=4, y=2, topology=SLOW_DEVICES), (4, 8, 2)
    within = layout_graph(mesh, 3)
    fitting = [i for i in range(len(within.layouts)) if within.fits(i, shape)]
    start = within.index[complete(Layout.parse(own), mesh)]
    for wanted in permutations([i for i in fitting if i != start], 2):
        moves = tree_steps(within, shape, 4, tuple((start, target) for target in wanted))
        used = {within.layouts[target] for target in wanted}
        for move in reversed(moves):
            assert move.after in used
            used.add(move.before)
        assert within.layouts[start] in used
