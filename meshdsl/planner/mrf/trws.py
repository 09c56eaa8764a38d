"""A lower bound on a network's minimum that rises: sequential tree-reweighted message passing (TRW-S).

At any time the sum of the minima of all tables bounds the minimum of their sum from below. Messages shift cost between
tables, which leaves the sum unchanged, so that this bound rises (reparametrisation; Kolmogorov 2006). Every sweep also
decodes a state. A state of a variable whose min-marginal exceeds the cost of a known solution cannot be part of a
better one, and is pruned.

Messages run on networks laid out flat (``Packed``): one network, or all copies of several (``Replica``), as
``Network.add_replica`` would put them together. A step of a hundred equal layers has the tables of one layer, and the
numbers of its variables in each layer are arrays; so all layers are laid out at once, without a Python loop over
variables.

Two classes pass messages: ``MessagePassing`` on any packed network, whose tables it leaves as they are, and ``TRWS``
on a ``Network``, which it can also prune and reparametrise.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.network import Network, Replica
from meshdsl.util.arrays import Costs, Ids, Ints, index_array, object_id, unique_sorted

if TYPE_CHECKING:
    from meshdsl.planner.mrf.kernels import FlatNetwork


# ---- Packing ---------------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Variables in order, and their tables, laid out flat."""

    order: Ids
    flat: "FlatNetwork"
    unary: Costs
    tables: NDArray[Any]
    constant: float


class _Tables:
    """Numbered tables; those that are the same object have one number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}
        self._tables: list[Costs] = []

    def __getitem__(self, number: int) -> Costs:
        return self._tables[number]

    def number(self, table: Costs) -> int:
        """Returns the number of a table."""
        found = self._numbers.setdefault(object_id(table), len(self._tables))
        if found == len(self._tables):
            self._tables.append(table)
        return found

    def sum(self, one: int, other: int) -> int:
        """Returns the number of the sum of two tables."""
        if (one, other) not in self._sums:
            self._sums[one, other] = self.number(self[one] + self[other])
        return self._sums[one, other]

    def concatenated(
        self, used: Ids, limit: float = np.inf, float32_entries: float = np.inf
    ) -> tuple[NDArray[Any], Ids]:
        """Returns some tables, one behind the other and clipped at ``limit``, and where each of all tables begins.

        Args:
          float32_entries: from so many entries on they are float32, rounded down.
        """
        from meshdsl.planner.mrf.kernels import round_down  # imports the compiler

        begins, sizes = np.zeros(len(self._tables), dtype=np.intp), index_array(self[i].size for i in used)
        stops = offsets(sizes)
        begins[used] = stops[:-1]
        narrow = stops[-1] >= float32_entries
        costs = np.empty(stops[-1], dtype=np.float32 if narrow else np.float64)
        workspace = np.empty(sizes.max(initial=0) if narrow else 0)
        for i, begin, stop in zip(used.tolist(), stops, stops[1:], strict=False):
            table, into = self[i], workspace[: stop - begin] if narrow else costs[begin:stop]
            np.minimum(table, limit, out=into.reshape(table.shape))
            if narrow:
                round_down(into, costs[begin:stop])
        return costs, begins


class _Variables(NamedTuple):
    """Variables of several replicas.

    Args:
      order: their numbers by position.
      sizes: their numbers of states, in that order.
      place: by number, the place in that order.
      copies: per replica, [copies, variables], places in that order.
    """

    order: Ids
    sizes: Ids
    place: Ids
    copies: list[Ids]


class _HalfEdges(NamedTuple):
    """Half edges: from one variable to another, by place in order, with the number of their table."""

    source: Ids
    target: Ids
    table: Ids


class _Flattened(NamedTuple):
    """Variables, half edges and the variables' own tables of several replicas."""

    variables: _Variables
    half_edges: _HalfEdges
    unary: Costs
    constant: float


def pack(*networks: Sequence[Replica], limit: float = np.inf, float32_entries: float = np.inf) -> list[Packed]:
    """Lays networks out flat, each given by its replicas, with one array of tables for all of them.

    Args:
      limit: entries are clipped at this cost.
      float32_entries: from so many entries on, tables are float32 and rounded down, which takes less time to read;
        bounds remain valid, costs of states do not.
    """
    tables = _Tables()
    flattened = [_flatten(replicas, tables) for replicas in networks]
    used = unique_sorted(np.concatenate([each.half_edges.table for each in flattened]))
    costs, begins = tables.concatenated(used, limit, float32_entries)
    return [
        Packed(each.variables.order, _flat(each, begins), np.minimum(each.unary, limit), costs, each.constant)
        for each in flattened
    ]


def offsets(sizes: Ids) -> Ids:
    """Returns where blocks of these sizes begin, one behind the other, and where the last one ends."""
    return np.concatenate([index_array((0,)), np.cumsum(sizes)])


def half_edge_ends(flat: "FlatNetwork", order: Ids) -> tuple[Ints, Ints]:
    """Returns the numbers of both variables of every half edge."""
    return np.repeat(order, np.diff(flat.first)), order[flat.to]


def _flatten(replicas: Sequence[Replica], tables: _Tables) -> _Flattened:
    from meshdsl.planner.mrf.kernels import add_ranges  # imports the compiler

    variables = _number_variables(replicas)
    start = offsets(variables.sizes)
    unary = np.zeros(start[-1])
    for replica, copies in zip(replicas, variables.copies, strict=True):
        own = _Tables()
        numbers = index_array(map(own.number, replica.part.unary.values()))
        costs, begins = own.concatenated(unique_sorted(numbers))
        places = copies.ravel()
        begin = np.tile(begins[numbers], len(copies))
        add_ranges(costs, unary, begin, begin + variables.sizes[places], start[places])
    half_edges = _list_half_edges(replicas, variables, tables)
    loops = np.flatnonzero(half_edges.source == half_edges.target)
    for i in loops.tolist():  # both half edges of each occur
        at = half_edges.source[i]
        unary[start[at] : start[at + 1]] += np.diagonal(tables[int(half_edges.table[i])]) / 2
    proper = _HalfEdges(*(np.delete(column, loops) for column in half_edges))
    merged = _merge_parallel(proper, tables, variables.order.size)
    return _Flattened(variables, merged, unary, sum(each.part.constant * len(each.numbers) for each in replicas))


def _number_variables(replicas: Sequence[Replica]) -> _Variables:
    names, positions, sizes = [], [], []
    for part, variables, numbers in replicas:
        column = {v: i for i, v in enumerate(variables)}
        copies = numbers[:, index_array(map(column.__getitem__, part.unary))]
        position = np.array([part.position[v] for v in part.unary])
        before = position.astype(np.intp)  # new variables are positioned right behind one of a whole number
        anchor = index_array(column.get(v, -1) for v in before.tolist())
        names.append(copies)
        positions.append(np.where(anchor >= 0, numbers[:, anchor], before) + position - before)
        sizes.append(np.tile(index_array(unary.size for unary in part.unary.values()), (len(numbers), 1)))
    position, size = (np.concatenate([index_array(()), *map(np.ravel, found)]) for found in (positions, sizes))
    every, first = np.unique(np.concatenate([index_array(()), *map(np.ravel, names)]), return_index=True)
    by_position = np.lexsort((every, position[first]))
    order = every[by_position]
    place = np.full(int(every.max(initial=-1)) + 1, -1)
    place[order] = np.arange(order.size)
    return _Variables(order, size[first][by_position].astype(np.intp), place, [place[copies] for copies in names])


def _list_half_edges(replicas: Sequence[Replica], variables: _Variables, tables: _Tables) -> _HalfEdges:
    """Returns all half edges, those of a variable in the order in which its networks list them."""
    columns = [(index_array(()),) * 3]
    for (part, _, _), copies in zip(replicas, variables.copies, strict=True):
        column, pairs = {v: i for i, v in enumerate(part.unary)}, part.pairwise.items()
        source = copies[:, index_array(column[v] for v, others in pairs for _ in others)]
        target = copies[:, index_array(column[w] for _, others in pairs for w in others)]
        number = index_array(tables.number(table) for _, others in pairs for table in others.values())
        columns.append((source, target, np.broadcast_to(number, source.shape)))
    every = [np.concatenate([index_array(()), *map(np.ravel, found)]) for found in zip(*columns, strict=True)]
    order = np.argsort(every[0], kind="stable")
    return _HalfEdges(*(column[order] for column in every))


def _merge_parallel(half_edges: _HalfEdges, tables: _Tables, count: int) -> _HalfEdges:
    """Replaces several half edges between the same variables by one with the sum of their tables."""
    key = half_edges.source * count + half_edges.target
    order = np.argsort(key, kind="stable")
    new = np.diff(key[order], prepend=-1) != 0
    first, group = order[new], np.cumsum(new) - 1
    rank = np.arange(order.size) - np.flatnonzero(new)[group]
    table = half_edges.table.copy()
    for i in range(1, int(rank.max(initial=0)) + 1):
        into, more = first[group[rank == i]], half_edges.table[order[rank == i]]
        table[into] = index_array(map(tables.sum, table[into].tolist(), more.tolist()))
    keep = np.sort(first)
    return _HalfEdges(half_edges.source[keep], half_edges.target[keep], table[keep])


def _flat(flattened: _Flattened, begins: Ids) -> "FlatNetwork":
    """Returns the offsets of everything; the table of each number begins at ``begins``."""
    from meshdsl.planner.mrf.kernels import FlatNetwork

    (source, target, table), count = flattened.half_edges, flattened.variables.order.size
    key = source * count + target
    by_key = np.argsort(key)
    return FlatNetwork(
        start=offsets(flattened.variables.sizes),
        first=offsets(np.bincount(source, minlength=count)),
        to=target,
        back=by_key[np.searchsorted(key[by_key], target * count + source)],
        out=offsets(flattened.variables.sizes[target])[:-1],
        table=begins[table],
    )


# ---- Message passing -------------------------------------------------------------------------------------------------


class MessagePassing:
    """Messages between the variables of packed networks, whose tables must be finite.

    Attributes:
      sent: the messages of all half edges.
      cost: of the cheapest state decoded so far, without the network's constant.
      lower: the lower bound of the last sweep, likewise.
    """

    def __init__(self, packed: Packed) -> None:
        self.order, self.flat, self.unary, self.tables, self.constant = packed
        flat, count = self.flat, self.flat.to.size
        self.sent = np.zeros(int(flat.out[-1] + flat.start[flat.to[-1] + 1] - flat.start[flat.to[-1]]) if count else 0)
        self._latest = np.zeros(self.order.size, dtype=np.int64)
        self._best, self.cost = self._latest.copy(), np.inf
        self.lower = -np.inf

    def run(self, passes: int) -> None:
        """Sweeps over the variables forwards and backwards, ``passes`` times each."""
        from meshdsl.planner.mrf import kernels

        network = self.flat, self.unary, self.tables
        self.cost, self.lower = kernels.passes(passes, *network, self.sent, self._latest, self._best, self.cost)

    @property
    def entries(self) -> int:
        """Entries of all pairwise tables: the work of one pass."""
        sizes, flat = np.diff(self.flat.start), self.flat
        return int((sizes[flat.to] * sizes[flat.to[flat.back]]).sum()) // 2

    @property
    def ends(self) -> tuple[Ints, Ints]:
        """The numbers of both variables of every half edge."""
        return half_edge_ends(self.flat, self.order)

    @property
    def decoded(self) -> Ints:
        """The cheapest states decoded so far, in order, by position among a variable's states."""
        return self._best

    @property
    def latest(self) -> Ints:
        """The states that the last sweep decoded, likewise."""
        return self._latest

    @property
    def bound(self) -> float:
        """The lower bound of the last sweep."""
        return self.lower + self.constant

    @property
    def gap(self) -> float:
        """The relative gap between the decoded states and the bound."""
        cost = self.cost + self.constant
        return float((self.cost - self.lower) / cost) if cost else 0.0


class TRWS(MessagePassing):
    """Messages of one network, which ``pruned`` and ``reparametrize`` change.

    Args:
      limit: entries of tables are clipped at this cost; the tables of the network must be finite otherwise.
    """

    def __init__(self, network: Network, limit: float = np.inf) -> None:
        self.network = network
        names = list(network.unary)
        alone = Replica(network, names, np.array([names], dtype=np.intp).reshape(1, -1))
        super().__init__(pack([alone], limit=limit)[0])

    @property
    def states(self) -> Ids:
        """The labels of the cheapest states decoded so far, for all variables, eliminated ones included."""
        return self.network.decode(self.order.tolist(), self.decoded)

    def pruned(self, upper: float, worth: float) -> "TRWS":
        """Prunes from the network all states that no solution of cost ``upper`` or less can have.

        Returns the messages on what remains. The tables are cut, not reparametrised, so that equal ones stay shared.

        Args:
          worth: nothing is pruned unless at most this part of all entries would remain.
        """
        from meshdsl.planner.mrf import kernels

        network, start, order = self.network, self.flat.start, self.order.tolist()
        excess, slack = np.zeros(self.unary.size), upper - network.constant - self.lower
        kernels.min_marginals(self.flat, self.unary, self.tables, self.sent, excess)
        survives = excess <= slack + 1.0  # costs are integers in a float; one unit more than covers rounding
        keep = {v: np.flatnonzero(survives[start[i] : start[i + 1]]) for i, v in enumerate(order)}
        rest = sum(keep[v].size * keep[w].size for v in order for w in network.pairwise[v] if v < w)
        if rest > worth * network.entries or not all(states.size for states in keep.values()):
            return self
        network.restrict_all(keep)
        other = TRWS(network)
        entries = [survives[start[i] : start[i + 1]] for i in self.flat.to]
        other.sent = self.sent[np.concatenate(entries)] if entries else self.sent
        return other

    def reparametrize(self) -> None:
        """Moves the messages into the tables of the network, whose sum of minima rises by that."""
        from meshdsl.planner.mrf import kernels

        network, flat, sizes, order = self.network, self.flat, np.diff(self.flat.start), self.order.tolist()
        ahead = np.repeat(np.arange(self.order.size), np.diff(flat.first)) < flat.to
        begin = offsets(np.where(ahead, sizes[flat.to[flat.back]] * sizes[flat.to], 0))
        own = np.where(ahead, begin[:-1], begin[flat.back])
        tables = np.empty(begin[-1])
        kernels.reparametrize(flat, self.unary, self.tables, self.sent, own, tables)
        for forward in (True, False):
            kernels.absorb(forward, flat, self.unary, own, tables)
        for i, v in enumerate(order):
            network.unary[v] = self.unary[flat.start[i] : flat.start[i + 1]]
            for h in range(flat.first[i], flat.first[i + 1]):
                if i < flat.to[h]:
                    w = order[flat.to[h]]
                    old = network.pairwise[v][w]
                    _replace(network, v, w, tables[own[h] : own[h] + old.size].reshape(old.shape))


# ---- Bounds on the tables themselves ---------------------------------------------------------------------------------


def sum_of_minima(network: Network) -> float:
    """Returns the sum of the minima of all tables, a lower bound on the network's minimum."""
    edges = (table for v, tables in network.pairwise.items() for w, table in tables.items() if v < w)
    return network.constant + sum(float(table.min()) for table in (*network.unary.values(), *edges))


def clip(network: Network, limit: float) -> None:
    """Clips all tables at ``limit``, which makes them finite; no solution of interest has an entry above it."""
    known: dict[int, Costs] = {}  # equal tables stay one object, and so do those that have no such entry

    def clipped(table: Costs) -> Costs:
        if object_id(table) not in known:
            known[object_id(table)] = table if table.max(initial=-np.inf) <= limit else np.minimum(table, limit)
        return known[object_id(table)]

    for v, tables in network.pairwise.items():
        for w, table in tables.items():
            if v < w and clipped(table) is not table:
                known.setdefault(object_id(network.pairwise[w][v]), clipped(table).T)
    for v, tables in network.pairwise.items():
        network.unary[v] = clipped(network.unary[v])
        network.pairwise[v] = {w: clipped(table) for w, table in tables.items()}


def prune_states(network: Network, upper: float) -> None:
    """Prunes states that no solution of cost ``upper`` or less can have, by the minima of the tables themselves."""
    slack, least_of = upper - sum_of_minima(network), np.minimum.reduce
    for v in list(network.unary):
        excess = network.unary[v] - network.unary[v].min()
        for table in network.pairwise[v].values():
            least = least_of(table, axis=1)
            excess = excess + (least - least_of(least))
        keep = np.flatnonzero(excess <= slack + 1.0)  # one unit covers rounding, as in ``TRWS.pruned``
        if 0 < keep.size < excess.size:
            network.unary[v] = network.unary[v][keep]
            labels = network.labels.get(v)
            network.labels[v] = keep if labels is None else labels[keep]
            for w in list(network.pairwise[v]):
                _replace(network, v, w, network.pairwise[v][w][keep])


def _replace(network: Network, v: int, w: int, table: Costs) -> None:
    network.pairwise[v][w], network.pairwise[w][v] = table, table.T
