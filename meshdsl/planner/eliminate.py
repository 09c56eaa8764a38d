"""Exact minimisation of a sum of tables over discrete variables, by variable elimination.

Bucket elimination (Dechter 1999; the same algorithm as Viterbi on a tree): take a variable, add up
the tables that mention it, minimise it away, and put the result back as a table over its
neighbours. The largest table decides the cost; the variable whose table would be smallest goes
first. Training steps are narrow: a table of one mesh axis has a few thousand entries, whatever
the depth of the model.

Where a table would pass ``cap`` entries, the variable with the largest domain in it is held at
its incumbent value instead. The result is then still at least as good as the incumbent, but
no longer proved optimal; ``Answer.exact`` says so.
"""

import heapq
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.closure import Costs

Scope = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """A minimum, a state per variable, and whether it was proved."""

    cost: float
    states: NDArray[np.intp]
    exact: bool


class Network:
    """Variables 0..n-1 with domain sizes, and a table per scope; scopes are sorted."""

    def __init__(self, domains: list[int]) -> None:
        self.domains = domains
        self.constant = 0.0
        self.tables: dict[Scope, Costs] = {}

    def add(self, scope: Scope, table: Costs) -> None:
        """Add a table over ``scope``, one array dim per variable; single-state variables are sliced away."""
        if any(self.domains[v] == 1 for v in scope):
            table = table[tuple(0 if self.domains[v] == 1 else slice(None) for v in scope)]
            scope = tuple(v for v in scope if self.domains[v] > 1)
        if list(scope) != sorted(scope):
            order = sorted(range(len(scope)), key=scope.__getitem__)
            scope, table = tuple(scope[i] for i in order), np.transpose(table, order)
        if not scope:
            self.constant += float(table)
        elif scope in self.tables:
            self.tables[scope] = self.tables[scope] + table
        else:
            self.tables[scope] = table


def eliminate(network: Network, incumbent: NDArray[np.intp], cap: int = 2_000_000) -> Answer:
    """Minimise the sum of the network's tables; never worse than ``incumbent``.

    ``incumbent`` gives the first variables a state; the others are never held at one.
    """
    return _Elimination(network, incumbent, cap).run()


class _Elimination:
    def __init__(self, network: Network, incumbent: NDArray[np.intp], cap: int) -> None:
        self.domains, self.incumbent, self.cap = network.domains, incumbent, cap
        self.sizes = [float(np.log2(d)) for d in network.domains]
        self.total = network.constant
        self.touching: list[dict[int, tuple[Scope, Costs]]] = [{} for _ in network.domains]
        self.near: list[set[int]] = [set() for _ in network.domains]
        self.ids = count()
        self.trail: list[tuple[int, Scope, NDArray[np.intp]]] = []
        self.held: dict[int, int] = {}
        for scope, table in network.tables.items():
            self._put(scope, table)

    def run(self) -> Answer:
        alive = {v for v, d in enumerate(self.domains) if d > 1}
        queue = [(self._weight(v), v) for v in alive]
        heapq.heapify(queue)
        while queue:
            weight, v = heapq.heappop(queue)
            if v not in alive or weight != self._weight(v):
                continue
            if weight > np.log2(self.cap):
                v = max((w for w in (v, *self.near[v]) if w < len(self.incumbent)), key=self._held_first)
                touched = self._hold(v)
            else:
                touched = self._eliminate(v)
            alive.discard(v)
            for w in touched:
                heapq.heappush(queue, (self._weight(w), w))
        return Answer(self.total, self._read_back(), not self.held)

    def _held_first(self, v: int) -> tuple[int, int]:
        return self.domains[v], v

    def _weight(self, v: int) -> float:
        return self.sizes[v] + sum(self.sizes[w] for w in sorted(self.near[v]))

    def _put(self, scope: Scope, table: Costs) -> None:
        if not scope:
            self.total += float(table)
            return
        key = next(self.ids)
        for v in scope:
            self.touching[v][key] = (scope, table)
            self.near[v].update(w for w in scope if w != v)

    def _take(self, v: int) -> list[tuple[Scope, Costs]]:
        """Remove and return the tables that mention ``v``, and ``v`` from the graph."""
        found = dict(self.touching[v])
        for key, (scope, _) in found.items():
            for w in scope:
                del self.touching[w][key]
        for w in self.near[v]:
            self.near[w].discard(v)
        return list(found.values())

    def _eliminate(self, v: int) -> set[int]:
        near = sorted(self.near[v])
        scope = tuple(sorted((v, *near)))
        total = np.zeros([self.domains[w] for w in scope])
        for part, table in self._take(v):
            total += table.reshape([self.domains[w] if w in part else 1 for w in scope])
        axis = scope.index(v)
        rest = tuple(near)
        self.trail.append((v, rest, np.argmin(total, axis=axis)))
        self._put(rest, np.min(total, axis=axis))
        return set(near)

    def _hold(self, v: int) -> set[int]:
        """Fix ``v`` at its incumbent state."""
        state, near = int(self.incumbent[v]), set(self.near[v])
        self.held[v] = state
        for scope, table in self._take(v):
            self._put(tuple(w for w in scope if w != v), np.take(table, state, axis=scope.index(v)))
        return near

    def _read_back(self) -> NDArray[np.intp]:
        states = np.zeros(len(self.domains), dtype=np.intp)
        for v, state in self.held.items():
            states[v] = state
        for v, rest, best in reversed(self.trail):
            states[v] = best[tuple(states[w] for w in rest)]
        return states
