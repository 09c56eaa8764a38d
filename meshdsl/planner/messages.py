"""A lower bound on a network's minimum that rises: tree-reweighted message passing.

At any time the sum of the minima of all tables is a lower bound on the minimum of the sum. Passing
messages (TRW-S, Kolmogorov 2006) shifts cost between the tables, their sum staying the same, so
that this bound rises; a state whose own share of it passes the cost of a known plan cannot be in a
better one and goes.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.network import Network
from meshdsl.planner.packed import Packed, alone, offsets

if TYPE_CHECKING:
    from meshdsl.planner.kernels import Flat

_LEAST = np.minimum.reduce
_WORTH = 0.9  # of all entries, if no more would be left, states go
_Ints = NDArray[np.int64]


def bound(network: Network) -> float:
    """The sum of the minima of all tables."""
    edges = (table for v, near in network.near.items() for w, table in near.items() if v < w)
    return network.constant + sum(float(table.min()) for table in (*network.unary.values(), *edges))


class Passing:
    """Messages between the variables of networks that are laid out flat, whose tables are finite.

    A pass points to a state of every variable; ``cost`` is what the best ones cost.
    """

    def __init__(self, packed: Packed) -> None:
        self.order, self.flat, self.unary, self.tables, self.constant = packed
        self.sent = np.zeros(int(self.flat.out[-1] + self._width(-1)) if self.flat.out.size else 0)
        self._at = np.zeros(self.order.size, dtype=np.int64)
        self._best, self.cost = self._at.copy(), np.inf
        self.lower = -np.inf  # what no states undercut by the last pass, aside from the network's constant

    def _width(self, half: int) -> int:
        """Length of the message of a half edge."""
        to = self.flat.to[half]
        return int(self.flat.start[to + 1] - self.flat.start[to])

    def run(self, passes: int) -> None:
        """Pass over the variables forwards and backwards, so many times."""
        from meshdsl.planner import kernels

        network = self.flat, self.unary, self.tables
        self.cost, self.lower = kernels.passes(passes, *network, self.sent, self._at, self._best, self.cost)

    @property
    def entries(self) -> int:
        """Entries of all tables: what one pass costs."""
        sizes, flat = np.diff(self.flat.start), self.flat
        return int((sizes[flat.to] * sizes[flat.to[flat.back]]).sum()) // 2

    @property
    def ends(self) -> tuple[_Ints, _Ints]:
        """The two variables of every half edge."""
        return ends_of(self.flat, self.order)

    @property
    def pointed(self) -> _Ints:
        """The best states that a pass has come by, by position, in order."""
        return self._best

    @property
    def bound(self) -> float:
        """What no states undercut by the last pass."""
        return self.lower + self.constant

    @property
    def gap(self) -> float:
        """The part of the cost of the best states that no others can save more than."""
        cost = self.cost + self.constant
        return float((self.cost - self.lower) / cost) if cost else 0.0


def ends_of(flat: "Flat", order: Ids) -> tuple[_Ints, _Ints]:
    """The two variables of every half edge, which lie in this order."""
    return np.repeat(order, np.diff(flat.first)), order[flat.to]


class Messages(Passing):
    """Messages of one network; ``states`` are the best that a pass has come by, by label.

    Args:
      limit: of entries of tables.
    """

    def __init__(self, network: Network, limit: float = np.inf) -> None:
        self.network = network
        super().__init__(alone(network, limit))

    @property
    def latest(self) -> _Ints:
        """Where the last pass has pointed, by position in order."""
        return self._at

    @property
    def states(self) -> Ids:
        """The best states so far of all variables of the network, those it has lost included."""
        return self.network.named(self.order.tolist(), self.pointed)

    def trimmed(self, upper: float) -> "Messages":
        """The messages without states that no solution of cost ``upper`` or less can have, which the network loses.

        The tables stay as they were made, and shared; where few entries would go, so does everything.
        """
        from meshdsl.planner import kernels

        network, start, order = self.network, self.flat.start, self.order.tolist()
        excess, slack = np.zeros(self.unary.size), upper - network.constant - self.lower
        kernels.spare(self.flat, self.unary, self.tables, self.sent, excess)
        stays = excess <= slack + 1.0
        keep = {v: np.flatnonzero(stays[start[i] : start[i + 1]]) for i, v in enumerate(order)}
        left = sum(keep[v].size * keep[w].size for v in order for w in network.near[v] if v < w)
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
        ahead = np.repeat(np.arange(self.order.size), np.diff(flat.first)) < flat.to
        begin = offsets(np.where(ahead, sizes[flat.to[flat.back]] * sizes[flat.to], 0))
        own = np.where(ahead, begin[:-1], begin[flat.back])
        tables = np.empty(begin[-1])
        kernels.settle(flat, self.unary, self.tables, self.sent, own, tables)
        for forward in (True, False):
            kernels.collect(forward, flat, self.unary, own, tables)
        self._write_back(own, tables)

    def _write_back(self, own: _Ints, tables: Costs) -> None:
        network, flat, order = self.network, self.flat, self.order.tolist()
        for i, v in enumerate(order):
            network.unary[v] = self.unary[flat.start[i] : flat.start[i + 1]]
            for h in range(flat.first[i], flat.first[i + 1]):
                if i < flat.to[h]:
                    w = order[flat.to[h]]
                    old = network.near[v][w]
                    _replace(network, v, w, tables[own[h] : own[h] + old.size].reshape(old.shape))


def _replace(network: Network, v: int, w: int, table: Costs) -> None:
    network.near[v][w], network.near[w][v] = table, table.T


def cap(network: Network, limit: float) -> None:
    """Make all tables finite: no plan of interest has an entry above ``limit``."""
    known: dict[int, Costs] = {}  # equal tables stay one

    def capped(table: Costs) -> Costs:
        if identity(table) not in known:
            known[identity(table)] = np.minimum(table, limit)
        return known[identity(table)]

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
