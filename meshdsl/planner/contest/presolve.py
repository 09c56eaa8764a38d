"""Exact contraction: an instance becomes much smaller, with the same optimum.

Four laws:

* a state that no finite total can have goes, for its costs, for a neighbour's or for its usage;
* a table that is the sum of a row and a column moves into its two variables;
* a variable of which each state of a neighbour allows one state only becomes a part of that
  neighbour, with its usage; for a variable with one neighbour, what costs and uses no less than
  another state does not count;
* a state that costs and uses no less than another of the same variable, whatever the neighbours do, goes.

What then uses no memory is eliminated as in any ``Network``.
"""

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.contest.instance import Core
from meshdsl.planner.mrf.network import Labels
from meshdsl.util.arrays import Costs

_LARGEST = 1 << 14  # entries that one step of elimination may touch
_PAIRS = 1 << 22  # entries that comparing all states of a variable may touch


class Presolve:
    """Applies the laws to a core until they change nothing."""

    def __init__(self, core: Core) -> None:
        self.core, self.network, self.usage = core, core.network, core.usage
        self._get = core.network.memo.get

    def run(self) -> None:
        """Contract; the core is changed in place."""
        before = (0, 0.0, 0)
        while self.core.feasible and before != self._size():
            before = self._size()
            self._consistent()
            if not self.core.feasible:
                return
            self.usage.tidy()
            self._separate()
            self._prune_leaves()
            self._merge()
            self._dominated()
            self.network.reduce(_LARGEST, frozenset(self.usage.held))

    def _size(self) -> tuple[int, float, int]:
        network = self.network
        return len(network.unary), sum([u.size for u in network.unary.values()]), self.usage.limit.size

    def _consistent(self) -> None:
        """Drop states that nothing finite goes with."""
        network, todo = self.network, dict.fromkeys(self.network.unary)
        for v in self.usage.held:
            self._forbid(v, self.usage.impossible(v))
        for v, near in network.pairwise.items():
            for table in near.values():
                self._forbid(v, self._get("hopeless", (table,), _hopeless))
        while todo:
            v, _ = todo.popitem()
            keep: Labels | None = self._get("finite", (network.unary[v],), _finite)
            if keep is None:
                continue
            if not keep.size:
                return
            self.core.restrict(v, keep)
            for w in network.pairwise[v]:
                if self._forbid(w, self._get("hopeless", (network.pairwise[w][v],), _hopeless)):
                    todo[w] = None

    def _forbid(self, v: int, bad: NDArray[np.bool_] | None) -> bool:
        """Forbid some states of a variable; whether there were any."""
        if bad is not None:
            self.network.unary[v] = self._get("without", (self.network.unary[v], bad), _without)
        return bad is not None

    def _separate(self) -> None:
        """Move tables that are sums of a row and a column into their variables."""
        network = self.network
        for v in list(network.unary):
            for w in [w for w in network.pairwise[v] if v < w]:
                parts = self._get("parts", (network.pairwise[v][w],), _parts)
                if parts is not None:
                    del network.pairwise[v][w], network.pairwise[w][v]
                    network.unary[v] = network.memo.sum(network.unary[v], parts[0])
                    network.unary[w] = network.memo.sum(network.unary[w], parts[1])

    def _prune_leaves(self) -> None:
        """Of a variable with one neighbour, forbid states that cost and use no less than another there."""
        network = self.network
        for v, near in network.pairwise.items():
            if len(near) == 1 and v in self.usage.held:
                ((w, table),) = near.items()
                uses = tuple(self.usage.held[v].values())
                if table.size * table.shape[0] <= _PAIRS:
                    pruned = self._get("pruned", (network.unary[v], table, *uses), _pruned)
                    if pruned is not table:
                        near[w], network.pairwise[w][v] = pruned, network.memo.transpose(pruned)

    def _merge(self) -> None:
        """Make variables that a neighbour determines parts of it."""
        network = self.network
        todo = dict.fromkeys(network.unary)
        while todo:
            v, _ = todo.popitem()
            if v not in network.unary:
                continue
            for w, table in network.pairwise[v].items():
                image = self._get("image", (table,), _image)
                if image is not None and self._worth(v, w):
                    todo.update(dict.fromkeys(network.pairwise[v]))
                    self.core.merge(v, w, image)
                    break

    def _worth(self, v: int, w: int) -> bool:
        """Whether merging ``v`` into w does not make more table entries."""
        network = self.network
        rest = sum([network.unary[u].size for u in network.pairwise[v] if u != w and u not in network.pairwise[w]])
        mine, other = network.unary[v].size, network.unary[w].size
        return rest * (other - mine) <= mine * other

    def _dominated(self) -> None:
        """Drop states that another one of the same variable replaces at no loss."""
        network = self.network
        for v in list(network.unary):
            near = network.pairwise[v]
            uses = tuple(self.usage.held.get(v, {}).values())
            if network.unary[v].size * sum([table.size for table in near.values()]) <= _PAIRS:
                keep = self._get(("best", len(near)), (network.unary[v], *near.values(), *uses), _Best(len(near)))
                if keep is not None:
                    self.core.restrict(v, keep)


def _finite(unary: Costs) -> Labels | None:
    finite = np.isfinite(unary)
    return None if finite.all() else np.flatnonzero(finite)


def _hopeless(table: Costs) -> NDArray[np.bool_] | None:
    bad = np.asarray(~np.isfinite(table).any(axis=1))
    return bad if bad.any() else None


def _without(unary: Costs, hopeless: NDArray[np.bool_]) -> Costs:
    return np.where(hopeless, np.inf, unary)


def _parts(table: Costs) -> tuple[Costs, Costs] | None:
    if not np.isfinite(table).all():
        return None
    column, row = table[:, 0], table[0] - table[0, 0]
    return (column, row) if np.array_equal(table, column[:, None] + row) else None


def _image(table: Costs) -> Labels | None:
    """The one state that each state of the neighbour allows, if there is one."""
    finite = np.isfinite(table)
    return finite.argmax(axis=0) if (finite.sum(axis=0) == 1).all() else None


def _pruned(unary: Costs, table: Costs, *uses: Costs) -> Costs:
    """A leaf's table without what costs and uses no less than another state; of equal states the first stays."""
    costs = unary[:, None] + table
    no_more = np.ones((unary.size, unary.size), dtype=bool)  # [i, k]: k uses no more than i
    alike = no_more.copy()
    for use in uses:
        no_more &= use[None] <= use[:, None]
        alike &= use[None] == use[:, None]
    first = np.arange(unary.size)[None] < np.arange(unary.size)[:, None]
    cheaper = costs[None] < costs[:, None]
    no_dearer = costs[None] <= costs[:, None]
    better = no_more[..., None] & (cheaper | (no_dearer & (~alike | first)[..., None]))
    worse = better.any(axis=1) & np.isfinite(table)
    return np.where(worse, np.inf, table) if worse.any() else table


class _Best:
    """States that no other one replaces; None if that is all.

    Args:
      tables: how many of the arrays are tables.
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
        alike = extra == 0
        for use in arrays[self.tables :]:
            replaces &= use[None] <= use[:, None]
            alike &= use[None] == use[:, None]
        first = np.arange(unary.size)[None] < np.arange(unary.size)[:, None]
        mutual = replaces & replaces.T
        worse = (replaces & (~mutual | first)).any(axis=1)
        return np.flatnonzero(~worse) if worse.any() else None
