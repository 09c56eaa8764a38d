"""A bound on what the moves of a value of many readers cost: as much as those to the dearest of its readers.

Where the layouts that readers may ask for are too many for exact trees (``sets``), a mean over pairs of readers counts
a move that one of them needs in part only. This one counts it whole, whoever that is, but no second one. As a variable
whose states are an own layout and the most that moves from there to a reader cost it is a pair of tables with each end.
What costs nearly the same is one state, at the least of that; and so is all that no better plan can spend.
"""

from collections.abc import Sequence

import numpy as np

from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.network import Network
from meshdsl.planner.stars import Stars

_NEARLY = 1.01  # times a cost is nearly the same
End = tuple[int, Ids]  # a variable, and the layouts of its states


def add_dearest(network: Network, stars: Stars, value: int, ends: Sequence[End], spent: float, most: int) -> int:
    """Entries of the tables of a value's dearest moves, which are added to a network; 0 if they are more than ``most``.

    Args:
      ends: where the value is made, then its readers.
      spent: cost from which on moves are not told apart.
    """

    def make(own: Ids, *reads: Ids) -> tuple[Costs, ...]:
        return _tables(stars, value, own, reads, spent, most)

    how = ("dearest", stars.model.closure(value).number, stars.model.trips(value), spent, most)
    costs, *tables = network.derived.get(how, tuple(read for _, read in ends), make)
    if tables:
        hub = network.new(costs, None, ends[0][0])
        for (node, _), table in zip(ends, tables, strict=True):
            network.add(hub, node, table)
    return sum(table.size for table in tables)


def _tables(stars: Stars, value: int, own: Ids, reads: Sequence[Ids], spent: float, most: int) -> tuple[Costs, ...]:
    """What states cost, and with the states of each end, if these are few enough."""
    made, costs = np.unique(own), [stars.moves(value, np.unique(own), read) for read in reads]
    at, least, up_to = _in_steps(np.hstack(costs), spent)
    if at.size * (own.size + sum(read.size for read in reads)) > most:
        return (least,)
    source = made[at][:, None] == own[None]
    readers = [cost[at] <= up_to[:, None] for cost in costs]
    return least, *(np.where(holds, 0.0, np.inf) for holds in (source, *readers))


def _in_steps(costs: Costs, spent: float) -> tuple[Ids, Costs, Costs]:
    """Rows of costs, and of what is nearly the same in one of them, the least and the most."""
    capped = np.minimum(costs, spent)
    steps = np.floor(np.log(np.maximum(capped, 1.0)) / np.log(_NEARLY)).astype(np.intp)
    count = int(steps.max(initial=0)) + 1
    kinds, place = np.unique((np.arange(len(costs))[:, None] * count + steps).ravel(), return_inverse=True)
    least, up_to = np.full(kinds.size, np.inf), np.zeros(kinds.size)
    np.minimum.at(least, place, capped.ravel())
    np.maximum.at(up_to, place, costs.ravel())
    return kinds // count, least, up_to
