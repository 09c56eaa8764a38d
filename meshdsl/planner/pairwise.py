"""A network of pairwise tables with a lower bound that can be raised; see ``bound``."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.closure import Costs

_Messages = dict[tuple[int, int], Costs]  # by (from, to), over the states of the latter


@dataclass(frozen=True)
class _Gone:
    """A variable that was eliminated: its states and tables at that time, by neighbour."""

    variable: int
    labels: NDArray[np.intp]
    unary: Costs
    ends: tuple[tuple[int, NDArray[np.intp], Costs], ...]


class Pairwise:
    """Variables with a table each, and a table per edge (a, b) with a < b.

    At any time ``constant + sum of minima of all tables`` is a lower bound on the minimum of the
    sum; every operation here keeps the sum the same for all states that are left.
    """

    def __init__(self, unary: list[Costs]) -> None:
        self.unary = {v: table.copy() for v, table in enumerate(unary)}
        self.edges: dict[tuple[int, int], Costs] = {}
        self.near: dict[int, set[int]] = {v: set() for v in self.unary}
        self.constant = 0.0
        self.labels = {v: np.arange(len(table)) for v, table in self.unary.items()}
        self.trail: list[_Gone] = []

    def new(self, unary: Costs) -> int:
        """Add a variable."""
        v = len(self.labels)
        self.unary[v], self.near[v], self.labels[v] = unary, set(), np.arange(len(unary))
        return v

    def add_unary(self, v: int, table: Costs) -> None:
        """Add to the table of one variable."""
        self.unary[v] = self.unary[v] + table

    def add(self, a: int, b: int, table: Costs) -> None:
        """Add to the table of an edge, a's states along the first dim."""
        if a > b:
            a, b, table = b, a, table.T
        self.edges[a, b] = self.edges[a, b] + table if (a, b) in self.edges else table
        self.near[a].add(b)
        self.near[b].add(a)

    def bound(self) -> float:
        """The sum of the minima of all tables."""
        tables = (*self.unary.values(), *self.edges.values())
        return self.constant + sum(float(table.min()) for table in tables)

    def table(self, a: int, b: int) -> Costs:
        """The edge's table with ``a``'s states first."""
        return self.edges[a, b] if a < b else self.edges[b, a].T

    def reduce(self, largest: int) -> None:
        """Eliminate variables with at most two neighbours while no table passes ``largest`` entries."""
        todo = set(self.unary)
        while todo:
            ready = sorted(todo)
            todo = set()
            for v in ready:
                if v in self.unary and self._small(v, largest):
                    todo |= self.near[v]
                    self._eliminate(v)

    def _small(self, v: int, largest: int) -> bool:
        size = len(self.unary[v])
        for w in self.near[v]:
            size *= len(self.unary[w])
        return len(self.unary[v]) == 1 or (len(self.near[v]) <= 2 and size <= largest)

    def _eliminate(self, v: int) -> None:
        near = sorted(self.near[v])
        ends = tuple((w, self.labels[w], self.table(v, w)) for w in near)
        self.trail.append(_Gone(v, self.labels[v], self.unary[v], ends))
        if len(self.unary[v]) == 1:
            self.constant += float(self.unary[v][0])
            for w in near:
                self.unary[w] = self.unary[w] + self.table(v, w)[0]
        elif len(near) == 2:
            a, b = near
            left = self.table(a, v) + self.unary[v][None]
            self.add(a, b, _min_plus(left, self.table(v, b)))
        elif near:
            self.unary[near[0]] = self.unary[near[0]] + np.min(self.table(near[0], v) + self.unary[v][None], axis=1)
        else:
            self.constant += float(self.unary[v].min())
        self._forget(v)

    def _forget(self, v: int) -> None:
        for w in self.near.pop(v):
            self.near[w].discard(v)
            del self.edges[(v, w) if v < w else (w, v)]
        del self.unary[v]

    def pass_messages(self, rounds: int) -> None:
        """Raise the bound: passes over the variables forwards and backwards (TRW-S)."""
        sent = {(v, w): np.zeros(len(self.unary[w])) for edge in self.edges for v, w in (edge, edge[::-1])}
        order = sorted(self.unary)
        for _ in range(rounds):
            self._sweep(order, sent, forwards=True)
            self._sweep(order[::-1], sent, forwards=False)
        self._settle(sent)
        self._collect(order, forwards=True)
        self._collect(order[::-1], forwards=False)

    def _sweep(self, order: list[int], sent: _Messages, forwards: bool) -> None:
        """Every variable hands its share of what it knows to the neighbours ahead."""
        for v in order:
            near = sorted(self.near[v])
            ahead = [w for w in near if (w > v) == forwards]
            if not ahead:
                continue
            total = self.unary[v].copy()
            for w in near:
                total += sent[w, v]
            total /= max(len(ahead), len(near) - len(ahead))
            for w in ahead:
                message = np.minimum.reduce((total - sent[w, v])[:, None] + self.table(v, w), axis=0)
                sent[v, w] = message - message.min()

    def _settle(self, sent: _Messages) -> None:
        """Move what the messages say from the edges into the variables' tables."""
        for (v, w), message in sent.items():
            self.unary[w] = self.unary[w] + message
            if v < w:
                self.edges[v, w] = self.edges[v, w] - message[None]
            else:
                self.edges[w, v] = self.edges[w, v] - message[:, None]

    def _collect(self, order: list[int], forwards: bool) -> None:
        """Every variable draws in what its edges can spare and spreads it over the edges ahead."""
        for v in order:
            near = sorted(self.near[v])
            ahead = [w for w in near if (w > v) == forwards]
            total = self.unary[v].copy()
            for w in near:
                total += self.table(v, w).min(axis=1)
            part = total / max(len(ahead), len(near) - len(ahead), 1)
            for w in near:
                table = self.table(v, w)
                shift = (part if w in ahead else 0.0) - table.min(axis=1)
                self._shift(v, w, shift)
            self.unary[v] = total - part * len(ahead)

    def _shift(self, v: int, w: int, message: Costs) -> None:
        """Add ``message`` over v's states to the edge's table."""
        if v < w:
            self.edges[v, w] = self.edges[v, w] + message[:, None]
        else:
            self.edges[w, v] = self.edges[w, v] + message[None]

    def fix(self, upper: float) -> None:
        """Drop states that no solution of cost ``upper`` or less can have."""
        slack = upper - self.bound()
        for v in list(self.unary):
            excess = self.unary[v] - self.unary[v].min()
            for w in self.near[v]:
                table = self.table(v, w)
                excess = excess + table.min(axis=1) - table.min()
            keep = np.flatnonzero(excess <= slack + 1.0)
            if 0 < len(keep) < len(excess):
                self._keep(v, keep)

    def _keep(self, v: int, keep: NDArray[np.intp]) -> None:
        self.unary[v], self.labels[v] = self.unary[v][keep], self.labels[v][keep]
        for w in self.near[v]:
            if v < w:
                self.edges[v, w] = self.edges[v, w][keep]
            else:
                self.edges[w, v] = self.edges[w, v][:, keep]

    def decode(self) -> dict[int, int]:
        """A good state of every variable: greedily over those left, exactly over those eliminated."""
        chosen: dict[int, int] = {}
        for v in sorted(self.unary):
            cost = self.unary[v].copy()
            for w in sorted(self.near[v]):
                table = self.table(v, w)
                at = np.searchsorted(self.labels[w], chosen[w]) if w in chosen else None
                cost += table.min(axis=1) if at is None else table[:, at]
            chosen[v] = int(self.labels[v][cost.argmin()])
        for gone in reversed(self.trail):
            cost = gone.unary.copy()
            for w, labels, table in gone.ends:
                cost += table[:, np.searchsorted(labels, chosen[w])]
            chosen[gone.variable] = int(gone.labels[cost.argmin()])
        return chosen


def _min_plus(left: Costs, right: Costs) -> Costs:
    """The cheapest way from each state of ``left`` to each of ``right``'s over the shared middle."""
    if left.shape[0] * left.shape[1] * right.shape[1] <= 1 << 18:
        return np.asarray(np.min(left[:, :, None] + right[None], axis=1))
    return np.stack([np.min(row[:, None] + right, axis=0) for row in left])
