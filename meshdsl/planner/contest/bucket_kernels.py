"""Bucket elimination of many variables at once (Dechter 1999), compiled: the order, the tables, and memory allowances.

    plan_elimination   which candidates become free variables, and in which order they are minimised away
    solve_buckets      their best states, given those of all other variables
    *_allowances       what each free variable may use at most, so that they fit whatever they choose

Greedy order: the candidate whose table over itself and its neighbours has the fewest entries is eliminated first; its
neighbours become each other's. Where no table is small enough, a candidate is fixed at its state instead, which cuts
the graph. The free variables may have cycles, but are narrow; forests are the narrowest.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.contest.kernels import UsageItems
from meshdsl.planner.mrf.kernels import FlatNetwork
from meshdsl.util.arrays import Costs, Ints
from meshdsl.util.jit import njit_cached

# ---- Order -----------------------------------------------------------------------------------------------------------


_Bools = NDArray[np.bool_]


class EliminationOrder(NamedTuple):
    """The order in which free variables are minimised away.

    Args:
      order: [free], the variables.
      rank: [variables], the position in the order; -1 for variables that are not free.
      begin: [free + 1], where the scope of each, its neighbours when it is eliminated, begins in ``scope``.
      scope: variables, the last in the order first, so that the next to be eliminated comes last.
      out: [free + 1], where the table over its scope begins.
    """

    order: Ints
    rank: Ints
    begin: Ints
    scope: Ints
    out: Ints


@njit_cached
def plan_elimination(flat: FlatNetwork, candidates: Ints, noise: Costs, limit: float) -> EliminationOrder:
    """Returns an elimination order of as many candidates as narrow tables allow.

    Args:
      noise: [candidates], in neighbours: how much sooner each is fixed than others.
      limit: binary logarithm of the entries of the largest table.
    """
    near, size = _adjacency(flat, candidates)
    weight = size + _neighbour_sizes(near, size)
    live, free = np.ones(candidates.size, dtype=np.bool_), np.zeros(candidates.size, dtype=np.bool_)
    order = np.empty(candidates.size, dtype=np.int64)
    produced = 0
    for _ in range(candidates.size):
        v = _lightest(weight, live)
        if weight[v] > limit:
            v = _variable_to_fix(near, v, noise)
            _remove(near, size, weight, v)
        else:
            order[produced], free[v] = v, True
            produced += 1
            _connect(near, size, weight, v)
        live[v] = False
    return _scopes(flat, candidates, order[:produced], near)


@njit_cached
def _adjacency(flat: FlatNetwork, candidates: Ints) -> tuple[_Bools, Costs]:
    """Returns the adjacency matrix of the candidates, and the binary logarithms of their numbers of states."""
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


@njit_cached
def _neighbour_sizes(near: _Bools, size: Costs) -> Costs:
    weight = np.zeros(size.size)
    for i in range(size.size):
        for j in range(size.size):
            if near[i, j]:
                weight[i] += size[j]
    return weight


@njit_cached
def _lightest(weight: Costs, live: _Bools) -> int:
    found = -1
    for i in range(weight.size):
        if live[i] and (found < 0 or weight[i] < weight[found]):
            found = i
    return found


@njit_cached
def _variable_to_fix(near: _Bools, v: int, noise: Costs) -> int:
    """Returns which of a variable and its neighbours to fix: one with many neighbours, or much noise."""
    found, most = v, near[v].sum() + noise[v]
    for i in range(noise.size):
        if near[v, i]:
            many = near[i].sum() + noise[i]
            if many > most:
                found, most = i, many
    return found


@njit_cached
def _remove(near: _Bools, size: Costs, weight: Costs, v: int) -> None:
    """Removes a variable from the graph, and from the scopes of eliminated ones."""
    for i in range(size.size):
        if near[v, i]:
            weight[i] -= size[v]
        near[i, v] = near[v, i] = False


@njit_cached
def _connect(near: _Bools, size: Costs, weight: Costs, v: int) -> None:
    """Connects the neighbours of an eliminated variable to each other; its own row stays, as its scope."""
    scope = np.flatnonzero(near[v])
    for i in scope:
        near[i, v] = False
        weight[i] -= size[v]
        for j in scope:
            if i != j and not near[i, j]:
                near[i, j] = True
                weight[i] += size[j]


@njit_cached
def _scopes(flat: FlatNetwork, candidates: Ints, order: Ints, near: _Bools) -> EliminationOrder:
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
    return EliminationOrder(candidates[order], rank, begin, scope, out)


# ---- Buckets ---------------------------------------------------------------------------------------------------------
# A table is stored with the next variable to be eliminated along its last dim, so that additions run along memory.


@njit_cached
def solve_buckets(flat: FlatNetwork, unary: Costs, tables: Costs, plan: EliminationOrder, states: Ints) -> None:
    """Writes the best states of the free variables, given those of all others, into ``states``."""
    own = _condition(flat, unary, tables, plan, states)
    produced = np.empty(plan.out[-1])
    head, following = np.full(plan.order.size, -1), np.full(plan.order.size, -1)  # tables by who goes next
    for r in range(plan.order.size):
        v, scope = plan.order[r], plan.scope[plan.begin[r] : plan.begin[r + 1]]
        if scope.size:
            parts = _bucket(flat, plan, r, head, following)
            mine, sizes = own[flat.start[v] : flat.start[v + 1]], flat.start[scope + 1] - flat.start[scope]
            _minimize(mine, tables, produced, parts, sizes, produced[plan.out[r] : plan.out[r + 1]])
            after = plan.rank[scope[-1]]
            following[r], head[after] = head[after], r
    for r in range(plan.order.size - 1, -1, -1):
        v, scope = plan.order[r], plan.scope[plan.begin[r] : plan.begin[r + 1]]
        is_produced, at, strides = _bucket(flat, plan, r, head, following)
        mine = own[flat.start[v] : flat.start[v + 1]]
        for f in range(at.size):
            _add(mine, produced if is_produced[f] else tables, at[f] + (strides[f] * states[scope]).sum())
        states[v] = np.argmin(mine)


@njit_cached
def _condition(flat: FlatNetwork, unary: Costs, tables: Costs, plan: EliminationOrder, states: Ints) -> Costs:
    """Returns the unary costs of free variables, given the states of their other neighbours."""
    own = unary.copy()
    for v in plan.order:
        mine = own[flat.start[v] : flat.start[v + 1]]
        for h in range(flat.first[v], flat.first[v + 1]):
            w = flat.to[h]
            if plan.rank[w] < 0:
                _add(mine, tables, flat.table[flat.back[h]] + states[w] * mine.size)
    return own


@njit_cached
def _bucket(
    flat: FlatNetwork, plan: EliminationOrder, r: int, head: Ints, following: Ints
) -> tuple[_Bools, Ints, Ints]:
    """Returns the bucket of a variable: the tables that mention it when it is eliminated.

    Returns:
      Per table: whether elimination produced it; where it begins; and [tables, scope] the stride of each variable
      of the scope. The stride of the variable itself is 1.
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


@njit_cached
def _index(scope: Ints, v: int) -> int:
    for k in range(scope.size):
        if scope[k] == v:
            return k
    return -1


@njit_cached
def _minimize(
    own: Costs, tables: Costs, produced: Costs, parts: tuple[_Bools, Ints, Ints], sizes: Ints, least: Costs
) -> None:
    """Writes the minimum of a sum of tables over the states of one variable, for all states of its scope."""
    is_produced, at, strides = parts
    last, at = sizes.size - 1, at.copy()
    fast, slow = np.flatnonzero(strides[:, last] > 0), np.flatnonzero(strides[:, last] == 0)
    counter, base, row = np.zeros(sizes.size, dtype=np.int64), np.empty(own.size), np.empty(own.size)
    for block in range(0, least.size, sizes[last]):
        base[:] = own
        for f in slow:
            _add(base, produced if is_produced[f] else tables, at[f])
        for p in range(sizes[last]):
            row[:] = base
            for f in fast[:-1]:
                _add(row, produced if is_produced[f] else tables, at[f] + p * strides[f, last])
            f = fast[-1]
            least[block + p] = _least(row, produced if is_produced[f] else tables, at[f] + p * strides[f, last])
        _advance(counter, sizes, at, strides)


@njit_cached
def _advance(counter: Ints, sizes: Ints, at: Ints, strides: Ints) -> None:
    """Advances to the next states of the scope, except those of its last variable, like an odometer."""
    for k in range(sizes.size - 2, -1, -1):
        counter[k] += 1
        at += strides[:, k]
        if counter[k] < sizes[k]:
            return
        at -= strides[:, k] * sizes[k]
        counter[k] = 0


@njit_cached
def _add(row: Costs, table: Costs, at: int) -> None:
    for i in range(row.size):
        row[i] += table[at + i]


@njit_cached
def _least(row: Costs, table: Costs, at: int) -> float:
    least = np.inf
    for i in range(row.size):
        least = min(least, row[i] + table[at + i])
    return least


# ---- Allowances ------------------------------------------------------------------------------------------------------
# An *allowance* of a free variable is a state; it may take every state that uses no more memory than this one. If all
# allowances together are within the limit, memory ties no two variables any more, and every result is valid. Prices
# find only what is best for them; where a few large usages compete for little room, the optimum lies between, and
# exchanging allowances finds it.


@njit_cached
def lower_allowances(
    usages: UsageItems, start: Ints, free: Ints, states: Ints, room: Costs, except_for: int, seed: int, tries: int
) -> bool:
    """Lowers allowances of free variables at random, except one, until all fit; returns whether they do.

    Args:
      states: the allowances, updated.
      room: [points], memory that they leave, updated.
      except_for: the variable whose allowance stays; -1 for none.
      tries: allowances that are lowered at most.
    """
    np.random.seed(seed)
    for _ in range(tries):
        if room.size == 0 or room.min() >= 0:
            return True
        v, state = _smaller_allowance(usages, start, free, states, int(np.argmin(room)), except_for)
        if v < 0:
            return False
        _change_allowance(usages, v, states[v], state, room)
        states[v] = state
    return False


@njit_cached
def _smaller_allowance(
    usages: UsageItems, start: Ints, free: Ints, states: Ints, point: int, except_for: int
) -> tuple[int, int]:
    """Returns a random variable and a random state of it that uses less at a point; -1 if there is none."""
    found, at, count = -1, -1, 0
    for v in free:
        most = _use_at(usages, v, states[v], point) if v != except_for else 0.0
        state, less = -1, 0
        for s in range(start[v + 1] - start[v] if most > 0 else 0):
            if _use_at(usages, v, s, point) < most:
                less += 1
                state = s if np.random.random() * less < 1 else state
        if less:
            count += 1
            if np.random.random() * count < 1:
                found, at = v, state
    return found, at


@njit_cached
def _use_at(usages: UsageItems, v: int, state: int, point: int) -> float:
    use = 0.0
    for k in range(usages.first[v], usages.first[v + 1]):
        if usages.lo[k] <= point < usages.hi[k]:
            use += usages.use[usages.begin[k] + state]
    return use


@njit_cached
def _change_allowance(usages: UsageItems, v: int, old: int, new: int, room: Costs) -> float:
    """Deducts a change of state from the room; returns the least room where the variable is live."""
    least = np.inf
    for k in range(usages.first[v], usages.first[v + 1]):
        more = usages.use[usages.begin[k] + new] - usages.use[usages.begin[k] + old]
        for t in range(usages.lo[k], usages.hi[k]):
            room[t] -= more
    for k in range(usages.first[v], usages.first[v + 1]):
        for t in range(usages.lo[k], usages.hi[k]):
            least = min(least, room[t])
    return least


@njit_cached
def _fits(usages: UsageItems, v: int, old: int, new: int, room: Costs) -> bool:
    least = _change_allowance(usages, v, old, new, room)
    _change_allowance(usages, v, new, old, room)
    return least >= 0


@njit_cached
def exceed_one_allowance(usages: UsageItems, start: Ints, free: Ints, states: Ints, room: Costs, seed: int) -> int:
    """Allows one random free variable a state that does not fit; returns which, -1 if all states of all fit."""
    np.random.seed(seed)
    found, at, count = -1, -1, 0
    for v in free:
        for s in range(start[v + 1] - start[v] if usages.first[v] < usages.first[v + 1] else 0):
            if not _fits(usages, v, states[v], s, room):
                count += 1
                if np.random.random() * count < 1:
                    found, at = v, s
    if found >= 0:
        _change_allowance(usages, found, states[found], at, room)
        states[found] = at
    return found


@njit_cached
def fill_allowances(
    usages: UsageItems, start: Ints, free: Ints, states: Ints, room: Costs, seed: int, near: float
) -> None:
    """Raises allowances of free variables in random order as far as there is room.

    Args:
      near: part of the largest usage from which on another state may be preferred to the one that uses most.
    """
    np.random.seed(seed)
    for v in np.random.permutation(free):
        most, best = _total_use(usages, v, states[v]), states[v]
        for s in range(start[v + 1] - start[v] if usages.first[v] < usages.first[v + 1] else 0):
            use = _total_use(usages, v, s) * np.random.uniform(near, 1.0)
            if use > most and _fits(usages, v, states[v], s, room):
                most, best = use, s
        if best != states[v]:
            _change_allowance(usages, v, states[v], best, room)
            states[v] = best


@njit_cached
def _total_use(usages: UsageItems, v: int, state: int) -> float:
    use = 0.0
    for k in range(usages.first[v], usages.first[v + 1]):
        use += usages.use[usages.begin[k] + state] * (usages.hi[k] - usages.lo[k])
    return use


@njit_cached
def forbid_above_allowances(
    usages: UsageItems, start: Ints, free: Ints, states: Ints, unary: Costs, top: float
) -> Costs:
    """Returns unary costs in which states that use more than their allowance cost ``top`` more."""
    costs = unary.copy()
    for v in free:
        for s in range(start[v + 1] - start[v]):
            for k in range(usages.first[v], usages.first[v + 1]):
                if usages.use[usages.begin[k] + s] > usages.use[usages.begin[k] + states[v]]:
                    costs[start[v] + s] = unary[start[v] + s] + top
    return costs
