"""Exact resharding trees for values with several consumers, as one auxiliary variable each.

Where the layouts that consumers may read are few, the cost of a value's tree depends on its own layout and on the *set*
of layouts that its consumers take. As a variable whose states are these sets it takes one table per end, whatever the
trees look like:

    own layout -- set      the cost of the cheapest tree from there to all of the set
    set -- consumer        zero if the set contains the consumer's layout, else infinite

Sets are bit masks. Their costs follow the recurrence of Dreyfus and Wagner (1971), which ``costs.steiner`` states and
solves for one set of terminals at a time, with its tree, at evaluation; here it is solved for all sets together, costs
only, subset by subset. ``tests/planner/encoding/test_steiner_variables.py`` compares both, which agree bit for bit.

*Fork variables* (last section) are exact for three consumers, one copy of which has a price per byte while another
consumer runs. That price depends on where on the tree the copy lies, which the recurrence does not know; so the states
are the two forks of the tree themselves, enumerated.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.costs.fixed_point import scale_costs
from meshdsl.planner.costs.reshard_cost import LayoutDomain
from meshdsl.planner.costs.steiner import cheapest_from_forks, cheapest_split
from meshdsl.planner.encoding.hubs import HubTables
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.mrf.network import Memo, Network
from meshdsl.util.arrays import Costs, Ids, Ints

_MASK_BITS = 62  # layouts in all: masks are int64

PortLayouts = tuple[int, Ids]  # a node, and the layouts of one of its ports over its states

# ---- Subset variables ------------------------------------------------------------------------------------------------


def add_subset_variable(network: Network, tables: HubTables, value: int, ends: Sequence[PortLayouts], most: int) -> int:
    """Adds the exact trees of a value to a network.

    Args:
      ends: its producer, then its consumers.
      most: entries that the tables may have.

    Returns their entries; 0 if they would be more than ``most``, and nothing is added.
    """
    model, memo, ((source, own), *consumers) = tables.model, network.memo, ends
    domain, weight = model.domain(value), model.weight(value)
    found = reachable_sets_of(memo, [read for _, read in ends], most, model.limits)
    if found is None:
        return 0
    layouts, sets = found

    def costs(own: Ids, sets: Ints) -> Costs:
        return scale_costs(tree_costs(domain.costs, domain.transit_costs, layouts, sets)[:, own].T, weight)

    def membership(sets: Ints, read: Ids) -> Costs:
        return np.where(contains(layouts, sets, read), 0.0, np.inf)

    hub = network.new_variable(memo.get("no cost", (sets,), lambda sets: np.zeros(sets.size)), None, source)
    network.add(source, hub, memo.get(("trees", domain.number, weight), (own, sets), costs))
    for consumer, read in consumers:
        network.add(hub, consumer, memo.get("membership", (sets, read), membership))
    return sets.size * sum(at.size for _, at in ends)


def reachable_sets_of(memo: Memo, ends: Sequence[Ids], most: int, limits: SearchLimits) -> tuple[Ids, Ints] | None:
    """Returns ``reachable_sets``, or None if the tables of the value would have more than ``most`` entries.

    Args:
      ends: the layouts of the producer's port over its states, then those of the consumers' ports.
    """
    found: tuple[Ids, Ints] | None = memo.get(
        ("reachable sets", most), tuple(ends), lambda *at: reachable_sets(at[1:], most // sum(map(len, at)), limits)
    )
    return found


def reachable_sets(reads: Sequence[Ids], most: int, limits: SearchLimits) -> tuple[Ids, Ints] | None:
    """Returns all layouts that consumers may read, and all sets of these that they may read together.

    Args:
      reads: per consumer, the layouts over its states.
      most: sets. With more, or with sets that take too long to divide, the result is None.
    """
    layouts = np.unique(np.concatenate(reads))
    if layouts.size > _MASK_BITS:
        return None
    sets = np.zeros(1, dtype=np.int64)
    for read in sorted(map(np.unique, reads), key=len):
        bits = np.left_shift(1, np.searchsorted(layouts, read)).astype(np.int64)
        if sets.size * bits.size > _MASK_BITS * most:  # so many, most of them equal, would have to be sorted
            return None
        sets = np.unique(sets[:, None] | bits)
    largest = int(np.bitwise_count(sets).max())
    feasible = largest <= limits.encoding_set_layouts and sets.size << largest <= limits.encoding_set_splits
    return (layouts, sets) if sets.size <= most and feasible else None


def contains(layouts: Ids, sets: Ints, read: Ids) -> NDArray[np.bool_]:
    """Returns [sets, states of a consumer]: whether the set contains the layout that the state reads."""
    return np.asarray(sets[:, None] >> np.searchsorted(layouts, read) & 1 > 0)


def tree_costs(costs: Costs, inner: Costs, layouts: Ids, sets: Ints) -> Costs:
    """Returns [sets, all layouts]: the cost of the cheapest tree from a layout to all layouts of a set.

    Args:
      costs: between layouts, to a consumer.
      inner: between layouts, to a fork.
      layouts: that bit i of a set stands for.
    """
    known = np.left_shift(1, np.arange(layouts.size)).astype(np.int64)  # masks in ascending order, single ones first
    found = costs[:, layouts].T  # [known, all layouts]
    missing = np.setdiff1d(sets, known)
    for size in range(2, int(np.bitwise_count(missing).max(initial=0)) + 1):
        new = _subsets_of(missing, size)  # all proper subsets of these are known
        splits = ((np.searchsorted(known, part), np.searchsorted(known, new ^ part)) for part in _halves(new))
        grown = cheapest_from_forks(inner, cheapest_split((found[one], found[other]) for one, other in splits))
        order = np.argsort(np.concatenate([known, new]))
        known, found = np.concatenate([known, new])[order], np.concatenate([found, grown])[order]
    return np.asarray(found[np.searchsorted(known, sets)])


def _members(sets: Ints, size: int) -> Ints:
    """Returns [sets, size]: the single layouts, as masks, of sets that have ``size`` each."""
    rest, found = sets.copy(), np.empty((sets.size, size), dtype=np.int64)
    for i in range(size):
        found[:, i] = rest & -rest
        rest ^= found[:, i]
    return found


def _subsets_of(sets: Ints, size: int) -> Ints:
    """Returns all subsets of ``size`` layouts of any of the sets, those sets included."""
    counts = np.bitwise_count(sets)
    found = [
        members[:, some].sum(axis=1)
        for count in range(size, int(counts.max()) + 1)
        for members in [_members(sets[counts == count], count)]
        for some in map(list, combinations(range(count), size))
    ]
    return np.unique(np.concatenate(found))


def _halves(sets: Ints) -> list[Ints]:
    """Returns, for every way to divide sets of one size in two, the half that contains the first layout."""
    size = int(np.bitwise_count(sets[:1])[0])
    members = _members(sets, size)
    return [
        members[:, [0, *others]].sum(axis=1)
        for count in range(size - 1)
        for others in combinations(range(1, size), count)
    ]


# ---- Fork variables --------------------------------------------------------------------------------------------------
# A tree to three consumers has at most two forks: at the first, one consumer branches off; at the second, the other two
# part. As a variable whose states are two forks and the consumer that branches off first, it takes one table per end.
#
# One consumer runs *before* memory is full, one *meanwhile*, one *later*. For the later one some copy is stored
# meanwhile: on its path, from where the branch to the earlier consumer has left it. Which one is part of the state:
#
#     branches off first   stored for the later consumer
#     later                a layout on its path from the first fork
#     meanwhile            a layout on its path from the second fork
#     before               a layout on its path from the second fork, or between the forks,
#                          or nothing besides the second fork, if the consumer meanwhile reads that one

_FORK_CASES = 5  # the rows of this table, with its three alternatives in the last


class ThreeConsumers(NamedTuple):
    """A value with three consumers.

    Args:
      ends: the producer, then the consumers before, meanwhile and later.
      price: of a byte that is stored for the later one.
    """

    ends: Sequence[PortLayouts]
    price: float


def fork_entries(domain: LayoutDomain, consumers: ThreeConsumers) -> int:
    """Returns the entries of the tables of a fork variable."""
    return int(_FORK_CASES * domain.indices.size**2 * sum(at.size for _, at in consumers.ends))


def add_fork_variable(network: Network, tables: HubTables, value: int, consumers: ThreeConsumers) -> None:
    """Adds the trees of a value to a network; no layout of the value may be partial."""

    def make(*reads: Ids) -> tuple[Costs, ...]:
        return _fork_tables(tables, value, reads, consumers.price)

    key = ("forks", tables.model.domain(value).number, tables.model.weight(value), consumers.price)
    costs, *edges = network.memo.get(key, tuple(read for _, read in consumers.ends), make)
    hub = network.new_variable(costs, None, consumers.ends[0][0])
    for (node, _), table in zip(consumers.ends, edges, strict=True):
        network.add(hub, node, table)


def _fork_tables(tables: HubTables, value: int, reads: tuple[Ids, ...], price: float) -> tuple[Costs, ...]:
    """Returns the costs of the states, and their tables with the four ends."""
    own, before, meanwhile, later = reads
    forks = tables.model.domain(value).indices
    first, second = (each.ravel() for each in np.indices((forks.size, forks.size)))
    between, stored_between = (
        tables.moves(value, forks, forks, 1.0, True),
        tables.stored_moves(value, forks, forks, price),
    )
    to_first = tables.moves(value, own, forks, 1.0, True).T
    to_before, to_meanwhile, to_later = (tables.moves(value, forks, each) for each in (before, meanwhile, later))
    is_meanwhile = np.where(forks[:, None] == meanwhile[None], 0.0, np.inf)
    stored = tables.stored_moves(value, forks, later, price)
    cases = [
        (between, to_before[second], to_meanwhile[second], stored[first]),
        (between, to_before[second], to_meanwhile[first], stored[second]),
        (between, to_before[first], to_meanwhile[second], stored[second]),
        (np.maximum(between, stored_between), to_before[first], to_meanwhile[second], to_later[second]),
        (between, to_before[first], is_meanwhile[second], to_later[second]),
    ]
    costs, *ends = zip(*cases, strict=True)
    return (
        np.concatenate([cost.ravel() for cost in costs]),
        np.tile(to_first[first], (_FORK_CASES, 1)),
        *map(np.vstack, ends),
    )
