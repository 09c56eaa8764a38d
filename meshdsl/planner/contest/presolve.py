"""Presolve: exact reductions, after which an instance is much smaller and has the same optimum.

Four laws, applied until they change nothing:

* a state that has no finite total, for its own costs, a neighbour's or its usage, is pruned (arc consistency);
* a table that is the sum of a row and a column moves into the unary costs of its two variables;
* a variable is merged into a neighbour if each state of the neighbour allows only one of its states, and brings its
  usage along; for a variable with one neighbour, a state that costs and uses no less than another one is forbidden;
* a state that costs and uses no less than another of the same variable, whatever the neighbours take, is pruned: it is
  dominated (Goldstein 1994 calls this dead-end elimination).

Variables that then use no memory are eliminated as in any ``Network``.
"""

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.contest.instance import Core
from meshdsl.planner.limits import DEFAULT_CONTEST_LIMITS, ContestLimits
from meshdsl.planner.mrf.network import Labels
from meshdsl.util.arrays import Costs


class Presolve:
    """Applies the laws to a core until they change nothing."""

    def __init__(self, core: Core, limits: ContestLimits = DEFAULT_CONTEST_LIMITS) -> None:
        self.limits = limits
        self.core, self.network, self.usage = core, core.network, core.usage
        self._get = core.network.memo.get

    def run(self) -> None:
        """Reduces the core in place."""
        before = (0, 0.0, 0)
        while self.core.is_feasible and before != self._size():
            before = self._size()
            self._make_consistent()
            if not self.core.is_feasible:
                return
            self.usage.simplify()
            self._move_separable_tables()
            self._prune_leaf_tables()
            self._merge_determined()
            self._prune_dominated()
            self.network.reduce(self.limits.elimination_entries, frozenset(self.usage.items))

    def _size(self) -> tuple[int, float, int]:
        network = self.network
        return len(network.unary), sum([u.size for u in network.unary.values()]), self.usage.limit.size

    def _make_consistent(self) -> None:
        """Prunes states without a finite total, propagating along edges (AC-3)."""
        network, todo = self.network, dict.fromkeys(self.network.unary)
        for v in self.usage.items:
            self._forbid(v, self.usage.infeasible_states(v))
        for v, near in network.pairwise.items():
            for table in near.values():
                self._forbid(v, self._get("hopeless", (table,), _unsupported))
        while todo:
            v, _ = todo.popitem()
            keep: Labels | None = self._get("finite", (network.unary[v],), _finite_states)
            if keep is None:
                continue
            if not keep.size:
                return
            self.core.restrict(v, keep)
            for w in network.pairwise[v]:
                if self._forbid(w, self._get("hopeless", (network.pairwise[w][v],), _unsupported)):
                    todo[w] = None

    def _forbid(self, v: int, bad: NDArray[np.bool_] | None) -> bool:
        """Forbids some states of a variable; returns whether there were any."""
        if bad is not None:
            self.network.unary[v] = self._get("without", (self.network.unary[v], bad), _forbidden)
        return bad is not None

    def _move_separable_tables(self) -> None:
        """Moves tables that are sums of a row and a column into the unary costs of their variables."""
        network = self.network
        for v in list(network.unary):
            for w in [w for w in network.pairwise[v] if v < w]:
                parts = self._get("parts", (network.pairwise[v][w],), _row_and_column)
                if parts is not None:
                    del network.pairwise[v][w], network.pairwise[w][v]
                    network.unary[v] = network.memo.sum(network.unary[v], parts[0])
                    network.unary[w] = network.memo.sum(network.unary[w], parts[1])

    def _prune_leaf_tables(self) -> None:
        """Forbids pairs of a leaf whose state costs and uses no less than another one of the leaf there."""
        network = self.network
        for v, near in network.pairwise.items():
            if len(near) == 1 and v in self.usage.items:
                ((w, table),) = near.items()
                uses = tuple(self.usage.items[v].values())
                if table.size * table.shape[0] <= self.limits.comparison_entries:
                    pruned = self._get("pruned", (network.unary[v], table, *uses), _without_dominated_pairs)
                    if pruned is not table:
                        near[w], network.pairwise[w][v] = pruned, network.memo.transpose(pruned)

    def _merge_determined(self) -> None:
        """Merges variables that a neighbour determines into it."""
        network = self.network
        todo = dict.fromkeys(network.unary)
        while todo:
            v, _ = todo.popitem()
            if v not in network.unary:
                continue
            for w, table in network.pairwise[v].items():
                image = self._get("image", (table,), _determined_states)
                if image is not None and self._is_worth_merging(v, w):
                    todo.update(dict.fromkeys(network.pairwise[v]))
                    self.core.merge(v, w, image)
                    break

    def _is_worth_merging(self, v: int, w: int) -> bool:
        """Whether merging ``v`` into w makes no more table entries."""
        network = self.network
        rest = sum([network.unary[u].size for u in network.pairwise[v] if u != w and u not in network.pairwise[w]])
        mine, other = network.unary[v].size, network.unary[w].size
        return rest * (other - mine) <= mine * other

    def _prune_dominated(self) -> None:
        """Prunes states that another one of the same variable replaces at no loss."""
        network = self.network
        for v in list(network.unary):
            near = network.pairwise[v]
            uses = tuple(self.usage.items.get(v, {}).values())
            if network.unary[v].size * sum([table.size for table in near.values()]) <= self.limits.comparison_entries:
                keep = self._get(
                    ("best", len(near)), (network.unary[v], *near.values(), *uses), _UndominatedStates(len(near))
                )
                if keep is not None:
                    self.core.restrict(v, keep)


def _finite_states(unary: Costs) -> Labels | None:
    finite = np.isfinite(unary)
    return None if finite.all() else np.flatnonzero(finite)


def _unsupported(table: Costs) -> NDArray[np.bool_] | None:
    bad = np.asarray(~np.isfinite(table).any(axis=1))
    return bad if bad.any() else None


def _forbidden(unary: Costs, bad: NDArray[np.bool_]) -> Costs:
    return np.where(bad, np.inf, unary)


def _row_and_column(table: Costs) -> tuple[Costs, Costs] | None:
    if not np.isfinite(table).all():
        return None
    column, row = table[:, 0], table[0] - table[0, 0]
    return (column, row) if np.array_equal(table, column[:, None] + row) else None


def _determined_states(table: Costs) -> Labels | None:
    """Returns the only state that each state of the neighbour allows; None if one allows several or none."""
    finite = np.isfinite(table)
    return finite.argmax(axis=0) if (finite.sum(axis=0) == 1).all() else None


def _without_dominated_pairs(unary: Costs, table: Costs, *uses: Costs) -> Costs:
    """Returns a leaf's table without pairs that cost and use no less than another state; the first of equals stays."""
    costs = unary[:, None] + table
    no_more = np.ones((unary.size, unary.size), dtype=bool)  # [i, k]: k uses no more than i
    equal = no_more.copy()
    for use in uses:
        no_more &= use[None] <= use[:, None]
        equal &= use[None] == use[:, None]
    first = np.arange(unary.size)[None] < np.arange(unary.size)[:, None]
    cheaper = costs[None] < costs[:, None]
    no_costlier = costs[None] <= costs[:, None]
    better = no_more[..., None] & (cheaper | (no_costlier & (~equal | first)[..., None]))
    worse = better.any(axis=1) & np.isfinite(table)
    return np.where(worse, np.inf, table) if worse.any() else table


class _UndominatedStates:
    """Returns the states that no other one dominates; None if these are all.

    Args:
      tables: number of the arrays that are tables; the others are usages.
    """

    def __init__(self, tables: int) -> None:
        self.tables = tables

    def __call__(self, unary: Costs, *arrays: Costs) -> Labels | None:
        with np.errstate(invalid="ignore"):  # where both are infinite
            extra = unary[None] - unary[:, None]  # [i, k]: what k costs more than i
            for table in arrays[: self.tables]:
                more = np.where(np.isinf(table)[:, None], -np.inf, table[None] - table[:, None])
                extra = extra + more.max(axis=2)
        replaces = extra <= 0
        equal = extra == 0
        for use in arrays[self.tables :]:
            replaces &= use[None] <= use[:, None]
            equal &= use[None] == use[:, None]
        first = np.arange(unary.size)[None] < np.arange(unary.size)[:, None]
        mutual = replaces & replaces.T
        worse = (replaces & (~mutual | first)).any(axis=1)
        return np.flatnonzero(~worse) if worse.any() else None
