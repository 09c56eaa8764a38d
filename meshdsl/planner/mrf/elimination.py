"""Exact minimisation of a sum of tables over discrete variables, by variable elimination.

Bucket elimination (Dechter 1999; the same algorithm as Viterbi on a tree): take a variable, add up
the tables that mention it, minimise it away, and put the result back as a table over its
neighbours. The largest table decides the cost; the variable whose table would be smallest goes
first. Training steps are narrow: a table of one mesh axis has a few thousand entries, whatever
the depth of the model.

Where a table would pass ``cap`` entries, ``eliminate`` holds the variable with the largest domain in
it at its incumbent value: the result is then still at least as good as the incumbent, but no
longer proved optimal; ``EliminationResult.exact`` says so. ``lower_bound`` minimises the tables that mention
the variable in groups instead, each group by itself (mini-buckets; Dechter and Rish 2003).
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.network import Memo
from meshdsl.util.arrays import Costs

Scope = tuple[int, ...]


@dataclass(frozen=True)
class EliminationResult:
    """A minimum, a state per variable, and whether it was proved."""

    cost: float
    states: NDArray[np.intp]
    exact: bool


def eliminate(
    domains: Sequence[int],
    tables: Iterable[tuple[Scope, Costs]],
    incumbent: Sequence[int],
    cap: int,
    derived: Memo | None = None,
) -> EliminationResult:
    """Minimise a sum of tables over one or two variables each; never worse than ``incumbent``.

    Args:
      domains: number of states per variable.
      tables: tables with the variables they speak of, in order.
      incumbent: a state per variable.
      cap: entries of the largest table that is made.
    """
    return _Elimination(domains, tables, incumbent, cap, derived or Memo()).run()


def lower_bound(domains: Sequence[int], tables: Iterable[tuple[Scope, Costs]], cap: int) -> float:
    """What no states of the variables undercut; the minimum itself where no table passes ``cap`` entries."""
    return _Elimination(domains, tables, None, cap, Memo()).run().cost


class _Elimination:
    """Without an incumbent, wide variables are split: the cost is a bound and the states mean nothing."""

    def __init__(
        self,
        domains: Sequence[int],
        tables: Iterable[tuple[Scope, Costs]],
        incumbent: Sequence[int] | None,
        cap: int,
        derived: Memo,
    ) -> None:
        self.domains, self.incumbent, self.limit = domains, incumbent, float(np.log2(cap))
        self.sizes = [float(np.log2(d)) for d in domains]
        self.total = 0.0
        self.touching: list[dict[Scope, Costs]] = [{} for _ in domains]
        self.near: list[set[int]] = [set() for _ in domains]
        self.trail: list[tuple[int, Scope, Costs]] = []
        self.held: dict[int, int] = {}
        self.derived = derived
        for scope, table in tables:
            self._add(scope, table)

    def _add(self, scope: Scope, table: Costs) -> None:
        """Add a table; variables of a single state are sliced away."""
        single = tuple(self.domains[v] == 1 for v in scope)
        if any(single):
            at = tuple(0 if one else slice(None) for one in single)
            table = self.derived.get(single, (table,), lambda t: t[at])
            scope = tuple(v for v in scope if self.domains[v] > 1)
        self._put(scope, table)

    def run(self) -> EliminationResult:
        alive = {v for v, d in enumerate(self.domains) if d > 1}
        weights = {v: self._weight(v) for v in alive}
        queue = [(weight, v) for v, weight in weights.items()]
        heapq.heapify(queue)
        while queue:
            weight, v = heapq.heappop(queue)
            if v not in alive or weight != weights[v]:
                continue
            if weight <= self.limit:
                touched = self._eliminate(v)
            elif self.incumbent is None:
                touched = self._split(v)
            else:
                v = max((v, *self.near[v]), key=lambda w: (self.domains[w], w))
                touched = self._hold(v, int(self.incumbent[v]))
            alive.discard(v)
            for w in touched:
                weights[w] = self._weight(w)
                heapq.heappush(queue, (weights[w], w))
        states = [] if self.incumbent is None else self._read_back()
        return EliminationResult(self.total, np.array(states, dtype=np.intp), not self.held)

    def _weight(self, v: int) -> float:
        return round(self.sizes[v] + sum([self.sizes[w] for w in self.near[v]]), 6)

    def _put(self, scope: Scope, table: Costs) -> None:
        """Add a table, to the one over the same scope if there is one."""
        if not scope:
            self.total += float(table)
            return
        known = self.touching[scope[0]].get(scope)
        table = table if known is None else self.derived.plus(known, table)
        for v in scope:
            self.touching[v][scope] = table
            if known is None and len(scope) > 1:
                self.near[v].update(scope)
                self.near[v].discard(v)

    def _take(self, v: int) -> dict[Scope, Costs]:
        """Remove and return the tables that mention ``v``, and ``v`` from the graph."""
        found, self.touching[v] = self.touching[v], {}
        for scope in found:
            for w in scope:
                if w != v:
                    del self.touching[w][scope]
        for w in self.near[v]:
            self.near[w].discard(v)
        return found

    def _eliminate(self, v: int) -> set[int]:
        near = self.near[v]
        scope = tuple(sorted((v, *near)))
        axis = scope.index(v)
        total, least = self._minimise(scope, axis, self._take(v))
        self.trail.append((v, scope, total))
        self._put(scope[:axis] + scope[axis + 1 :], least)
        return near

    def _minimise(self, scope: Scope, axis: int, tables: dict[Scope, Costs]) -> tuple[Costs, Costs]:
        """The sum of tables over ``scope`` and its minimum over one dim; equal layers ask this once."""
        parts = sorted((tuple(map(scope.index, part)), part) for part in tables)
        sizes = [self.domains[w] for w in scope]

        def make(*found: Costs) -> tuple[Costs, Costs]:
            total = _sum(len(scope), sizes, [at for at, _ in parts], found)
            return total, np.minimum.reduce(total, axis=axis)

        how = (axis, *(at for at, _ in parts))
        least: tuple[Costs, Costs] = self.derived.get(how, tuple(tables[part] for _, part in parts), make)
        return least

    def _split(self, v: int) -> set[int]:
        """Minimise ``v`` away in groups of tables that are small enough together."""
        near, tables = self.near[v], self._take(v)
        groups: list[dict[Scope, Costs]] = []
        for scope in sorted(tables, key=lambda scope: (-tables[scope].size, scope)):
            fitting = (group for group in groups if self._entries({*scope, *chain(*group)}) <= self.limit)
            group = next(fitting, None)
            if group is None:
                groups.append(group := {})
            group[scope] = tables[scope]
        for group in groups:
            scope = tuple(sorted({*chain(*group)}))
            axis = scope.index(v)
            _, least = self._minimise(scope, axis, group)
            self._put(scope[:axis] + scope[axis + 1 :], least)
        return near

    def _entries(self, scope: Iterable[int]) -> float:
        return sum(self.sizes[v] for v in scope)

    def _hold(self, v: int, state: int) -> set[int]:
        """Fix ``v`` at a state."""
        self.held[v] = state
        for scope, table in self._take(v).items():
            self._put(tuple(w for w in scope if w != v), np.take(table, state, axis=scope.index(v)))
        return self.near[v]

    def _read_back(self) -> list[int]:
        states = [0] * len(self.domains)
        for v, state in self.held.items():
            states[v] = state
        for v, scope, total in reversed(self.trail):
            at = tuple([slice(None) if w == v else states[w] for w in scope])
            states[v] = int(total[at].argmin())
        return states


def _sum(dims: int, sizes: list[int], places: list[Scope], tables: Sequence[Costs]) -> Costs:
    """The sum of tables as one over all dims; ``places`` says which dims each has."""
    total: Costs | None = None
    for at, table in sorted(zip(places, tables, strict=True), key=lambda entry: -entry[1].size):
        shaped = table if len(at) == dims else table.reshape([n if i in at else 1 for i, n in enumerate(sizes)])
        total = np.broadcast_to(shaped, sizes) if total is None else total + shaped
    assert total is not None, "a variable has at least its own table"
    return total
