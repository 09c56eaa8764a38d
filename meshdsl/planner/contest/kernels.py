"""Compiled loops over a flat core (``FlatNetwork``): usage, costs, forests by dynamic programming, the exact bound."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.kernels import FlatNetwork
from meshdsl.util.arrays import Costs, Ints
from meshdsl.util.jit import njit_cached


class UsageItems(NamedTuple):
    """Memory usages of variables; an item is the usage of one variable over one interval of time points.

    Args:
      first: [variables + 1], the first item of each.
      owner: [items], the variable.
      lo: [items], the first time point.
      hi: [items], one past the last time point.
      begin: [items + 1], where its usages by state begin in ``use``.
      use: usages by state, item after item.
    """

    first: Ints
    owner: Ints
    lo: Ints
    hi: Ints
    begin: Ints
    use: Costs


@njit_cached
def usage_profile(usages: UsageItems, states: Ints, points: int) -> Costs:
    """Returns the memory that a choice uses at every point."""
    total = np.zeros(points + 1)
    for k in range(usages.owner.size):
        use = usages.use[usages.begin[k] + states[usages.owner[k]]]
        total[usages.lo[k]] += use
        total[usages.hi[k]] -= use
    return np.cumsum(total)[:points]


@njit_cached
def price_usage(usages: UsageItems, start: Ints, unary: Costs, prices: Costs) -> Costs:
    """Returns the unary costs of all states, with their memory charged at a price per point."""
    until = np.zeros(prices.size + 1)
    until[1:] = np.cumsum(prices)
    total = unary.copy()
    for k in range(usages.owner.size):
        price = until[usages.hi[k]] - until[usages.lo[k]]
        if price > 0.0:
            at = start[usages.owner[k]] - usages.begin[k]
            for i in range(usages.begin[k], usages.begin[k + 1]):
                total[at + i] += price * usages.use[i]
    return total


@njit_cached
def choice_cost(flat: FlatNetwork, unary: Costs, tables: Costs, states: Ints) -> float:
    """Returns the cost of a choice."""
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
def induced_forest(flat: FlatNetwork, candidates: Ints) -> tuple[Ints, Ints]:
    """Returns a set of candidates, argmin in order of preference, that induces a forest (greedy, with union-find).

    Returns:
      The variables with every parent before its children; and by variable the half edge to its parent, -1 for roots and
      -2 for variables outside the set.
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
def solve_forest(flat: FlatNetwork, unary: Costs, tables: Costs, order: Ints, up: Ints, states: Ints) -> None:
    """Writes the best states of the variables of a forest, given those of all others, into ``states``.

    Args:
      order, up: as ``induced_forest`` returns them.
    """
    start, first, to, back, out, table = flat
    total = unary.copy()
    argmin = np.empty(out[-1] + start[-1] if out.size else 0, dtype=np.int32)
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
            _add_message_to_parent(
                total, tables, start[v], start[v + 1], table[h], start[to[h]], start[to[h] + 1], argmin[out[h] :]
            )
    for v in order:
        if up[v] < 0:
            states[v] = np.argmin(total[start[v] : start[v + 1]])
        else:
            states[v] = argmin[out[up[v]] + states[to[up[v]]]]


@njit_cached
def _add_message_to_parent(
    total: Costs, tables: Costs, lo: int, hi: int, table: int, begin: int, end: int, argmin: Ints
) -> None:
    """Adds the least cost over a child's states to each state of its parent, and records the minimising state."""
    width = end - begin
    least = np.full(width, np.inf)
    for i in range(hi - lo):
        own, row = total[lo + i], table + i * width
        for j in range(width):
            paid = own + tables[row + j]
            if paid < least[j]:
                least[j], argmin[j] = paid, i
    for j in range(width):
        total[begin + j] += least[j]


@njit_cached
def exact_bound(
    flat: FlatNetwork, usages: UsageItems, unary: Ints, tables: Ints, sent: Ints, prices: Ints, finer: int
) -> tuple[int, Ints]:
    """Returns the sum of the minima of all tables in integers, after messages and prices have shifted costs.

    A variable retains what remains after each edge to an earlier one has taken its share. Prices have ``finer`` binary
    digits more; charges are rounded down. Returns also by how much at least the sum rises with each state.
    """
    start, first, to, back, out, table = flat
    total, excess = _charged(usages, start, unary, prices, finer), np.zeros_like(unary)
    bound = 0
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
                bound += _table_minimum(rows, rest, columns, excess[start[v] : start[v + 1]], excess[begin:end])
        bound += mine.min()
        for i in range(mine.size):
            excess[start[v] + i] += mine[i] - mine.min()
    return bound, excess


@njit_cached
def _charged(usages: UsageItems, start: Ints, unary: Ints, prices: Ints, finer: int) -> Ints:
    total = unary.copy()
    until = np.zeros(prices.size + 1, dtype=np.int64)
    until[1:] = np.cumsum(prices)
    for k in range(usages.owner.size):
        price, at = until[usages.hi[k]] - until[usages.lo[k]], start[usages.owner[k]] - usages.begin[k]
        for i in range(usages.begin[k], usages.begin[k + 1]):
            total[at + i] += (price * usages.use[i]) >> finer
    return total


@njit_cached
def _table_minimum(rows: Ints, table: Ints, columns: Ints, excess: Ints, excess_there: Ints) -> int:
    """Returns the minimum of a table with amounts added to rows and deducted from columns; adds the rest to excess."""
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
