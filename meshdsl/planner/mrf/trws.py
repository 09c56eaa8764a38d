"""Networks laid out flat, for messages: one alone, or all copies of some put together, as ``Network.stamp`` does.

A step of a hundred equal layers has the tables of one, and what its variables are called in each layer is known as
arrays. So all layers are laid out at once, without asking every variable for its neighbours.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.network import Network, Replica
from meshdsl.util.arrays import Costs, Ids, array, object_id, unique_sorted

if TYPE_CHECKING:
    from meshdsl.planner.mrf.kernels import Flat


# ---- Packed ----------------------------------------------------------------------------------------------------------


_MANY = 1 << 20  # entries of tables that take less time to read in half as many bytes


class Packed(NamedTuple):
    """Variables in order, and their tables."""

    order: Ids
    flat: "Flat"
    unary: Costs
    tables: NDArray[Any]
    constant: float


class _Tables:
    """Tables, by number, those that are the same object once."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._tables: list[Costs] = []

    def number(self, table: Costs) -> int:
        """The number of a table."""
        found = self._numbers.setdefault(object_id(table), len(self._tables))
        if found == len(self._tables):
            self._tables.append(table)
        return found

    def of(self, number: int) -> Costs:
        """The table of a number."""
        return self._tables[number]

    def sum(self, one: int, other: int) -> int:
        """The number of what two tables add up to."""
        if (one, other) not in self._sums:
            self._sums[one, other] = self.number(self.of(one) + self.of(other))
        return self._sums[one, other]

    def joined(self, used: Ids, limit: float = np.inf, rounded_down: bool = False) -> tuple[NDArray[Any], Ids]:
        """Some tables, one after the other, no entry above ``limit``, and where each of all begins.

        Args:
          rounded_down: if they are large together, their entries may be, to half as many bytes.
        """
        from meshdsl.planner.mrf.kernels import round_down  # with its compiler, too much for those who plan nothing

        begins, sizes = np.zeros(len(self._tables), dtype=np.intp), array(self.of(i).size for i in used)
        stops = offsets(sizes)
        begins[used] = stops[:-1]
        narrow = rounded_down and stops[-1] >= _MANY
        costs = np.empty(stops[-1], dtype=np.float32 if narrow else np.float64)
        room = np.empty(sizes.max(initial=0) if narrow else 0)
        for i, begin, stop in zip(used.tolist(), stops, stops[1:], strict=False):
            table, into = self.of(i), room[: stop - begin] if narrow else costs[begin:stop]
            np.minimum(table, limit, out=into.reshape(table.shape))
            if narrow:
                round_down(into, costs[begin:stop])
        return costs, begins


class _Variables(NamedTuple):
    """Variables by position in order, ``at`` by their numbers; ``here``: per stamp, [copies, variables]."""

    order: Ids
    sizes: Ids
    at: Ids
    here: list[Ids]


class _Halves(NamedTuple):
    """Half edges: from a variable to another, by position, and the number of the table between them."""

    source: Ids
    target: Ids
    table: Ids


class _Laid(NamedTuple):
    """Variables, half edges and the variables' own tables."""

    variables: _Variables
    halves: _Halves
    unary: Costs
    constant: float


def packed(*networks: Sequence[Replica], limit: float = np.inf, rounded_down: bool = False) -> list[Packed]:
    """Networks, each of all copies of some others, with one array of tables.

    Args:
      limit: no entry is above it. rounded_down: entries of large ones may be, for only a bound is asked for.
    """
    tables = _Tables()
    laid = [_laid_out(stamps, tables) for stamps in networks]
    used = unique_sorted(np.concatenate([each.halves.table for each in laid]))
    costs, begins = tables.joined(used, limit, rounded_down)
    return [
        Packed(each.variables.order, _flat(each, begins), np.minimum(each.unary, limit), costs, each.constant)
        for each in laid
    ]


def alone(network: Network, limit: float = np.inf) -> Packed:
    """One network; no entry is above ``limit``."""
    names = list(network.unary)
    return packed([Replica(network, names, np.array([names], dtype=np.intp).reshape(1, -1))], limit=limit)[0]


def offsets(sizes: Ids) -> Ids:
    """Where blocks of these sizes begin, one after the other, and where the last one ends."""
    return np.concatenate([array((0,)), np.cumsum(sizes)])


def _laid_out(stamps: Sequence[Replica], tables: _Tables) -> _Laid:
    """All copies of some networks."""
    from meshdsl.planner.mrf.kernels import added  # with its compiler, too much to import for those who plan nothing

    variables = _variables(stamps)
    start = offsets(variables.sizes)
    unary = np.zeros(start[-1])
    for stamp, here in zip(stamps, variables.here, strict=True):
        own = _Tables()
        numbers = array(map(own.number, stamp.part.unary.values()))
        costs, begins = own.joined(unique_sorted(numbers))
        places = here.ravel()
        begin = np.tile(begins[numbers], len(here))
        added(costs, unary, begin, begin + variables.sizes[places], start[places])
    halves = _halves(stamps, variables, tables)
    loops = np.flatnonzero(halves.source == halves.target)
    for i in loops.tolist():  # there are two halves of each
        at = halves.source[i]
        unary[start[at] : start[at + 1]] += np.diagonal(tables.of(int(halves.table[i]))) / 2
    others = _merged(_Halves(*(np.delete(column, loops) for column in halves)), tables, variables.order.size)
    return _Laid(variables, others, unary, sum(stamp.part.constant * len(stamp.numbers) for stamp in stamps))


def _flat(laid: _Laid, begins: Ids) -> "Flat":
    """Where everything lies; the table of each number begins at ``begins``."""
    from meshdsl.planner.mrf.kernels import Flat

    (source, target, table), count = laid.halves, laid.variables.order.size
    key = source * count + target
    by_key = np.argsort(key)
    return Flat(
        start=offsets(laid.variables.sizes),
        first=offsets(np.bincount(source, minlength=count)),
        to=target,
        back=by_key[np.searchsorted(key[by_key], target * count + source)],
        out=offsets(laid.variables.sizes[target])[:-1],
        table=begins[table],
    )


def _variables(stamps: Sequence[Replica]) -> _Variables:
    names, places, sizes = [], [], []
    for part, variables, numbers in stamps:
        column = {v: i for i, v in enumerate(variables)}
        here = numbers[:, array(map(column.__getitem__, part.unary))]
        place = np.array([part.place[v] for v in part.unary])
        before = place.astype(np.intp)
        near = array(column.get(v, -1) for v in before.tolist())
        names.append(here)
        places.append(np.where(near >= 0, numbers[:, near], before) + place - before)
        sizes.append(np.tile(array(unary.size for unary in part.unary.values()), (len(numbers), 1)))
    place, size = (np.concatenate([array(()), *map(np.ravel, found)]) for found in (places, sizes))
    every, first = np.unique(np.concatenate([array(()), *map(np.ravel, names)]), return_index=True)
    by_place = np.lexsort((every, place[first]))
    order = every[by_place]
    at = np.full(int(every.max(initial=-1)) + 1, -1)
    at[order] = np.arange(order.size)
    return _Variables(order, size[first][by_place].astype(np.intp), at, [at[here] for here in names])


def _halves(stamps: Sequence[Replica], variables: _Variables, tables: _Tables) -> _Halves:
    """All half edges, those of a variable in the order in which its networks list them."""
    columns = [(array(()),) * 3]
    for (part, _, _), here in zip(stamps, variables.here, strict=True):
        column, near = {v: i for i, v in enumerate(part.unary)}, part.near.items()
        source = here[:, array(column[v] for v, others in near for _ in others)]
        target = here[:, array(column[w] for _, others in near for w in others)]
        number = array(tables.number(table) for _, others in near for table in others.values())
        columns.append((source, target, np.broadcast_to(number, source.shape)))
    every = [np.concatenate([array(()), *map(np.ravel, found)]) for found in zip(*columns, strict=True)]
    order = np.argsort(every[0], kind="stable")
    return _Halves(*(column[order] for column in every))


def _merged(halves: _Halves, tables: _Tables, count: int) -> _Halves:
    """One half edge from a variable to another, where there are several: their tables add up."""
    key = halves.source * count + halves.target
    order = np.argsort(key, kind="stable")
    new = np.diff(key[order], prepend=-1) != 0
    first, which = order[new], np.cumsum(new) - 1
    turn = np.arange(order.size) - np.flatnonzero(new)[which]
    table = halves.table.copy()
    for i in range(1, int(turn.max(initial=0)) + 1):
        into, more = first[which[turn == i]], halves.table[order[turn == i]]
        table[into] = array(map(tables.sum, table[into].tolist(), more.tolist()))
    stays = np.sort(first)
    return _Halves(halves.source[stays], halves.target[stays], table[stays])


# ---- Messages --------------------------------------------------------------------------------------------------------
# A lower bound on a network's minimum that rises: tree-reweighted message passing.
#
# At any time the sum of the minima of all tables is a lower bound on the minimum of the sum. Passing
# messages (TRW-S, Kolmogorov 2006) shifts cost between the tables, their sum staying the same, so
# that this bound rises; a state whose own share of it passes the cost of a known plan cannot be in a
# better one and goes.


_LEAST = np.minimum.reduce
_WORTH = 0.9  # of all entries, if no more would be left, states go
_Ints = NDArray[np.int64]


def bound(network: Network) -> float:
    """The sum of the minima of all tables."""
    edges = (table for v, near in network.near.items() for w, table in near.items() if v < w)
    return network.constant + sum(float(table.min()) for table in (*network.unary.values(), *edges))


class MessagePassing:
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
        from meshdsl.planner.mrf import kernels

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


class TRWS(MessagePassing):
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

    def trimmed(self, upper: float) -> "TRWS":
        """The messages without states that no solution of cost ``upper`` or less can have, which the network loses.

        The tables stay as they were made, and shared; where few entries would go, so does everything.
        """
        from meshdsl.planner.mrf import kernels

        network, start, order = self.network, self.flat.start, self.order.tolist()
        excess, slack = np.zeros(self.unary.size), upper - network.constant - self.lower
        kernels.min_marginals(self.flat, self.unary, self.tables, self.sent, excess)
        stays = excess <= slack + 1.0
        keep = {v: np.flatnonzero(stays[start[i] : start[i + 1]]) for i, v in enumerate(order)}
        left = sum(keep[v].size * keep[w].size for v in order for w in network.near[v] if v < w)
        if left > _WORTH * network.entries or not all(states.size for states in keep.values()):
            return self
        network.cut(keep)
        other = TRWS(network)
        kept = [stays[start[i] : start[i + 1]] for i in self.flat.to]
        other.sent = self.sent[np.concatenate(kept)] if kept else self.sent
        return other

    def settle(self) -> None:
        """Move what the messages say into the tables of the network, whose bound that raises."""
        from meshdsl.planner.mrf import kernels

        flat, sizes = self.flat, np.diff(self.flat.start)
        ahead = np.repeat(np.arange(self.order.size), np.diff(flat.first)) < flat.to
        begin = offsets(np.where(ahead, sizes[flat.to[flat.back]] * sizes[flat.to], 0))
        own = np.where(ahead, begin[:-1], begin[flat.back])
        tables = np.empty(begin[-1])
        kernels.reparametrize(flat, self.unary, self.tables, self.sent, own, tables)
        for forward in (True, False):
            kernels.absorb(forward, flat, self.unary, own, tables)
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


def clip(network: Network, limit: float) -> None:
    """Make all tables finite: no plan of interest has an entry above ``limit``."""
    known: dict[int, Costs] = {}  # equal tables stay one

    def capped(table: Costs) -> Costs:
        if object_id(table) not in known:
            known[object_id(table)] = np.minimum(table, limit)
        return known[object_id(table)]

    for v, near in network.near.items():
        network.unary[v] = capped(network.unary[v])
        network.near[v] = {w: capped(table) for w, table in near.items()}


def prune_states(network: Network, upper: float) -> None:
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
