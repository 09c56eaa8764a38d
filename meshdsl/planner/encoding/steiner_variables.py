"""Exact trees for a value of many readers, where the layouts that they may ask for are few.

What a value's moves cost depends on its own layout and on the *set* of layouts that its readers take. As a
variable whose states are these sets it is a pair of tables, whatever the trees look like:

    own layout -- set      what the cheapest tree from there to all of the set costs
    set -- reader          nothing if the set holds the reader's layout, else not allowed

Sets are bits. Tree costs are those of ``tree``, worked out for all sets together (Dreyfus and Wagner 1971): a tree to
several layouts moves to a fork, and two trees go on from there, to a part each.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.costs.fixed_point import repeated
from meshdsl.planner.costs.reshard_cost import LayoutDomain
from meshdsl.planner.encoding.hubs import HubTables
from meshdsl.planner.mrf.network import Memo, Network
from meshdsl.util.arrays import Costs, Ids, Ints

# ---- Sets ------------------------------------------------------------------------------------------------------------


_BITS = 62  # layouts in all
_LEAVES, _PARTS = 12, 1 << 21  # layouts in one set, and ways to divide all sets in two
End = tuple[int, Ids]  # a variable, and the layouts of its states


def add_subset_variables(network: Network, closure: LayoutDomain, trips: int, ends: Sequence[End], most: int) -> int:
    """Entries of the tables of a value's trees, which are added to a network; 0 if they would be more than ``most``.

    Args:
      ends: where the value is made, then its readers.
    """
    (source, own), *readers = ends
    derived, found = network.memo, asked_for_by(network.memo, [read for _, read in ends], most)
    if found is None:
        return 0
    layouts, sets = found

    def trees(own: Ids, sets: Ints) -> Costs:
        return repeated(tree_costs(closure.costs, closure.inner, layouts, sets)[:, own].T, trips)

    def held(sets: Ints, read: Ids) -> Costs:
        return np.where(holds(layouts, sets, read), 0.0, np.inf)

    hub = network.new_variable(derived.get("no cost", (sets,), lambda sets: np.zeros(sets.size)), None, source)
    network.add(source, hub, derived.get(("trees", closure.number, trips), (own, sets), trees))
    for reader, read in readers:
        network.add(hub, reader, derived.get("held", (sets, read), held))
    return sets.size * sum(at.size for _, at in ends)


def asked_for_by(derived: Memo, ends: Sequence[Ids], most: int) -> tuple[Ids, Ints] | None:
    """As ``asked_for``, unless the tables of a value would have more entries than ``most``.

    Args:
      ends: per node that makes or reads the value, the layouts of its states.
    """
    found: tuple[Ids, Ints] | None = derived.get(
        ("asked", most), tuple(ends), lambda *at: asked_for(at[1:], most // sum(map(len, at)))
    )
    return found


def asked_for(reads: Sequence[Ids], most: int) -> tuple[Ids, Ints] | None:
    """The layouts that readers may ask for, and the sets of them that they may ask for together; None if too many.

    Args:
      reads: per reader, the layouts of its states.
      most: sets.
    """
    layouts = np.unique(np.concatenate(reads))
    if layouts.size > _BITS:
        return None
    sets = np.zeros(1, dtype=np.int64)
    for read in sorted(map(np.unique, reads), key=len):
        bits = np.left_shift(1, np.searchsorted(layouts, read)).astype(np.int64)
        if sets.size * bits.size > _BITS * most:
            return None
        sets = np.unique(sets[:, None] | bits)
    leaves = int(np.bitwise_count(sets).max())
    fits = sets.size <= most and leaves <= _LEAVES and sets.size << leaves <= _PARTS
    return (layouts, sets) if fits else None


def holds(layouts: Ids, sets: Ints, read: Ids) -> NDArray[np.bool_]:
    """[sets, states of a reader]: whether the set holds the layout of the state."""
    return np.asarray(sets[:, None] >> np.searchsorted(layouts, read) & 1 > 0)


def tree_costs(costs: Costs, inner: Costs, layouts: Ids, sets: Ints) -> Costs:
    """[sets, all layouts]: what the cheapest tree from a layout to all of a set costs.

    Args:
      costs: of moving to where a reader is. inner: of moving to where moves go on from.
    """
    return _SteinerTables(costs, inner, layouts).to(sets)


class _SteinerTables:
    """Trees to sets of layouts; each set that is a part of another is worked out once."""

    def __init__(self, costs: Costs, inner: Costs, layouts: Ids) -> None:
        self.inner = inner
        self.sets = np.left_shift(1, np.arange(layouts.size)).astype(np.int64)  # known ones, rising
        self.costs = costs[:, layouts].T

    def to(self, sets: Ints) -> Costs:
        """Costs per set and layout of origin."""
        missing = np.setdiff1d(sets, self.sets)
        for size in range(2, int(np.bitwise_count(missing).max(initial=0)) + 1):
            self._add(_parts_of(missing, size))
        return self._known(sets)

    def _known(self, sets: Ints) -> Costs:
        return np.asarray(self.costs[np.searchsorted(self.sets, sets)])

    def _add(self, sets: Ints) -> None:
        """Add sets of one size, all parts of which are known."""
        joined = np.full((sets.size, self.inner.shape[0]), np.inf)
        for part in _proper_parts(sets):
            np.minimum(joined, self._known(part) + self._known(sets ^ part), out=joined)
        found = np.full_like(joined, np.inf)
        for fork, reached in enumerate(joined.T):
            np.minimum(found, reached[:, None] + self.inner[:, fork], out=found)
        order = np.argsort(np.concatenate([self.sets, sets]))
        self.sets = np.concatenate([self.sets, sets])[order]
        self.costs = np.concatenate([self.costs, found])[order]


def _members(sets: Ints, size: int) -> Ints:
    """[sets, size]: the single layouts of sets that have so many, as bits."""
    rest, found = sets.copy(), np.empty((sets.size, size), dtype=np.int64)
    for i in range(size):
        found[:, i] = rest & -rest
        rest ^= found[:, i]
    return found


def _parts_of(sets: Ints, size: int) -> Ints:
    """The parts of ``sets`` that have ``size`` layouts, the whole sets among them."""
    counts = np.bitwise_count(sets)
    found = [
        members[:, some].sum(axis=1)
        for count in range(size, int(counts.max()) + 1)
        for members in [_members(sets[counts == count], count)]
        for some in map(list, combinations(range(count), size))
    ]
    return np.unique(np.concatenate(found))


def _proper_parts(sets: Ints) -> list[Ints]:
    """Of sets of one size, one half of every way to divide them in two: the half with the first layout."""
    size = int(np.bitwise_count(sets[:1])[0])
    members = _members(sets, size)
    return [
        members[:, [0, *others]].sum(axis=1)
        for count in range(size - 1)
        for others in combinations(range(1, size), count)
    ]


# ---- Forks -----------------------------------------------------------------------------------------------------------
# Exact trees for a value of three readers, and what is kept of it for the last one while another one reads.
#
# Such a tree has two forks at most: from the first one, one reader's moves go off; from the second one, those of the
# other two. As a variable whose states are two forks and who goes off first it is a pair of tables with each end. One
# reader comes *before* memory is full, one *meanwhile*, one *later*. For the last one some copy is in memory meanwhile,
# on the way from where moves have gone to the one before. Where it lies is part of a state as well:
#
#     goes off first   kept for the later reader
#     later            on its way from the first fork
#     meanwhile        on its way from the second fork
#     before           on its way from the second fork, or between the forks,
#                      or nothing besides the second fork, if that is what is read meanwhile


_STATES = 5  # of two forks


class ThreeConsumers(NamedTuple):
    """The ends of a value, where it is made first; ``price`` is that of a byte that is kept."""

    source: End
    before: End
    meanwhile: End
    later: End
    price: float


def entries(stars: HubTables, value: int, readers: ThreeConsumers) -> int:
    """Of the tables of a value's trees."""
    return int(_STATES * stars.model.closure(value).fitting.size ** 2 * sum(at.size for _, at in readers[:4]))


def add_fork_variables(network: Network, stars: HubTables, value: int, readers: ThreeConsumers) -> None:
    """Add the trees of a value, no copies of which are partial, to a network."""
    ends, price = readers[:4], readers.price

    def make(*reads: Ids) -> tuple[Costs, ...]:
        return _tables(stars, value, reads, price)

    how = ("forks", stars.model.closure(value).number, stars.model.trips(value), price)
    costs, *tables = network.memo.get(how, tuple(read for _, read in ends), make)
    hub = network.new_variable(costs, None, readers.source[0])
    for (node, _), table in zip(ends, tables, strict=True):
        network.add(hub, node, table)


def _tables(stars: HubTables, value: int, reads: tuple[Ids, ...], price: float) -> tuple[Costs, ...]:
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
