"""The loops of TRW-S message passing, compiled.

A pass of messages over a training step performs a million additions in tiny tables. Therefore everything is flat (see
``FlatNetwork``): variables are numbered in order, and every edge is two *half edges*, one at each end.

The *share* of a variable is one part of ``max(neighbours behind, neighbours ahead)`` of what it knows; that is the
weight of TRW-S, for which chains along the order cover every edge.

numba keeps the compiled functions on disk with the types of their arguments: rename a NamedTuple only together with a
change of the lines above it, or delete ``__pycache__``, for a stale file that names the old type cannot be read.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.util.jit import Costs, Ints, njit_cached


class FlatNetwork(NamedTuple):
    """Offsets of the arrays of variables and half edges.

    Args:
      start: per variable, and one past the last, where its states begin.
      first: likewise, its first half edge.
      to: per half edge, the variable at its other end.
      back: its reverse.
      out: where its message begins, over the states of ``to``.
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
    times: int, flat: FlatNetwork, unary: Costs, tables: Costs, sent: Costs, states: Ints, best: Ints, least: float
) -> tuple[float, float]:
    """Runs ``times`` sweeps forwards and as many backwards, alternating.

    Args:
      sent: messages of all half edges, updated in place.
      states: receives the states decoded by the last sweep.
      best: the cheapest states decoded so far, updated in place.
      least: cost of ``best``.

    Returns the cost of ``best`` and the lower bound of the last sweep.
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
def sweep(
    forward: bool, flat: FlatNetwork, unary: Costs, tables: Costs, sent: Costs, states: Ints
) -> tuple[float, float]:
    """Runs one sweep: every variable sends its share of what it knows to its neighbours ahead.

    On the way every variable is decoded: it takes the state that is cheapest given the states of those behind it and
    the messages of those ahead. Tables may be float32.

    Returns the cost of the decoded ``states``, and a lower bound: the sum of the minima that variables retain, for the
    messages leave an edge ahead exactly its share.
    """
    start, first, to, back, out, table = flat
    n = start.size - 1
    cost = lower = 0.0
    widest = 0
    for v in range(n):
        widest = max(widest, start[v + 1] - start[v])
    workspace = np.empty((3, widest))
    for step in range(n):
        v = step if forward else n - 1 - step
        size, count = start[v + 1] - start[v], first[v + 1] - first[v]
        total, known, estimate = workspace[0, :size], workspace[1, :size], workspace[2, :size]
        for i in range(size):
            total[i] = known[i] = estimate[i] = unary[start[v] + i]
        ahead = 0
        for h in range(first[v], first[v + 1]):
            message = sent[out[back[h]] :]
            if (to[h] > v) == forward:
                ahead += 1
                _add_to(estimate, message)
            else:
                row = tables[table[back[h]] + states[to[h]] * size :]
                _add_to(estimate, row)
                _add_to(known, row)
            _add_to(total, message)
        states[v] = argmin(estimate)
        cost += known[states[v]]
        share = max(ahead, count - ahead, 1)
        if ahead < share:
            lower += total[argmin(total)] * (1 - ahead / share)
        for h in range(first[v], first[v + 1]):
            if (to[h] > v) == forward:
                received, width = sent[out[back[h]] :], start[to[h] + 1] - start[to[h]]
                for i in range(size):
                    known[i] = total[i] / share - received[i]
                min_plus(known, tables, table[h], sent[out[h] : out[h] + width])
    return cost, lower


@njit_cached
def add_ranges(source: Costs, target: Costs, begins: Ints, ends: Ints, to: Ints) -> None:
    """Adds ranges of one array, each from ``begins`` to ``ends``, to another one at the positions ``to``."""
    for i in range(begins.size):
        for j in range(ends[i] - begins[i]):
            target[to[i] + j] += source[begins[i] + j]


@njit_cached
def round_down(costs: Costs, narrow: NDArray[np.float32]) -> None:
    """Writes costs as float32, none higher than before, so that a lower bound on them stays one."""
    for i in range(costs.size):
        near = np.float32(costs[i])
        narrow[i] = np.nextafter(near, np.float32(-np.inf)) if near > costs[i] else near


@njit_cached
def _add_to(total: Costs, costs: Costs) -> None:
    for i in range(total.size):
        total[i] += costs[i]


@njit_cached
def argmin(costs: Costs) -> int:
    """Returns the first position of the minimum, as numpy does, but faster on short arrays."""
    best = 0
    for i in range(1, costs.size):
        if costs[i] < costs[best]:
            best = i
    return best


@njit_cached
def min_plus(known: Costs, tables: Costs, at: int, least: Costs) -> None:
    """Writes to ``least``, for each state of a neighbour, the minimum over own states of ``known`` plus a table."""
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
def min_marginals(flat: FlatNetwork, unary: Costs, tables: Costs, sent: Costs, excess: Costs) -> None:
    """Adds to ``excess``, per state, by how much every solution in that state exceeds the bound at least.

    To be called right after a sweep backwards. Then an edge holds its share of its later variable and nothing in excess
    for any state of the earlier one; the excess of a state is what its variable retains, and what its edges to earlier
    variables have left over.
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
            _add_to(total, sent[out[back[h]] :])
        share = max(behind, count - behind, 1)
        least = total[argmin(total)]
        for i in range(size):
            own[i] += (total[i] - least) * (1 - behind / share)
        for h in range(first[v], first[v + 1]):
            if to[h] < v:
                received, message, width = sent[out[back[h]] :], sent[out[h] :], start[to[h] + 1] - start[to[h]]
                for i in range(size):
                    row, rest = tables[table[h] + i * width : table[h] + i * width + width], np.inf
                    for j in range(width):
                        rest = min(rest, row[j] - message[j])
                    own[i] += rest + total[i] / share - received[i]


@njit_cached
def reparametrize(flat: FlatNetwork, unary: Costs, tables: Costs, sent: Costs, own: Ints, target: Costs) -> None:
    """Moves messages into the tables: added to the variables' own, subtracted from those of the edges.

    Args:
      own: where the table of each half edge begins in ``target``; both halves share that of the earlier variable.
      target: receives the tables of the edges.
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
                    target[own[h] + at] = tables[table[h] + at] - sent[there + j] - sent[here + i]


@njit_cached
def absorb(forward: bool, flat: FlatNetwork, unary: Costs, own: Ints, tables: Costs) -> None:
    """Lets every variable absorb the row minima of its edges and spread its costs over the edges ahead."""
    start, first, to = flat.start, flat.first, flat.to
    n = start.size - 1
    for step in range(n):
        v = step if forward else n - 1 - step
        total = unary[start[v] : start[v + 1]]
        ahead, count = 0, first[v + 1] - first[v]
        for h in range(first[v], first[v + 1]):
            ahead += (to[h] > v) == forward
            _absorb_minima(total, tables, own[h], start[to[h] + 1] - start[to[h]], to[h] < v)
        share = max(ahead, count - ahead, 1)
        for h in range(first[v], first[v + 1]):
            if (to[h] > v) == forward:
                _spread(total, share, tables, own[h], start[to[h] + 1] - start[to[h]], to[h] < v)
        for i in range(total.size):
            total[i] *= 1 - ahead / share


@njit_cached
def _absorb_minima(total: Costs, tables: Costs, at: int, width: int, transposed: bool) -> None:
    """Moves the minimum of a table for each state of a variable to that variable."""
    along, across = (1, total.size) if transposed else (width, 1)
    for i in range(total.size):
        least = np.inf
        for j in range(width):
            least = min(least, tables[at + i * along + j * across])
        for j in range(width):
            tables[at + i * along + j * across] -= least
        total[i] += least


@njit_cached
def _spread(total: Costs, share: int, tables: Costs, at: int, width: int, transposed: bool) -> None:
    """Adds a share of a variable's costs to a table."""
    along, across = (1, total.size) if transposed else (width, 1)
    for i in range(total.size):
        for j in range(width):
            tables[at + i * along + j * across] += total[i] / share
