"""Which variables can take their best states at once, and in which order they are minimised away: compiled.

Of some candidates, the one whose table over itself and its neighbours has the fewest entries goes first; its
neighbours are each other's from then on. Where no table is small enough, a candidate is held at its state instead,
which cuts the graph. What is left free has cycles, but is narrow (``buckets`` solves it); forests are the narrowest.

This is bucket elimination once more (``mrf.elimination`` is the planner's, ``mrf.network.Network.reduce`` the one that
keeps networks pairwise; ``mrf.network`` says why they are separate): compiled, on flat networks, in orders that noise
varies from call to call.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.contest.kernels import FixedStates
from meshdsl.planner.mrf.kernels import FlatNetwork
from meshdsl.util.arrays import Costs, Ints
from meshdsl.util.jit import njit_cached

# ---- Plans -----------------------------------------------------------------------------------------------------------


_Bools = NDArray[np.bool_]


class EliminationOrder(NamedTuple):
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


@njit_cached
def planned(flat: FlatNetwork, candidates: Ints, noise: Costs, limit: float) -> EliminationOrder:
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


@njit_cached
def _graph(flat: FlatNetwork, candidates: Ints) -> tuple[_Bools, Costs]:
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


@njit_cached
def _weights(near: _Bools, size: Costs) -> Costs:
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
def _held(near: _Bools, v: int, noise: Costs) -> int:
    """Which of a variable and its neighbours to hold: one with many neighbours, or much noise."""
    found, most = v, near[v].sum() + noise[v]
    for i in range(noise.size):
        if near[v, i]:
            many = near[i].sum() + noise[i]
            if many > most:
                found, most = i, many
    return found


@njit_cached
def _drop(near: _Bools, size: Costs, weight: Costs, v: int) -> None:
    """Take a variable out of the graph, and out of the scopes of those that have gone."""
    for i in range(size.size):
        if near[v, i]:
            weight[i] -= size[v]
        near[i, v] = near[v, i] = False


@njit_cached
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
# Many variables take their best states at once, the others staying as they are: bucket elimination, compiled.
#
# Free variables are minimised away in the order of a plan (see ``plans``), each into a table over its scope, and read
# back in reverse order. A table is kept with the next variable to go along its last dim, so that all additions run
# along memory.


@njit_cached
def solve(flat: FlatNetwork, unary: Costs, tables: Costs, plan: EliminationOrder, states: Ints) -> None:
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


@njit_cached
def _conditioned(flat: FlatNetwork, unary: Costs, tables: Costs, plan: EliminationOrder, states: Ints) -> Costs:
    """Costs of the states of free variables with those of the others given."""
    own = unary.copy()
    for v in plan.order:
        mine = own[flat.start[v] : flat.start[v + 1]]
        for h in range(flat.first[v], flat.first[v + 1]):
            w = flat.to[h]
            if plan.rank[w] < 0:
                _add(mine, tables, flat.table[flat.back[h]] + states[w] * mine.size)
    return own


@njit_cached
def _parts(flat: FlatNetwork, plan: EliminationOrder, r: int, head: Ints, following: Ints) -> tuple[_Bools, Ints, Ints]:
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


@njit_cached
def _index(scope: Ints, v: int) -> int:
    for k in range(scope.size):
        if scope[k] == v:
            return k
    return -1


@njit_cached
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


@njit_cached
def _advance(counter: Ints, sizes: Ints, at: Ints, strides: Ints) -> None:
    """The next states of the scope but for its last variable, the last of them first."""
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
# What free variables may use at most each, such that all fit whatever they choose: compiled.
#
# An *allowance* is a state per variable that together stay within the limit; a variable may take every state that uses
# no more than that one. So memory ties no two variables any more, and what is found fits. Prices of memory find what
# is best for them only; where a few large usages compete for little room, what is best lies between, and exchanging
# allowances finds it.


_LOWERED = 500  # allowances that are lowered at most until all fit
_NEARLY = 0.9  # of the usage of the largest state: others this large may be taken for it


@njit_cached
def lower(held: FixedStates, start: Ints, free: Ints, states: Ints, room: Costs, but: int, seed: int) -> bool:
    """Lower allowances of free variables at random, except one, until all fit; whether they do.

    Args:
      room: what they leave at every point, which changes with them.
    """
    np.random.seed(seed)
    for _ in range(_LOWERED):
        if room.size == 0 or room.min() >= 0:
            return True
        v, state = _lowered(held, start, free, states, int(np.argmin(room)), but)
        if v < 0:
            return False
        _change(held, v, states[v], state, room)
        states[v] = state
    return False


@njit_cached
def _lowered(held: FixedStates, start: Ints, free: Ints, states: Ints, point: int, but: int) -> tuple[int, int]:
    """A variable and a state of it that uses less at a point; -1 if there is none."""
    found, at, count = -1, -1, 0
    for v in free:
        most = _use(held, v, states[v], point) if v != but else 0.0
        state, less = -1, 0
        for s in range(start[v + 1] - start[v] if most > 0 else 0):
            if _use(held, v, s, point) < most:
                less += 1
                state = s if np.random.random() * less < 1 else state
        if less:
            count += 1
            if np.random.random() * count < 1:
                found, at = v, state
    return found, at


@njit_cached
def _use(held: FixedStates, v: int, state: int, point: int) -> float:
    use = 0.0
    for k in range(held.first[v], held.first[v + 1]):
        if held.lo[k] <= point < held.hi[k]:
            use += held.use[held.begin[k] + state]
    return use


@njit_cached
def _change(held: FixedStates, v: int, old: int, new: int, room: Costs) -> float:
    """Take off the room what a variable uses more in another state; returns the least room where it is live."""
    least = np.inf
    for k in range(held.first[v], held.first[v + 1]):
        more = held.use[held.begin[k] + new] - held.use[held.begin[k] + old]
        for t in range(held.lo[k], held.hi[k]):
            room[t] -= more
    for k in range(held.first[v], held.first[v + 1]):
        for t in range(held.lo[k], held.hi[k]):
            least = min(least, room[t])
    return least


@njit_cached
def _fits(held: FixedStates, v: int, old: int, new: int, room: Costs) -> bool:
    least = _change(held, v, old, new, room)
    _change(held, v, new, old, room)
    return least >= 0


@njit_cached
def enlarge(held: FixedStates, start: Ints, free: Ints, states: Ints, room: Costs, seed: int) -> int:
    """Allow one free variable a state that does not fit; returns which, -1 if all states of all fit."""
    np.random.seed(seed)
    found, at, count = -1, -1, 0
    for v in free:
        for s in range(start[v + 1] - start[v] if held.first[v] < held.first[v + 1] else 0):
            if not _fits(held, v, states[v], s, room):
                count += 1
                if np.random.random() * count < 1:
                    found, at = v, s
    if found >= 0:
        _change(held, found, states[found], at, room)
        states[found] = at
    return found


@njit_cached
def fill(held: FixedStates, start: Ints, free: Ints, states: Ints, room: Costs, seed: int) -> None:
    """Raise allowances of free variables in random order as far as there is room."""
    np.random.seed(seed)
    for v in np.random.permutation(free):
        most, best = _total(held, v, states[v]), states[v]
        for s in range(start[v + 1] - start[v] if held.first[v] < held.first[v + 1] else 0):
            use = _total(held, v, s) * np.random.uniform(_NEARLY, 1.0)
            if use > most and _fits(held, v, states[v], s, room):
                most, best = use, s
        if best != states[v]:
            _change(held, v, states[v], best, room)
            states[v] = best


@njit_cached
def _total(held: FixedStates, v: int, state: int) -> float:
    use = 0.0
    for k in range(held.first[v], held.first[v + 1]):
        use += held.use[held.begin[k] + state] * (held.hi[k] - held.lo[k])
    return use


@njit_cached
def allowed(held: FixedStates, start: Ints, free: Ints, states: Ints, unary: Costs, top: float) -> Costs:
    """Costs of states, with those that use more than allowed dearer by ``top``."""
    costs = unary.copy()
    for v in free:
        for s in range(start[v + 1] - start[v]):
            for k in range(held.first[v], held.first[v + 1]):
                if held.use[held.begin[k] + s] > held.use[held.begin[k] + states[v]]:
                    costs[start[v] + s] = unary[start[v] + s] + top
    return costs
