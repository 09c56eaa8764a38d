"""The loops of message passing, compiled.

A pass of messages over a training step has a million additions in tiny tables. There everything is flat (see
``Flat``): variables are numbered in order, and each has a *half edge* to every neighbour.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.util.jit import Costs, Ints, njit_cached


class Flat(NamedTuple):
    """Where the arrays of variables and half edges lie.

    Args:
      start: per variable, and one past the last, where its states begin.
      first: likewise, its first half edge.
      to: per half edge, the variable it leads to.
      back: its reverse.
      out: where its message begins, which speaks of the states of ``to``.
      table: where the table of its edge begins, with the states of ``to`` along the second dim.
    """

    start: Ints
    first: Ints
    to: Ints
    back: Ints
    out: Ints
    table: Ints


@njit_cached
def passes(
    times: int, flat: Flat, unary: Costs, tables: Costs, sent: Costs, states: Ints, best: Ints, least: float
) -> tuple[float, float]:
    """So many sweeps forwards and backwards, by turns; ``best`` are the cheapest states that one has come by.

    Args:
      least: what those cost that are in ``best`` so far.

    Returns what they cost now, and what no states undercut by the last sweep.
    """
    lower = -np.inf
    for step in range(2 * times):
        cost, lower = sweep(step % 2 == 0, flat, unary, tables, sent, states)
        if cost < least:
            least = cost
            for v in range(states.size):
                best[v] = states[v]
    return least, lower


@njit_cached
def sweep(forward: bool, flat: Flat, unary: Costs, tables: Costs, sent: Costs, states: Ints) -> tuple[float, float]:
    """One pass: every variable hands its share of what it knows to the neighbours ahead.

    On the way every variable takes the state that is cheapest given those behind it and what the
    ones ahead say: ``states``. Returns what these cost in all, and what no states undercut: the minima of what the
    variables keep, for by their messages the edges ahead hold a share each and no more. Tables may be float32.
    """
    start, first, to, back, out, table = flat
    n = start.size - 1
    cost = lower = 0.0
    widest = 0
    for v in range(n):
        widest = max(widest, start[v + 1] - start[v])
    room = np.empty((3, widest))
    for step in range(n):
        v = step if forward else n - 1 - step
        size, count = start[v + 1] - start[v], first[v + 1] - first[v]
        total, paid, hoped = room[0, :size], room[1, :size], room[2, :size]
        for i in range(size):
            total[i] = paid[i] = hoped[i] = unary[start[v] + i]
        ahead = 0
        for h in range(first[v], first[v + 1]):
            message = sent[out[back[h]] :]
            if (to[h] > v) == forward:
                ahead += 1
                _plus(hoped, message)
            else:
                behind = tables[table[back[h]] + states[to[h]] * size :]
                _plus(hoped, behind)
                _plus(paid, behind)
            _plus(total, message)
        states[v] = argmin(hoped)
        cost += paid[states[v]]
        share = max(ahead, count - ahead, 1)
        if ahead < share:
            lower += total[argmin(total)] * (1 - ahead / share)
        for h in range(first[v], first[v + 1]):
            if (to[h] > v) == forward:
                heard, width = sent[out[back[h]] :], start[to[h] + 1] - start[to[h]]
                for i in range(size):
                    paid[i] = total[i] / share - heard[i]
                min_plus(paid, tables, table[h], sent[out[h] : out[h] + width])
    return cost, lower


@njit_cached
def added(source: Costs, target: Costs, begins: Ints, ends: Ints, to: Ints) -> None:
    """Add stretches of one array, from where they begin up to where they end, at places in another."""
    for i in range(begins.size):
        for j in range(ends[i] - begins[i]):
            target[to[i] + j] += source[begins[i] + j]


@njit_cached
def round_down(costs: Costs, narrow: NDArray[np.float32]) -> None:
    """Write costs in half as many bytes, none of them higher: what they prove as a lower bound stays true."""
    for i in range(costs.size):
        near = np.float32(costs[i])
        narrow[i] = np.nextafter(near, np.float32(-np.inf)) if near > costs[i] else near


@njit_cached
def _plus(total: Costs, costs: Costs) -> None:
    for i in range(total.size):
        total[i] += costs[i]


@njit_cached
def argmin(costs: Costs) -> int:
    """The first of the least: as numpy's, sooner for few."""
    best = 0
    for i in range(1, costs.size):
        if costs[i] < costs[best]:
            best = i
    return best


@njit_cached
def min_plus(known: Costs, tables: Costs, at: int, least: Costs) -> None:
    """For each state of a neighbour, the least of what is known and a table together."""
    width, fours = least.size, known.size // 4
    for j in range(width):
        least[j] = np.inf
    for k in range(0, 4 * fours, 4):  # four rows at a time: a quarter as many stores
        row = at + k * width
        a, b = tables[row : row + width], tables[row + width : row + 2 * width]
        c, d = tables[row + 2 * width : row + 3 * width], tables[row + 3 * width : row + 4 * width]
        for j in range(width):
            one, other = min(known[k] + a[j], known[k + 1] + b[j]), min(known[k + 2] + c[j], known[k + 3] + d[j])
            least[j] = min(least[j], min(one, other))
    for k in range(4 * fours, known.size):
        rest = tables[at + k * width : at + (k + 1) * width]
        for j in range(width):
            least[j] = min(least[j], known[k] + rest[j])


@njit_cached
def min_marginals(flat: Flat, unary: Costs, tables: Costs, sent: Costs, excess: Costs) -> None:
    """Add to each state what it costs at least beyond the bound of a pass backwards that has just ended.

    There an edge has a share of its later variable and nothing to spare for any state of the earlier one; what
    a variable keeps, and what its edges to earlier ones have left for a state, is excess.
    """
    start, first, to, back, out, table = flat
    for v in range(start.size - 1):
        size = start[v + 1] - start[v]
        total, own = np.empty(size), excess[start[v] : start[v + 1]]
        for i in range(size):
            total[i] = unary[start[v] + i]
        behind, count = 0, first[v + 1] - first[v]
        for h in range(first[v], first[v + 1]):
            behind += to[h] < v
            _plus(total, sent[out[back[h]] :])
        share = max(behind, count - behind, 1)
        least = total[argmin(total)]
        for i in range(size):
            own[i] += (total[i] - least) * (1 - behind / share)
        for h in range(first[v], first[v + 1]):
            if to[h] < v:
                heard, told, width = sent[out[back[h]] :], sent[out[h] :], start[to[h] + 1] - start[to[h]]
                for i in range(size):
                    row, left = tables[table[h] + i * width : table[h] + i * width + width], np.inf
                    for j in range(width):
                        left = min(left, row[j] - told[j])
                    own[i] += left + total[i] / share - heard[i]


@njit_cached
def reparametrize(flat: Flat, unary: Costs, tables: Costs, sent: Costs, own: Ints, settled: Costs) -> None:
    """Move what the messages say from the edges into the variables' tables.

    Args:
      own: where the table of each half edge begins in ``settled``; both halves share that of the earlier variable.
    """
    start, first, to, back, out, table = flat
    for v in range(start.size - 1):
        size = start[v + 1] - start[v]
        for h in range(first[v], first[v + 1]):
            there, here = out[h], out[back[h]]
            for i in range(size):
                unary[start[v] + i] += sent[here + i]
            width = start[to[h] + 1] - start[to[h]]
            for i in range(size if v < to[h] else 0):
                for j in range(width):
                    at = i * width + j
                    settled[own[h] + at] = tables[table[h] + at] - sent[there + j] - sent[here + i]


@njit_cached
def absorb(forward: bool, flat: Flat, unary: Costs, own: Ints, tables: Costs) -> None:
    """Every variable draws in what its edges can spare and spreads it over the edges ahead."""
    start, first, to = flat.start, flat.first, flat.to
    n = start.size - 1
    for step in range(n):
        v = step if forward else n - 1 - step
        total = unary[start[v] : start[v + 1]]
        ahead, count = 0, first[v + 1] - first[v]
        for h in range(first[v], first[v + 1]):
            ahead += (to[h] > v) == forward
            _draw(total, tables, own[h], start[to[h] + 1] - start[to[h]], to[h] < v)
        share = max(ahead, count - ahead, 1)
        for h in range(first[v], first[v + 1]):
            if (to[h] > v) == forward:
                _spread(total, share, tables, own[h], start[to[h] + 1] - start[to[h]], to[h] < v)
        for i in range(total.size):
            total[i] *= 1 - ahead / share


@njit_cached
def _draw(total: Costs, tables: Costs, at: int, width: int, turned: bool) -> None:
    """Move the minimum of a table for each state of one variable to that variable."""
    along, across = (1, total.size) if turned else (width, 1)
    for i in range(total.size):
        least = np.inf
        for j in range(width):
            least = min(least, tables[at + i * along + j * across])
        for j in range(width):
            tables[at + i * along + j * across] -= least
        total[i] += least


@njit_cached
def _spread(total: Costs, share: int, tables: Costs, at: int, width: int, turned: bool) -> None:
    """Add a share of a variable's costs to a table."""
    along, across = (1, total.size) if turned else (width, 1)
    for i in range(total.size):
        for j in range(width):
            tables[at + i * along + j * across] += total[i] / share
