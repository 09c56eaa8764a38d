"""Elimination and the pairwise bound against exhaustive search on random networks."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.planner.mrf import trws as messages
from meshdsl.planner.mrf.elimination import eliminate, lower_bound
from meshdsl.planner.mrf.network import Network


@st.composite
def networks(draw):
    domains = draw(st.lists(st.integers(1, 3), min_size=2, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pairs = draw(st.sets(st.tuples(*[st.integers(0, len(domains) - 1)] * 2), max_size=10))
    unary = [rng.integers(0, 20, d).astype(float) for d in domains]
    tables = {(a, b): rng.integers(0, 20, (domains[a], domains[b])).astype(float) for a, b in pairs if a != b}
    return domains, unary, tables


def best_of(domains, unary, tables):
    def cost(state):
        return sum(u[s] for u, s in zip(unary, state)) + sum(t[state[a], state[b]] for (a, b), t in tables.items())

    return min(cost(state) for state in product(*map(range, domains))), cost


def tables_of(unary, tables):
    yield from (((v,), table) for v, table in enumerate(unary))
    yield from (((a, b), t) if a < b else ((b, a), t.T) for (a, b), t in tables.items())


def network_of(unary, tables):
    network = Network()
    for table in unary:
        network.new_variable(table)
    for (a, b), table in tables.items():
        network.add(a, b, table)
    return network


@given(networks())
@settings(max_examples=80, deadline=None)
def test_elimination_is_exact(problem):
    domains, unary, tables = problem
    best, cost = best_of(domains, unary, tables)
    answer = eliminate(domains, tables_of(unary, tables), [0] * len(domains), cap=10**6)
    assert answer.exact
    assert answer.cost == best == cost(tuple(answer.states))


@given(networks())
@settings(max_examples=60, deadline=None)
def test_with_a_small_cap_it_is_never_worse_than_the_incumbent(problem):
    domains, unary, tables = problem
    best, cost = best_of(domains, unary, tables)
    answer = eliminate(domains, tables_of(unary, tables), [0] * len(domains), cap=3)
    assert answer.cost == cost(tuple(answer.states))
    assert best <= answer.cost <= cost((0,) * len(domains))


@given(networks(), st.integers(1, 30))
@settings(max_examples=80, deadline=None)
def test_elimination_in_groups_bounds_the_minimum(problem, cap):
    domains, unary, tables = problem
    best, _ = best_of(domains, unary, tables)
    assert lower_bound(domains, tables_of(unary, tables), cap) <= best
    assert lower_bound(domains, tables_of(unary, tables), 10**6) == best


@given(networks(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_the_bound_rises_and_never_passes_the_minimum(problem, largest):
    domains, unary, tables = problem
    network = network_of(unary, tables)
    best, _ = best_of(domains, unary, tables)
    before = messages.sum_of_minima(network)
    network.reduce(10**largest)
    passing = messages.TRWS(network)
    passing.run(5)
    passing.reparametrize()
    assert before - 1e-9 <= messages.sum_of_minima(network) <= best + 1e-9
    messages.prune_states(network, best)
    network.reduce(10**6)
    assert messages.sum_of_minima(network) <= best + 1e-9


@given(networks(), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_what_the_messages_point_to_is_a_state_and_reduction_loses_none(problem, largest):
    domains, unary, tables = problem
    best, cost = best_of(domains, unary, tables)
    network = network_of(unary, tables)
    network.reduce(10**largest)
    messages.prune_states(network, best)
    passing = messages.TRWS(network)
    passing.run(2)
    states = tuple(passing.states[v] for v in range(len(domains)))
    assert cost(states) == pytest.approx(passing.cost + network.constant)
    assert cost(states) >= best
    if not network.unary:
        assert cost(states) == best


@given(networks(), st.integers(0, 10))
@settings(max_examples=80, deadline=None)
def test_states_that_go_beside_messages_are_in_no_solution_of_that_cost(problem, over):
    domains, unary, tables = problem
    best, cost = best_of(domains, unary, tables)
    network = network_of(unary, tables)
    passing = messages.TRWS(network)
    passing.run(3)
    passing = passing.pruned(best + over, 0.9)
    left = [network.labels.get(v, np.arange(size)).tolist() for v, size in enumerate(domains)]
    for state in product(*map(range, domains)):
        if cost(state) <= best + over:
            assert all(s in kept for s, kept in zip(state, left))
    before = passing.lower
    passing.run(1)
    assert max(before, passing.lower) <= best + 1e-9
    sizes, parts = network.listed()
    assert eliminate(sizes, parts, [0] * len(sizes), 10**6).cost == best


def test_what_messages_have_said_is_kept_when_states_go():
    """A long chain with a choice that is never good: what is left is as far as it was."""
    rng = np.random.default_rng(0)
    unary = [np.array([0.0, 1.0, 1000.0]) for _ in range(30)]
    network = network_of(unary, {(i, i + 1): rng.random((3, 3)) for i in range(29)})
    passing = messages.TRWS(network)
    passing.run(5)
    lower = passing.lower
    pruned = passing.pruned(passing.cost, 0.9)
    assert all(table.size < 3 for table in network.unary.values())
    pruned.run(1)
    assert pruned.lower >= lower - 1e-9


def test_a_tree_is_solved_by_reduction_alone():
    rng = np.random.default_rng(0)
    unary = [rng.random(4) for _ in range(5)]
    tables = {(i, i + 1): rng.random((4, 4)) for i in range(4)}
    best, _ = best_of([4] * 5, unary, tables)
    network = network_of(unary, tables)
    network.reduce(1000)
    assert not network.unary
    assert messages.sum_of_minima(network) == pytest.approx(best)
