"""Many variables take their best states at once, the others staying as they are: bucket elimination, compiled.

Free variables are minimised away in the order of a plan (see ``plans``), each into a table over its scope, and read
back in reverse order. A table is kept with the next variable to go along its last dim, so that all additions run
along memory.
"""

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.compiled import compiled
from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.kernels import Flat
from meshdsl.planner.strategies.plans import Plan

_Bools = NDArray[np.bool_]


@compiled
def solve(flat: Flat, unary: Costs, tables: Costs, plan: Plan, states: Ints) -> None:
    """Give the free variables of a plan their best states."""
    own = _conditioned(flat, unary, tables, plan, states)
    made = np.empty(plan.out[-1])
    head, following = np.full(plan.order.size, -1), np.full(plan.order.size, -1)  # tables by who goes next
    for r in range(plan.order.size):
        v, scope = plan.order[r], plan.scope[plan.begin[r] : plan.begin[r + 1]]
        if scope.size:
            parts = _parts(flat, plan, r, head, following)
            mine, sizes = own[flat.start[v] : flat.start[v + 1]], flat.start[scope + 1] - flat.start[scope]
            _minimise(mine, tables, made, parts, sizes, made[plan.out[r] : plan.out[r + 1]])
            after = plan.rank[scope[-1]]
            following[r], head[after] = head[after], r
    for r in range(plan.order.size - 1, -1, -1):
        v, scope = plan.order[r], plan.scope[plan.begin[r] : plan.begin[r + 1]]
        is_made, at, strides = _parts(flat, plan, r, head, following)
        mine = own[flat.start[v] : flat.start[v + 1]]
        for f in range(at.size):
            _add(mine, made if is_made[f] else tables, at[f] + (strides[f] * states[scope]).sum())
        states[v] = np.argmin(mine)


@compiled
def _conditioned(flat: Flat, unary: Costs, tables: Costs, plan: Plan, states: Ints) -> Costs:
    """Costs of the states of free variables with those of the others given."""
    own = unary.copy()
    for v in plan.order:
        mine = own[flat.start[v] : flat.start[v + 1]]
        for h in range(flat.first[v], flat.first[v + 1]):
            w = flat.to[h]
            if plan.rank[w] < 0:
                _add(mine, tables, flat.table[flat.back[h]] + states[w] * mine.size)
    return own


@compiled
def _parts(flat: Flat, plan: Plan, r: int, head: Ints, following: Ints) -> tuple[_Bools, Ints, Ints]:
    """The tables that mention a variable when it goes.

    Per table: whether it is one of those made, where it begins, and [table, scope] how far apart two states of each
    variable of the scope are; those of the variable itself are next to each other.
    """
    v, scope = plan.order[r], plan.scope[plan.begin[r] : plan.begin[r + 1]]
    near = flat.to[flat.first[v] : flat.first[v + 1]]
    halves = flat.first[v] + np.flatnonzero(plan.rank[near] > r)
    count, u = halves.size, head[r]
    while u >= 0:
        count, u = count + 1, following[u]
    at, strides = np.empty(count, dtype=np.int64), np.zeros((count, scope.size), dtype=np.int64)
    width = flat.start[v + 1] - flat.start[v]
    for f in range(halves.size):
        at[f] = flat.table[flat.back[halves[f]]]
        strides[f, _index(scope, flat.to[halves[f]])] = width
    f, u = halves.size, head[r]
    while u >= 0:
        at[f], stride = plan.out[u], width
        for k in range(plan.begin[u + 1] - 2, plan.begin[u] - 1, -1):
            w = plan.scope[k]
            strides[f, _index(scope, w)] = stride
            stride *= flat.start[w + 1] - flat.start[w]
        f, u = f + 1, following[u]
    return np.arange(count) >= halves.size, at, strides


@compiled
def _index(scope: Ints, v: int) -> int:
    for k in range(scope.size):
        if scope[k] == v:
            return k
    return -1


@compiled
def _minimise(
    own: Costs, tables: Costs, made: Costs, parts: tuple[_Bools, Ints, Ints], sizes: Ints, least: Costs
) -> None:
    """The least of a sum of tables over the states of one variable, for all states of its scope."""
    is_made, at, strides = parts
    last, at = sizes.size - 1, at.copy()
    fast, slow = np.flatnonzero(strides[:, last] > 0), np.flatnonzero(strides[:, last] == 0)
    counter, base, row = np.zeros(sizes.size, dtype=np.int64), np.empty(own.size), np.empty(own.size)
    for block in range(0, least.size, sizes[last]):
        base[:] = own
        for f in slow:
            _add(base, made if is_made[f] else tables, at[f])
        for p in range(sizes[last]):
            row[:] = base
            for f in fast[:-1]:
                _add(row, made if is_made[f] else tables, at[f] + p * strides[f, last])
            f = fast[-1]
            least[block + p] = _least(row, made if is_made[f] else tables, at[f] + p * strides[f, last])
        _advance(counter, sizes, at, strides)


@compiled
def _advance(counter: Ints, sizes: Ints, at: Ints, strides: Ints) -> None:
    """The next states of the scope but for its last variable, the last of them first."""
    for k in range(sizes.size - 2, -1, -1):
        counter[k] += 1
        at += strides[:, k]
        if counter[k] < sizes[k]:
            return
        at -= strides[:, k] * sizes[k]
        counter[k] = 0


@compiled
def _add(row: Costs, table: Costs, at: int) -> None:
    for i in range(row.size):
        row[i] += table[at + i]


@compiled
def _least(row: Costs, table: Costs, at: int) -> float:
    least = np.inf
    for i in range(row.size):
        least = min(least, row[i] + table[at + i])
    return least
