"""A lower bound on a network's minimum that rises: tree-reweighted message passing.

At any time the sum of the minima of all tables is a lower bound on the minimum of the sum. Passing
messages (TRW-S, Kolmogorov 2006) shifts cost between the tables, their sum staying the same, so
that this bound rises; a state whose own share of it passes the cost of a known plan cannot be in a
better one and goes.
"""

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.exact import Costs
from meshdsl.planner.network import Network

_LEAST = np.minimum.reduce
_WORTH = 0.9  # of all entries, if no more would be left, states go
_Ints = NDArray[np.int64]


def bound(network: Network) -> float:
    """The sum of the minima of all tables."""
    edges = (table for v, near in network.near.items() for w, table in near.items() if v < w)
    return network.constant + sum(float(table.min()) for table in (*network.unary.values(), *edges))


class Messages:
    """Messages between the variables of a network whose tables are finite.

    ``states`` are the best that a pass has come by, by label, and ``cost`` is what they cost.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.order = network, network.order
        self._pack({v: i for i, v in enumerate(self.order)})
        self._at = np.zeros(len(self.order), dtype=np.int64)
        self._best, self.cost = self._at, np.inf
        self.lower = -np.inf  # what no states undercut by the last pass, aside from the network's constant

    def _pack(self, at: dict[int, int]) -> None:
        """Lay the network out flat, equal tables once."""
        from meshdsl.planner.kernels import Flat  # with its compiler, too much to import for those who plan nothing

        network = self.network
        ends = [(v, w) for v in self.order for w in network.near[v]]
        half = {end: h for h, end in enumerate(ends)}
        messages = _offsets([network.unary[w].size for _, w in ends])
        edges = [network.near[v][w] for v, w in ends]
        once = {id(table): table for table in edges}
        places = dict(zip(once, _offsets([table.size for table in once.values()]), strict=False))
        self.flat = Flat(
            start=_offsets([network.unary[v].size for v in self.order]),
            first=_offsets([len(network.near[v]) for v in self.order]),
            to=np.array([at[w] for _, w in ends], dtype=np.int64),
            back=np.array([half[w, v] for v, w in ends], dtype=np.int64),
            out=messages[:-1],
            table=np.array([places[id(table)] for table in edges], dtype=np.int64),
        )
        self.sent = np.zeros(messages[-1])
        self.tables = _joined([table.ravel() for table in once.values()])
        self.unary = _joined([network.unary[v] for v in self.order])

    def run(self, passes: int) -> None:
        """Pass over the variables forwards and backwards, so many times."""
        from meshdsl.planner import kernels

        for forward in (True, False) * passes:
            cost, self.lower = kernels.sweep(forward, self.flat, self.unary, self.tables, self.sent, self._at)
            if cost < self.cost:
                self._best, self.cost = self._at.copy(), cost

    @property
    def ends(self) -> tuple[_Ints, _Ints]:
        """The two variables of every half edge."""
        order = np.array(self.order, dtype=np.int64)
        return np.repeat(order, np.diff(self.flat.first)), order[self.flat.to]

    @property
    def gap(self) -> float:
        """The part of the cost of ``states`` that no others of the network can save more than."""
        cost = self.cost + self.network.constant
        return float((self.cost - self.lower) / cost) if cost else 0.0

    @property
    def latest(self) -> _Ints:
        """Where the last pass has pointed, by position in order."""
        return self._at

    @property
    def states(self) -> dict[int, int]:
        """The best states so far of all variables of the network, those it has lost included."""
        return self.network.named(self.order, self._best)

    def trimmed(self, upper: float) -> "Messages":
        """The messages without states that no solution of cost ``upper`` or less can have, which the network loses.

        The tables stay as they were made, and shared; where few entries would go, so does everything.
        """
        from meshdsl.planner import kernels

        network, start = self.network, self.flat.start
        excess, slack = np.zeros(self.unary.size), upper - network.constant - self.lower
        kernels.spare(self.flat, self.unary, self.tables, self.sent, excess)
        stays = excess <= slack + 1.0
        keep = {v: np.flatnonzero(stays[start[i] : start[i + 1]]) for i, v in enumerate(self.order)}
        left = sum(keep[v].size * keep[w].size for v in self.order for w in network.near[v] if v < w)
        if left > _WORTH * network.entries or not all(states.size for states in keep.values()):
            return self
        network.cut(keep)
        other = Messages(network)
        kept = [stays[start[i] : start[i + 1]] for i in self.flat.to]
        other.sent = self.sent[np.concatenate(kept)] if kept else self.sent
        return other

    def settle(self) -> None:
        """Move what the messages say into the tables of the network, whose bound that raises."""
        from meshdsl.planner import kernels

        flat, sizes = self.flat, np.diff(self.flat.start)
        ahead = np.repeat(np.arange(len(self.order)), np.diff(flat.first)) < flat.to
        begin = _offsets(np.where(ahead, sizes[flat.to[flat.back]] * sizes[flat.to], 0).tolist())
        own = np.where(ahead, begin[:-1], begin[flat.back])
        tables = np.empty(begin[-1])
        kernels.settle(flat, self.unary, self.tables, self.sent, own, tables)
        for forward in (True, False):
            kernels.collect(forward, flat, self.unary, own, tables)
        self._write_back(own, tables)

    def _write_back(self, own: _Ints, tables: Costs) -> None:
        network, flat = self.network, self.flat
        for i, v in enumerate(self.order):
            network.unary[v] = self.unary[flat.start[i] : flat.start[i + 1]]
            for h in range(flat.first[i], flat.first[i + 1]):
                if i < flat.to[h]:
                    w = self.order[flat.to[h]]
                    old = network.near[v][w]
                    _replace(network, v, w, tables[own[h] : own[h] + old.size].reshape(old.shape))


def _offsets(sizes: list[int]) -> _Ints:
    """Where blocks of these sizes begin, one after the other, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def _joined(arrays: list[Costs]) -> Costs:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _replace(network: Network, v: int, w: int, table: Costs) -> None:
    network.near[v][w], network.near[w][v] = table, table.T


def cap(network: Network, limit: float) -> None:
    """Make all tables finite: no plan of interest has an entry above ``limit``."""
    known: dict[int, Costs] = {}  # equal tables stay one

    def capped(table: Costs) -> Costs:
        if id(table) not in known:
            known[id(table)] = np.minimum(table, limit)
        return known[id(table)]

    for v, near in network.near.items():
        network.unary[v] = capped(network.unary[v])
        network.near[v] = {w: capped(table) for w, table in near.items()}


def fix(network: Network, upper: float) -> None:
    """Drop states that no solution of cost ``upper`` or less can have."""
    slack = upper - bound(network)
    for v in list(network.unary):
        excess = network.unary[v] - network.unary[v].min()
        for table in network.near[v].values():
            least = _LEAST(table, axis=1)
            excess = excess + (least - _LEAST(least))
        keep = np.flatnonzero(excess <= slack + 1.0)
        if 0 < keep.size < excess.size:
            network.unary[v] = network.unary[v][keep]
            labels = network.labels.get(v)
            network.labels[v] = keep if labels is None else labels[keep]
            for w in list(network.near[v]):
                _replace(network, v, w, network.near[v][w][keep])
