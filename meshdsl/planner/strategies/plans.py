"""Which variables can take their best states at once, and in which order they are minimised away: compiled.

Of some candidates, the one whose table over itself and its neighbours has the fewest entries goes first; its
neighbours are each other's from then on. Where no table is small enough, a candidate is held at its state instead,
which cuts the graph. What is left free has cycles, but is narrow (``buckets`` solves it); forests are the narrowest.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.compiled import compiled
from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.kernels import Flat

_Bools = NDArray[np.bool_]


class Plan(NamedTuple):
    """In which order variables are minimised away.

    Args:
      order: the variables. rank: by variable, its place in the order; -1 if it is not free.
      begin: by place, and one past the last, where its scope begins in ``scope``.
      scope: variables, the last to go first, so that the next to go comes last.
      out: by place, and one past the last, where the table over its scope begins.
    """

    order: Ints
    rank: Ints
    begin: Ints
    scope: Ints
    out: Ints


@compiled
def planned(flat: Flat, candidates: Ints, noise: Costs, limit: float) -> Plan:
    """A plan for candidates.

    Args:
      noise: per candidate, how much sooner it is held than others.
      limit: binary logarithm of the entries that a table may have.
    """
    near, size = _graph(flat, candidates)
    weight = size + _weights(near, size)
    live, free = np.ones(candidates.size, dtype=np.bool_), np.zeros(candidates.size, dtype=np.bool_)
    order = np.empty(candidates.size, dtype=np.int64)
    made = 0
    for _ in range(candidates.size):
        v = _lightest(weight, live)
        if weight[v] > limit:
            v = _held(near, v, noise)
            _drop(near, size, weight, v)
        else:
            order[made], free[v] = v, True
            made += 1
            _connect(near, size, weight, v)
        live[v] = False
    return _scopes(flat, candidates, order[:made], near)


@compiled
def _graph(flat: Flat, candidates: Ints) -> tuple[_Bools, Costs]:
    """Who is whose neighbour, and the logarithms of the numbers of states."""
    at = np.full(flat.start.size - 1, -1)
    for i in range(candidates.size):
        at[candidates[i]] = i
    near, size = np.zeros((candidates.size, candidates.size), dtype=np.bool_), np.empty(candidates.size)
    for i in range(candidates.size):
        v = candidates[i]
        size[i] = np.log2(flat.start[v + 1] - flat.start[v])
        for h in range(flat.first[v], flat.first[v + 1]):
            if at[flat.to[h]] >= 0:
                near[i, at[flat.to[h]]] = True
    return near, size


@compiled
def _weights(near: _Bools, size: Costs) -> Costs:
    weight = np.zeros(size.size)
    for i in range(size.size):
        for j in range(size.size):
            if near[i, j]:
                weight[i] += size[j]
    return weight


@compiled
def _lightest(weight: Costs, live: _Bools) -> int:
    found = -1
    for i in range(weight.size):
        if live[i] and (found < 0 or weight[i] < weight[found]):
            found = i
    return found


@compiled
def _held(near: _Bools, v: int, noise: Costs) -> int:
    """Which of a variable and its neighbours to hold: one with many neighbours, or much noise."""
    found, most = v, near[v].sum() + noise[v]
    for i in range(noise.size):
        if near[v, i]:
            many = near[i].sum() + noise[i]
            if many > most:
                found, most = i, many
    return found


@compiled
def _drop(near: _Bools, size: Costs, weight: Costs, v: int) -> None:
    """Take a variable out of the graph, and out of the scopes of those that have gone."""
    for i in range(size.size):
        if near[v, i]:
            weight[i] -= size[v]
        near[i, v] = near[v, i] = False


@compiled
def _connect(near: _Bools, size: Costs, weight: Costs, v: int) -> None:
    """Make the neighbours of a variable each other's; the variable keeps its own as its scope."""
    scope = np.flatnonzero(near[v])
    for i in scope:
        near[i, v] = False
        weight[i] -= size[v]
        for j in scope:
            if i != j and not near[i, j]:
                near[i, j] = True
                weight[i] += size[j]


@compiled
def _scopes(flat: Flat, candidates: Ints, order: Ints, near: _Bools) -> Plan:
    rank = np.full(flat.start.size - 1, -1)
    rank[candidates[order]] = np.arange(order.size)
    begin, out = np.zeros(order.size + 1, dtype=np.int64), np.zeros(order.size + 1, dtype=np.int64)
    for r in range(order.size):
        begin[r + 1] = begin[r] + near[order[r]].sum()
    scope = np.empty(begin[-1], dtype=np.int64)
    for r in range(order.size):
        ranks = -np.sort(-rank[candidates[np.flatnonzero(near[order[r]])]])
        entries = 1
        for k in range(ranks.size):
            v = candidates[order[ranks[k]]]
            scope[begin[r] + k] = v
            entries *= flat.start[v + 1] - flat.start[v]
        out[r + 1] = out[r] + entries
    return Plan(candidates[order], rank, begin, scope, out)
