"""The loops of the search, compiled. Networks are flat (``planner.mrf.kernels.FlatNetwork``), and usages as well."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.kernels import FlatNetwork
from meshdsl.util.arrays import Costs, Ints
from meshdsl.util.jit import njit_cached


class FixedStates(NamedTuple):
    """What variables use, item by item.

    Args:
      first: per variable, and one past the last, its first item.
      owner: per item, its variable.
      lo: the first point at which it is live. hi: the first at which it is no more.
      begin: per item, and one past the last, where its usages by state begin.
      use: the usages.
    """

    first: Ints
    owner: Ints
    lo: Ints
    hi: Ints
    begin: Ints
    use: Costs


@njit_cached
def profile(held: FixedStates, states: Ints, points: int) -> Costs:
    """What the states use at every point."""
    total = np.zeros(points + 1)
    for k in range(held.owner.size):
        use = held.use[held.begin[k] + states[held.owner[k]]]
        total[held.lo[k]] += use
        total[held.hi[k]] -= use
    return np.cumsum(total)[:points]


@njit_cached
def priced(held: FixedStates, start: Ints, unary: Costs, prices: Costs) -> Costs:
    """The variables' costs, with what they use paid at these prices per point."""
    until = np.zeros(prices.size + 1)
    until[1:] = np.cumsum(prices)
    total = unary.copy()
    for k in range(held.owner.size):
        price = until[held.hi[k]] - until[held.lo[k]]
        if price > 0.0:
            at = start[held.owner[k]] - held.begin[k]
            for i in range(held.begin[k], held.begin[k + 1]):
                total[at + i] += price * held.use[i]
    return total


@njit_cached
def cost(flat: FlatNetwork, unary: Costs, tables: Costs, states: Ints) -> float:
    """The total of the states."""
    total = 0.0
    for v in range(states.size):
        total += unary[flat.start[v] + states[v]]
        for h in range(flat.first[v], flat.first[v + 1]):
            w = flat.to[h]
            if v < w:
                width = flat.start[w + 1] - flat.start[w]
                total += tables[flat.table[h] + states[v] * width + states[w]]
    return total


@njit_cached
def forest(flat: FlatNetwork, candidates: Ints) -> tuple[Ints, Ints]:
    """A set of variables without cycles, from candidates in order of preference.

    Returns them with every parent before its children, and by variable the half edge to its parent, -1 for roots
    and -2 for variables that are not in the set.
    """
    n = flat.start.size - 1
    group, seen, inside = np.arange(n), np.full(n, -1), np.zeros(n, dtype=np.bool_)
    for v in candidates:
        fine = True
        for h in range(flat.first[v], flat.first[v + 1]):
            if inside[flat.to[h]]:
                root = _root(group, flat.to[h])
                fine = fine and seen[root] != v
                seen[root] = v
        if fine:
            inside[v] = True
            for h in range(flat.first[v], flat.first[v + 1]):
                if inside[flat.to[h]]:
                    group[_root(group, flat.to[h])] = v
    return _rooted(flat, candidates, inside)


@njit_cached
def _root(group: Ints, v: int) -> int:
    while group[v] != v:
        group[v] = group[group[v]]
        v = group[v]
    return v


@njit_cached
def _rooted(flat: FlatNetwork, candidates: Ints, inside: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    up = np.full(flat.start.size - 1, -2)
    order = np.empty(candidates.size, dtype=np.int64)
    done = made = 0
    for root in candidates:
        if inside[root] and up[root] == -2:
            up[root], order[made] = -1, root
            made += 1
        while done < made:
            v = order[done]
            done += 1
            for h in range(flat.first[v], flat.first[v + 1]):
                w = flat.to[h]
                if inside[w] and up[w] == -2:
                    up[w], order[made] = flat.back[h], w
                    made += 1
    return order[:made], up


@njit_cached
def solve(flat: FlatNetwork, unary: Costs, tables: Costs, order: Ints, up: Ints, states: Ints) -> None:
    """Give the variables of a forest their best states, the others staying as they are.

    Args:
      order, up: as ``forest`` returns them.
    """
    start, first, to, back, out, table = flat
    total = unary.copy()
    taken = np.empty(out[-1] + start[-1] if out.size else 0, dtype=np.int32)
    for v in order:
        mine = total[start[v] : start[v + 1]]
        for h in range(first[v], first[v + 1]):
            if up[to[h]] == -2:
                row = table[back[h]] + states[to[h]] * mine.size
                for i in range(mine.size):
                    mine[i] += tables[row + i]
    for k in range(order.size - 1, -1, -1):
        v = order[k]
        if up[v] >= 0:
            h = up[v]
            _hand_up(total, tables, start[v], start[v + 1], table[h], start[to[h]], start[to[h] + 1], taken[out[h] :])
    for v in order:
        if up[v] < 0:
            states[v] = np.argmin(total[start[v] : start[v + 1]])
        else:
            states[v] = taken[out[up[v]] + states[to[up[v]]]]


@njit_cached
def _hand_up(total: Costs, tables: Costs, lo: int, hi: int, table: int, begin: int, end: int, taken: Ints) -> None:
    """Add the best of a child's states to each of its parent's."""
    width = end - begin
    least = np.full(width, np.inf)
    for i in range(hi - lo):
        own, row = total[lo + i], table + i * width
        for j in range(width):
            paid = own + tables[row + j]
            if paid < least[j]:
                least[j], taken[j] = paid, i
    for j in range(width):
        total[begin + j] += least[j]


@njit_cached
def least(
    flat: FlatNetwork, held: FixedStates, unary: Ints, tables: Ints, sent: Ints, prices: Ints, finer: int
) -> tuple[int, Ints]:
    """The sum of the minima of all tables in integers, once what messages and prices say has moved.

    Variables keep what is left when each edge to an earlier one has its share. Prices have ``finer`` binary
    digits more; what they come to is rounded down. Returns also by how much at least the sum rises with each state.
    """
    start, first, to, back, out, table = flat
    total, excess = _paid(held, start, unary, prices, finer), np.zeros_like(unary)
    found = 0
    for v in range(start.size - 1):
        mine, ahead = total[start[v] : start[v + 1]], 0
        for h in range(first[v], first[v + 1]):
            ahead += to[h] < v
            for i in range(mine.size):
                mine[i] += sent[out[back[h]] + i]
        share = mine // max(ahead, first[v + 1] - first[v] - ahead, 1)
        for h in range(first[v], first[v + 1]):
            if to[h] < v:
                mine -= share
                begin, end = start[to[h]], start[to[h] + 1]
                columns = sent[out[h] : out[h] + end - begin]
                rest, rows = tables[table[h] :], share - sent[out[back[h]] : out[back[h]] + mine.size]
                found += _least_entry(rows, rest, columns, excess[start[v] : start[v + 1]], excess[begin:end])
        found += mine.min()
        for i in range(mine.size):
            excess[start[v] + i] += mine[i] - mine.min()
    return found, excess


@njit_cached
def _paid(held: FixedStates, start: Ints, unary: Ints, prices: Ints, finer: int) -> Ints:
    total = unary.copy()
    until = np.zeros(prices.size + 1, dtype=np.int64)
    until[1:] = np.cumsum(prices)
    for k in range(held.owner.size):
        price, at = until[held.hi[k]] - until[held.lo[k]], start[held.owner[k]] - held.begin[k]
        for i in range(held.begin[k], held.begin[k + 1]):
            total[at + i] += (price * held.use[i]) >> finer
    return total


@njit_cached
def _least_entry(rows: Ints, table: Ints, columns: Ints, excess: Ints, excess_there: Ints) -> int:
    """The least of a table with amounts added to rows and taken from columns; how much more others are: excess."""
    height, width = rows.size, columns.size
    across, along = np.empty(height, dtype=np.int64), table[:width] + (rows[0] - columns)
    for i in range(height):
        across[i] = rows[i] + table[i * width] - columns[0]
        for j in range(width):
            entry = rows[i] + table[i * width + j] - columns[j]
            across[i], along[j] = min(across[i], entry), min(along[j], entry)
    least: int = across.min()
    excess += across - least
    excess_there += along - least
    return least
