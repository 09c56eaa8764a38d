"""Exact trees for a value of three readers, and what is kept of it for the last one while another one reads.

Such a tree has two forks at most: from the first one, one reader's moves go off; from the second one, those of the
other two. As a variable whose states are two forks and who goes off first it is a pair of tables with each end. One
reader comes *before* memory is full, one *meanwhile*, one *later*. For the last one some copy is in memory meanwhile,
on the way from where moves have gone to the one before. Where it lies is part of a state as well:

    goes off first   kept for the later reader
    later            on its way from the first fork
    meanwhile        on its way from the second fork
    before           on its way from the second fork, or between the forks,
                     or nothing besides the second fork, if that is what is read meanwhile
"""

from typing import NamedTuple

import numpy as np

from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.network import Network
from meshdsl.planner.stars import Stars

_STATES = 5  # of two forks
End = tuple[int, Ids]  # a variable, and the layouts of its states


class Readers(NamedTuple):
    """The ends of a value, where it is made first; ``price`` is that of a byte that is kept."""

    source: End
    before: End
    meanwhile: End
    later: End
    price: float


def entries(stars: Stars, value: int, readers: Readers) -> int:
    """Of the tables of a value's trees."""
    return int(_STATES * stars.model.closure(value).fitting.size ** 2 * sum(at.size for _, at in readers[:4]))


def add_forks(network: Network, stars: Stars, value: int, readers: Readers) -> None:
    """Add the trees of a value, no copies of which are partial, to a network."""
    ends, price = readers[:4], readers.price

    def make(*reads: Ids) -> tuple[Costs, ...]:
        return _tables(stars, value, reads, price)

    how = ("forks", stars.model.closure(value).number, stars.model.trips(value), price)
    costs, *tables = network.derived.get(how, tuple(read for _, read in ends), make)
    hub = network.new(costs, None, readers.source[0])
    for (node, _), table in zip(ends, tables, strict=True):
        network.add(hub, node, table)


def _tables(stars: Stars, value: int, reads: tuple[Ids, ...], price: float) -> tuple[Costs, ...]:
    """What states cost, and with the states of each end."""
    own, before, meanwhile, later = reads
    forks = stars.model.closure(value).fitting
    first, second = (each.ravel() for each in np.indices((forks.size, forks.size)))
    between, keeping = stars.moves(value, forks, forks, 1.0, True), stars.keeping(value, forks, forks, price)
    to, at_first = stars.moves(value, own, forks, 1.0, True).T, stars.moves(value, forks, before)
    taken, same = stars.moves(value, forks, meanwhile), np.where(forks[:, None] == meanwhile[None], 0.0, np.inf)
    onward, kept = stars.moves(value, forks, later), stars.keeping(value, forks, later, price)
    states = [
        (between, at_first[second], taken[second], kept[first]),
        (between, at_first[second], taken[first], kept[second]),
        (between, at_first[first], taken[second], kept[second]),
        (np.maximum(between, keeping), at_first[first], taken[second], onward[second]),
        (between, at_first[first], same[second], onward[second]),
    ]
    costs, *tables = zip(*states, strict=True)
    return np.concatenate([cost.ravel() for cost in costs]), np.tile(to[first], (_STATES, 1)), *map(np.vstack, tables)
