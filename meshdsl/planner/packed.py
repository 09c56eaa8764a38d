"""Networks laid out flat, for messages: one alone, or all copies of some put together, as ``Network.stamp`` does.

A step of a hundred equal layers has the tables of one, and what its variables are called in each layer is known as
arrays. So all layers are laid out at once, without asking every variable for its neighbours.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.network import Network, Stamp
from meshdsl.planner.numbering import array

if TYPE_CHECKING:
    from meshdsl.planner.kernels import Flat


class Packed(NamedTuple):
    """Variables in order, and their tables, equal ones once."""

    order: Ids
    flat: "Flat"
    unary: Costs
    tables: Costs
    constant: float


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


def packed(stamps: Sequence[Stamp], limit: float = np.inf) -> Packed:
    """All copies of some networks, no table with an entry above ``limit``."""
    from meshdsl.planner.kernels import Flat, added  # with its compiler, too much to import for those who plan nothing

    variables = _variables(stamps)
    count, sizes = variables.order.size, variables.sizes
    start = offsets(sizes)
    unary = np.zeros(start[-1])
    for stamp, here in zip(stamps, variables.here, strict=True):
        costs, begins, ends = _joined(list(stamp.part.unary.values()))
        copies = len(here)
        added(costs, unary, np.tile(begins, copies), np.tile(ends, copies), start[here.ravel()])
    halves, tables = _halves(stamps, variables)
    own = np.flatnonzero(halves.source == halves.target)
    for i in own[::2]:  # there are two halves of it
        at = start[halves.source[i]]
        unary[at : at + sizes[halves.source[i]]] += np.diagonal(tables[halves.table[i]])
    halves = _merged(_Halves(*(np.delete(column, own) for column in halves)), tables, count)
    used, table = np.unique(halves.table, return_inverse=True)
    costs, begins, _ = _joined([tables[i] for i in used.tolist()])
    key = halves.source * count + halves.target
    by_key = np.argsort(key)
    flat = Flat(
        start=start,
        first=offsets(np.bincount(halves.source, minlength=count)),
        to=halves.target,
        back=by_key[np.searchsorted(key[by_key], halves.target * count + halves.source)],
        out=offsets(sizes[halves.target])[:-1],
        table=begins[table],
    )
    constant = sum(stamp.part.constant * len(stamp.numbers) for stamp in stamps)
    return Packed(variables.order, flat, np.minimum(unary, limit), np.minimum(costs, limit), constant)


def alone(network: Network) -> Packed:
    """One network."""
    names = list(network.unary)
    return packed([Stamp(network, names, np.array([names], dtype=np.intp).reshape(1, -1))])


def offsets(sizes: Ids) -> Ids:
    """Where blocks of these sizes begin, one after the other, and where the last one ends."""
    return np.concatenate([array((0,)), np.cumsum(sizes)])


def _variables(stamps: Sequence[Stamp]) -> _Variables:
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


def _halves(stamps: Sequence[Stamp], variables: _Variables) -> tuple[_Halves, list[Costs]]:
    """All half edges, those of a variable in the order in which its networks list them, and the tables."""
    once: dict[int, tuple[int, Costs]] = {}
    columns: list[tuple[Ids, Ids, Ids]] = []
    for (part, _, _), here in zip(stamps, variables.here, strict=True):
        column = {v: i for i, v in enumerate(part.unary)}
        number = array(
            once.setdefault(id(table), (len(once), table))[0] for near in part.near.values() for table in near.values()
        )
        source = here[:, array(column[v] for v, near in part.near.items() for _ in near)]
        target = here[:, array(column[w] for near in part.near.values() for w in near)]
        columns.append((source, target, np.broadcast_to(number, source.shape)))
    every = [np.concatenate([array(()), *map(np.ravel, found)]) for found in zip(*columns, strict=True)]
    order = np.argsort(every[0], kind="stable")
    return _Halves(*(column[order] for column in every)), [table for _, table in once.values()]


def _merged(halves: _Halves, tables: list[Costs], count: int) -> _Halves:
    """One half edge for each of a pair's: the tables of several add up, and are added to ``tables``."""
    key = halves.source * count + halves.target
    order = np.argsort(key, kind="stable")
    new = np.diff(key[order], prepend=-1) != 0
    first, turn = order[new], np.arange(order.size) - np.flatnonzero(new)[np.cumsum(new) - 1]
    table, sums = halves.table.copy(), dict[tuple[int, int], int]()
    for i in range(1, int(turn.max(initial=0)) + 1):
        more = turn == i
        into = first[np.cumsum(new)[more] - 1]
        for half, a, b in zip(into.tolist(), table[into].tolist(), halves.table[order[more]].tolist(), strict=True):
            if (a, b) not in sums:
                sums[a, b] = len(tables)
                tables.append(tables[a] + tables[b])
            table[half] = sums[a, b]
    stays = np.sort(first)
    return _Halves(halves.source[stays], halves.target[stays], table[stays])


def _joined(arrays: list[Costs]) -> tuple[Costs, Ids, Ids]:
    """Arrays one after the other, those that are the same object once; where each begins and ends."""
    once = {id(found): found for found in arrays}
    begins = dict(zip(once, accumulate((found.size for found in once.values()), initial=0), strict=False))
    begin = array(begins[id(found)] for found in arrays)
    every = np.concatenate([np.zeros(0), *(found.ravel() for found in once.values())])
    return every, begin, begin + array(found.size for found in arrays)
