"""Exact minimisation of a sum of tables over discrete variables: bucket elimination (Dechter 1999).

Take a variable, add up the tables that mention it (its bucket), minimise it away, and put the result back as a table
over its neighbours; on a tree this is the Viterbi algorithm. The largest table decides the cost, so the variable whose
table would be smallest is eliminated first. Training steps are narrow: a table of one mesh axis has a few thousand
entries, whatever the depth of the model.

Where a table would exceed ``cap`` entries, ``eliminate`` fixes the variable with the largest domain in it at its
incumbent state (conditioning): the result is then still at least as good as the incumbent, but no longer proved
optimal; ``EliminationResult.exact`` says so. ``lower_bound`` minimises the tables that mention the variable in groups
instead, each group by itself (mini-buckets; Dechter and Rish 2003).

This is the general elimination of the planner. ``network.Network.reduce`` is a special case that keeps a network
pairwise, and ``contest.bucket_kernels`` a compiled one for small subgraphs; why they are separate is said in
``network``.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.network import Memo
from meshdsl.util.arrays import Costs

Scope = tuple[int, ...]  # variables of a table, by index, one per dim


@dataclass(frozen=True)
class EliminationResult:
    """The least cost found, a state per variable, and whether the cost was proved minimal."""

    cost: float
    states: NDArray[np.intp]
    exact: bool


def eliminate(
    domains: Sequence[int],
    tables: Iterable[tuple[Scope, Costs]],
    incumbent: Sequence[int],
    cap: int,
    memo: Memo | None = None,
) -> EliminationResult:
    """Minimises a sum of tables over one or two variables each; the result never costs more than ``incumbent``.

    Args:
      domains: number of states per variable.
      tables: tables with their scopes, whose variables ascend.
      incumbent: a state per variable.
      cap: entries of the largest table that may be created.
      memo: results on the same tables, which equal layers share.
    """
    return _Elimination(domains, tables, incumbent, cap, memo or Memo()).run()


def lower_bound(domains: Sequence[int], tables: Iterable[tuple[Scope, Costs]], cap: int) -> float:
    """Returns a lower bound on the minimum; the minimum itself where no table exceeds ``cap`` entries."""
    return _Elimination(domains, tables, None, cap, Memo()).run().cost


class _Elimination:
    """One run. Without an incumbent, buckets that are too large are split: the cost is a bound, the states are void."""

    def __init__(
        self,
        domains: Sequence[int],
        tables: Iterable[tuple[Scope, Costs]],
        incumbent: Sequence[int] | None,
        cap: int,
        memo: Memo,
    ) -> None:
        self.domains, self.incumbent, self.memo = domains, incumbent, memo
        self.log_sizes, self.log_cap = [float(np.log2(d)) for d in domains], float(np.log2(cap))
        self.total = 0.0
        self.buckets: list[dict[Scope, Costs]] = [{} for _ in domains]  # per variable, the tables that mention it
        self.neighbours: list[set[int]] = [set() for _ in domains]
        self.trail: list[tuple[int, Scope, Costs]] = []  # eliminated variables with the sums of their buckets
        self.fixed: dict[int, int] = {}
        for scope, table in tables:
            single = tuple(domains[v] == 1 for v in scope)
            if any(single):  # slice variables of one state away
                at = tuple(0 if one else slice(None) for one in single)
                table = memo.get(single, (table,), lambda t, at=at: t[at])
                scope = tuple(v for v in scope if domains[v] > 1)
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
            if weight <= self.log_cap:
                touched = self._eliminate(v)
            elif self.incumbent is None:
                touched = self._split(v)
            else:
                v = max((v, *self.neighbours[v]), key=lambda w: (self.domains[w], w))
                touched = self._fix(v, int(self.incumbent[v]))
            alive.discard(v)
            for w in touched:
                weights[w] = self._weight(w)
                heapq.heappush(queue, (weights[w], w))
        states = [] if self.incumbent is None else self._decode()
        return EliminationResult(self.total, np.array(states, dtype=np.intp), not self.fixed)

    def _weight(self, v: int) -> float:
        """Returns the binary logarithm of the entries that v's bucket would sum to, rounded so that ties are ties."""
        return round(self.log_sizes[v] + sum([self.log_sizes[w] for w in self.neighbours[v]]), 6)

    def _put(self, scope: Scope, table: Costs) -> None:
        """Adds a table, to the one over the same scope if there is one."""
        if not scope:
            self.total += float(table)
            return
        known = self.buckets[scope[0]].get(scope)
        table = table if known is None else self.memo.sum(known, table)
        for v in scope:
            self.buckets[v][scope] = table
            if known is None and len(scope) > 1:
                self.neighbours[v].update(scope)
                self.neighbours[v].discard(v)

    def _take(self, v: int) -> dict[Scope, Costs]:
        """Removes ``v`` from the graph and returns its bucket."""
        bucket, self.buckets[v] = self.buckets[v], {}
        for scope in bucket:
            for w in scope:
                if w != v:
                    del self.buckets[w][scope]
        for w in self.neighbours[v]:
            self.neighbours[w].discard(v)
        return bucket

    def _eliminate(self, v: int) -> set[int]:
        neighbours = self.neighbours[v]
        scope = tuple(sorted((v, *neighbours)))
        axis = scope.index(v)
        total, least = self._minimise(scope, axis, self._take(v))
        self.trail.append((v, scope, total))
        self._put(scope[:axis] + scope[axis + 1 :], least)
        return neighbours

    def _minimise(self, scope: Scope, axis: int, tables: dict[Scope, Costs]) -> tuple[Costs, Costs]:
        """Returns the sum of tables over ``scope`` and its minimum over one dim, once for equal layers."""
        parts = sorted((tuple(map(scope.index, part)), part) for part in tables)
        sizes = [self.domains[w] for w in scope]

        def make(*found: Costs) -> tuple[Costs, Costs]:
            total = _sum(len(scope), sizes, [at for at, _ in parts], found)
            return total, np.minimum.reduce(total, axis=axis)

        key = (axis, *(at for at, _ in parts))
        least: tuple[Costs, Costs] = self.memo.get(key, tuple(tables[part] for _, part in parts), make)
        return least

    def _split(self, v: int) -> set[int]:
        """Minimises ``v`` away in groups of tables, mini-buckets, whose sums stay within the cap."""
        neighbours, tables = self.neighbours[v], self._take(v)
        groups: list[dict[Scope, Costs]] = []
        for scope in sorted(tables, key=lambda scope: (-tables[scope].size, scope)):
            fitting = (group for group in groups if self._log_entries({*scope, *chain(*group)}) <= self.log_cap)
            group = next(fitting, None)
            if group is None:
                groups.append(group := {})
            group[scope] = tables[scope]
        for group in groups:
            scope = tuple(sorted({*chain(*group)}))
            axis = scope.index(v)
            _, least = self._minimise(scope, axis, group)
            self._put(scope[:axis] + scope[axis + 1 :], least)
        return neighbours

    def _log_entries(self, scope: Iterable[int]) -> float:
        return sum(self.log_sizes[v] for v in scope)

    def _fix(self, v: int, state: int) -> set[int]:
        """Fixes ``v`` at a state."""
        self.fixed[v] = state
        for scope, table in self._take(v).items():
            self._put(tuple(w for w in scope if w != v), np.take(table, state, axis=scope.index(v)))
        return self.neighbours[v]

    def _decode(self) -> list[int]:
        """Returns the best states, in reverse order of elimination."""
        states = [0] * len(self.domains)
        for v, state in self.fixed.items():
            states[v] = state
        for v, scope, total in reversed(self.trail):
            at = tuple([slice(None) if w == v else states[w] for w in scope])
            states[v] = int(total[at].argmin())
        return states


def _sum(dims: int, sizes: list[int], places: list[Scope], tables: Sequence[Costs]) -> Costs:
    """Returns the sum of tables as one over all dims; ``places`` are the dims of each, the largest added first."""
    total: Costs | None = None
    for at, table in sorted(zip(places, tables, strict=True), key=lambda entry: -entry[1].size):
        shaped = table if len(at) == dims else table.reshape([n if i in at else 1 for i, n in enumerate(sizes)])
        total = np.broadcast_to(shaped, sizes) if total is None else total + shaped
    assert total is not None, "a variable has at least its own table"
    return total
