"""Sweeps: solve one mesh axis exactly, the others held, until nothing improves.

With one axis free, what reduction has left of a training step is narrow and variable elimination
solves it exactly in milliseconds. Sweeping over the axes converges to a point that no change of
a whole axis can improve. (Solving the axes independently of each other instead collapses to data
parallelism on every axis.) Several axes can also move together: every variable takes one state
on all of them, or stays as it is.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.eliminate import eliminate
from meshdsl.planner.exact import Costs
from meshdsl.planner.identity import identity
from meshdsl.planner.network import Network
from meshdsl.planner.trail import Labels

Axes = tuple[int, ...]  # mesh axes by number


class Sweeper:
    """Improves states of the variables of a reduced network; those it has lost follow from these.

    Args:
      width: number of mesh axes; the network's marks have a column for each.
      cap: entries of the largest table.
    """

    def __init__(self, network: Network, width: int, cap: int) -> None:
        self.network, self.width, self.cap = network, width, cap
        self._at = {v: i for i, v in enumerate(sorted(network.unary))}
        self._domains: dict[tuple[int, Axes, int | tuple[int, ...]], Labels] = {}

    def sweep(self, start: Labels, order: Sequence[Axes], rounds: int) -> Labels:
        """Improve ``start``, taking groups of mesh axes in ``order``, until none has anything left to change."""
        best = {v: int(start[v]) for v in self._at}
        settled: set[Axes] = set()
        for axes in list(order) * rounds:
            solved = self._solve(best, axes)
            settled = settled | {axes} if solved == best else {axes}
            best = solved
            if len(settled) == len(order):
                break
        return self.network.decode(list(best), list(best.values()))

    def _solve(self, states: dict[int, int], axes: Axes) -> dict[int, int]:
        """The best states in which every variable moves on one axis, or on several alike, or stays as it is."""
        domains = {v: self._domain(v, axes, states[v]) for v in self._at}
        incumbent = [int(np.searchsorted(domains[v], states[v])) for v in self._at]
        sizes = [len(domain) for domain in domains.values()]
        answer = eliminate(sizes, self._tables(domains), incumbent, self.cap, self.network.derived)
        return {v: int(domain[at]) for (v, domain), at in zip(domains.items(), answer.states, strict=True)}

    def _tables(self, domains: dict[int, Labels]) -> Iterable[tuple[tuple[int, ...], Costs]]:
        cut = self.network.derived.get
        for v, i in self._at.items():
            yield (i,), cut("cut", (self.network.unary[v], domains[v]), lambda table, a: table[a])
            for w, table in self.network.near[v].items():
                if v < w:
                    sources = (table, domains[v], domains[w])
                    yield (i, self._at[w]), cut("cut", sources, lambda table, a, b: table[a[:, None], b])

    def _domain(self, v: int, axes: Axes, state: int) -> Labels:
        """The states that ``v`` may move to; equal questions get the same array."""
        marks = self.network.marks[v]
        assert marks is not None, "the variables of a plan say what their states mean"
        others = [axis for axis in range(self.width) if axis not in axes]
        held = state if len(axes) > 1 else tuple(marks[state, others].tolist())
        key = (identity(marks), axes, held)
        if key not in self._domains:
            self._domains[key] = np.flatnonzero(_movable(marks, state, axes, others))
        return self._domains[key]


def _movable(marks: Labels, state: int, axes: Axes, others: list[int]) -> NDArray[np.bool_]:
    alike = (marks[:, axes] == marks[:, axes[:1]]).all(axis=1)
    same = (marks[:, others] == marks[state, others]).all(axis=1)
    movable: NDArray[np.bool_] = alike & same
    movable[state] = True
    return movable


def sweep_order(groups: Sequence[Axes]) -> list[Axes]:
    """All groups of mesh axes together, then one by one."""
    return [*([tuple(axis for axes in groups for axis in axes)] if len(groups) > 1 else []), *groups]
