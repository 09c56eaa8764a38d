"""The certificate: a proved lower bound on the seconds of every plan of the problem.

The bound speaks of all mesh axes at once. Every node becomes one variable over its joint states
and every value one table between its readers; then, alternating,

* *elimination*: variables with one or two neighbours are minimised away exactly;
* *message passing* (TRW-S, Kolmogorov 2006) shifts cost between the tables so that the sum of
  their separate minima, which no plan can undercut, rises;
* *fixing*: a state whose own bound passes the best known plan cannot be in a better one and goes.

If what is left is narrow enough, elimination finishes the proof and the bound is the optimum.

Shared moves are bounded, not ignored: the tree of moves of a value with m readers costs at
least the moves to some hub plus a part of every reader's own moves from there, where the
parts of any m - 1 readers add up to at most one (at its first fork a tree has at least two
branches, and each branch costs at least any of its ends). With two readers that is exact.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.closure import TIES, Costs, Ids
from meshdsl.planner.extract import Choice
from meshdsl.planner.hub import Hub, make_hub
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.pairwise import Pairwise

_SMALL = 1 << 20
_PASSES = 4


class Certificate:
    """A lower bound on the problem that can be raised, and the plans it suggests on the way.

    Args:
      best: a plan; its cost is what the bound is compared with, and states that cannot beat
        it are dropped.
      before: an earlier certificate of the problem, whose bound holds and whose tables are used again.
    """

    def __init__(self, model: Model, best: Choice, before: "Certificate | None" = None) -> None:
        self.model, self.best = model, best
        self._tables: _Tables = before._tables if before else _Tables()
        self._joint = _Joint(model, best, self._tables)
        self._network = self._joint.network
        self._network.reduce(_SMALL)
        self.bound: float = max(before.bound if before else 0.0, self._network.bound())

    @property
    def seconds(self) -> float:
        """Seconds that no plan of the problem can undercut; at most those of the best plan."""
        safe = self.bound - 1.0 - 1e-9 * abs(self.bound)  # sums of floats round
        return max(0.0, min(safe, self.best.cost // TIES)) * self.model.scale.unit

    @property
    def gap(self) -> float:
        """How far the best plan can be from the optimum at most, as a part of its seconds."""
        seconds = self.model.scale.seconds(self.best.cost)
        return (seconds - self.seconds) / seconds if seconds else 0.0

    @property
    def work(self) -> int:
        """Entries of all tables: what one pass of messages costs."""
        return sum(table.size for table in self._network.edges.values())

    def tighten(self) -> None:
        """Pass messages, drop states that cannot be optimal, eliminate what has become small."""
        self._network.pass_messages(_PASSES)
        self.bound = max(self.bound, self._network.bound())
        self._network.fix(self.best.cost // TIES)
        self._network.reduce(_SMALL)
        self.bound = max(self.bound, self._network.bound())

    def suggest(self) -> Assignment:
        """The plan that the messages point to."""
        chosen = self._network.decode()
        return np.array([states.rows[chosen[n]] for n, states in enumerate(self._joint.states)], dtype=np.intp)

    def offer(self, choice: Choice) -> None:
        """Keep ``choice`` if it is better than the best plan."""
        if choice.cost < self.best.cost:
            self.best = choice


@dataclass(frozen=True)
class _States:
    """Joint states of a node that are possible, as row numbers per axis, and their cost."""

    rows: NDArray[np.intp]
    cost: Costs


@dataclass(frozen=True)
class _Tables:
    """What equal parts of a problem share: hubs, states, and layouts by state."""

    hubs: dict[Hashable, Hub] = field(default_factory=dict)
    states: dict[Hashable, _States] = field(default_factory=dict)
    layouts: dict[Hashable, Ids] = field(default_factory=dict)


class _Joint:
    """The joint problem as a pairwise network, costs in whole units without ties."""

    def __init__(self, model: Model, best: Choice, tables: _Tables) -> None:
        self.model, self.best = model, best
        self.limit = best.cost // TIES + 1.0
        self._hubs, self._seen, self._layouts = tables.hubs, tables.states, tables.layouts
        self.states = [self._states(n) for n in range(len(model.nodes))]
        self.network = Pairwise([s.cost for s in self.states])
        for value in model.problem.defined:
            self._add(value)

    def _states(self, n: int) -> _States:
        cost = self.model.unit(n)
        key = (id(self.model.tables[n]), self.model.nodes[n].trips, None if self.model.allowed[n] is None else n)
        if key not in self._seen:
            rows = np.argwhere(np.isfinite(cost))
            self._seen[key] = _States(rows, _units(cost[tuple(rows.T)]))
        return self._seen[key]

    def _layout(self, n: int, port: int) -> Ids:
        closure = self.model.closures[self.model.nodes[n].ports[port].value.id]
        key = (id(self.states[n]), port, closure.number, self.model.orders[n])
        if key not in self._layouts:
            codes = self.model.tables[n].codes[port]
            at = tuple(codes[column] for column in self.states[n].rows.T)
            self._layouts[key] = closure.ids(self.model.orders[n])[at]
        return self._layouts[key]

    def _add(self, value: int) -> None:
        readers = sorted(self.model.problem.used.get(value, []))
        d, p = self.model.problem.defined[value]
        own = self._layout(d, p)
        costs, trips = self.model.closures[value].costs, self.model.trips(value)
        if len(readers) == 1:
            n, q = readers[0]
            self._join(d, n, _units(costs[np.ix_(own, self._layout(n, q))]) * trips)
        elif readers:
            self._add_shared(value, d, own, readers)

    def _add_shared(self, value: int, d: int, own: Ids, readers: list[tuple[int, int]]) -> None:
        model, trips = self.model, self.model.trips(value)
        parts = self._parts(value, readers)
        layouts = [self._layout(n, q) for n, q in readers]
        unique = [np.unique(r, return_inverse=True) for r in layouts]
        owns, own_of = np.unique(own, return_inverse=True)
        key = (model.closures[value].number, owns.tobytes(), parts, *(u.tobytes() for u, _ in unique))
        if key not in self._hubs:
            self._hubs[key] = make_hub(_units(model.closures[value].costs), owns, tuple(u for u, _ in unique), parts)
        hub = self._hubs[key]
        reads, paid = hub.reads, hub.paid
        if len(hub.own) == len(owns):
            for (n, _), (_, at), table in zip(readers, unique, reads, strict=True):
                self._join(d, n, table[np.ix_(own_of, at)] * trips)
            return
        variable = self.network.new(np.zeros(len(hub.own)))
        self._join(d, variable, np.where(hub.own[None] == own_of[:, None], paid[None] * trips, np.inf))
        for (n, _), (_, at), table in zip(readers, unique, reads, strict=True):
            self._join(variable, n, table[:, at] * trips)

    def _parts(self, value: int, readers: list[tuple[int, int]]) -> tuple[float, ...]:
        """The part of each reader's own moves that counts: more for those that move in the best plan."""
        m = len(readers)
        if m == 2:
            return (1.0, 1.0)
        d, p = self.model.problem.defined[value]
        rows = self.best.rows
        own = int(self.model.layout_ids(d, p, rows[d]))
        moving = [int(self.model.layout_ids(n, q, rows[n])) != own for n, q in readers]
        k = sum(moving)
        if k == 0:
            return (1 / (m - 1),) * m
        return tuple(1 / k if moves else 0.0 for moves in moving) if k < m else (1 / (m - 1),) * m

    def _join(self, a: int, b: int, table: Costs) -> None:
        if a == b:
            self.network.add_unary(a, np.minimum(np.diagonal(table), self.limit))
        else:
            self.network.add(a, b, np.minimum(table, self.limit))


def _units(cost: Costs) -> Costs:
    """Costs in units, rounded down, ties left out."""
    return np.floor(cost / TIES)
