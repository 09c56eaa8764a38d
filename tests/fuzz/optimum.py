"""The cheapest plan of a small problem, by looking at all of them.

Nodes are decided one by one. What is decided costs what its nodes and the moves of its finished
values cost, and the rest at least its nodes; where that is more than a plan is known to cost, no
plan that goes on from there is looked at.
"""

from functools import cache

import numpy as np

from meshdsl.planner.costs.steiner import steiner_tree
from meshdsl.planner.problem.model import Model


def cheapest(model: Model, known: float, visits: int) -> float | None:
    """The least cost of a plan, infinite if none costs ``known`` or less; None after so many partial plans."""
    if len(model.nodes) > visits // 50:
        return None
    search = _Search(model, known, visits)
    search.extend(0, 0.0)
    return search.best if search.left > 0 else None


class _Search:
    """Depth first over the states of all nodes; ``left`` counts partial plans down."""

    def __init__(self, model: Model, known: float, visits: int) -> None:
        self.model, self.known, self.left, self.best = model, known, visits, np.inf
        self.units = [model.unary[n] for n in range(len(model.nodes))]
        self.states = [sorted(map(tuple, np.argwhere(np.isfinite(u)).tolist()), key=u.__getitem__) for u in self.units]
        self.rest = np.cumsum([0.0, *(u.min() for u in reversed(self.units))])[::-1]
        self.finished = self._finished()
        self.chosen: list[tuple[int, ...]] = []
        self.tree = cache(lambda value, own, wanted: self._tree(value, own, wanted))

    def extend(self, n: int, cost: float) -> None:
        """Every state of node ``n`` after the chosen ones."""
        if n == len(self.states):
            self.best = self.known = cost
        else:
            for state in self.states[n]:
                self._enter(n, state, cost + float(self.units[n][state]))

    def _enter(self, n: int, state: tuple[int, ...], cost: float) -> None:
        self.left -= 1
        if self.left <= 0 or cost + self.rest[n + 1] > self.known:
            return
        self.chosen.append(state)
        cost += sum(map(self._moves, self.finished[n]))
        if cost + self.rest[n + 1] <= self.known:
            self.extend(n + 1, cost)
        self.chosen.pop()

    def _moves(self, value: int) -> float:
        """Cost of the moves of a value whose readers are all decided."""
        own, *wanted = (self._layout(n, port) for n, port in self.model.wiring.ends_of(value))
        return float(self.tree(value, own, frozenset(wanted)))

    def _tree(self, value: int, own: int, wanted: frozenset[int]) -> float:
        closure = self.model.domain(value)
        return steiner_tree(closure.costs, closure.transit_costs, own, wanted)[0] * self.model.weight(value)

    def _layout(self, n: int, port: int) -> int:
        return int(self.model.layout_ids(n, port, np.array(self.chosen[n])))

    def _finished(self) -> list[list[int]]:
        """Per node, the values of which it is the last one concerned."""
        found: list[list[int]] = [[] for _ in self.states]
        for value in (v.id for v in self.model.problem.index.values):
            found[max(n for n, _ in self.model.wiring.ends_of(value))].append(value)
        return found
