"""What memory holds at least while an operation runs, as a sum over single operands, results and pairs of them.

Predicted memory (``memory``, ``lives``) depends on a whole plan: copies are shared, come early where they are smaller,
lie over one another. Some of them are there in any case (``surely_live``), each as large as the states of one node
or two
say; those of the graphs around an operation count with its own:

    inputs that are never given up           in their own layout, at every operation
    what the operation reads                 in the layout in which it reads it; once, if such an input lies so
    what it writes                           in its own layout
    what was made before and is read once    in any layout on the way there, from where it has gone to what has read it
    later, and at most once before           before
    what it reads, and another did before,   in any layout on the way there as well, unless one of these is the one in
    and one more later                       which it reads it
    what else is read later                  in its own layout, if it is read in the same; else in the smallest of all

So the sum is no more than the predicted memory of any plan, and a bound may price it (``dual``).
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from meshdsl.ir.graph import Op, Value
from meshdsl.ir.index import Flags, GraphIndex
from meshdsl.planner.costs.op_cost import local_share
from meshdsl.planner.liveness.aliasing import BufferAliases, buffer_aliases
from meshdsl.planner.objective import CostedPlan, ResidentCopies
from meshdsl.planner.problem.model import Assignment, Model, Prices
from meshdsl.planner.problem.ports import End, Wiring
from meshdsl.util.arrays import Costs, Ids, group_by, index_array, object_id, row_ids

# ---- Certain ---------------------------------------------------------------------------------------------------------
# What is in memory while an operation of a graph runs, whatever the plan.
#
# ``Lives`` says of one plan what lives when. This says it of all: which operands and results an operation certainly
# holds, and which values are needed after it that were made before. Left out is what may lie elsewhere: views, values
# that are fused away; and in the body of a loop what may lie in memory of the graph around it. Of operands and a result
# that may be written over one of them, which is then as large, the operands count, if they are among the rest.


_AFTER, _TIMES = 2, 3  # before an operation runs, meanwhile, and afterwards


@dataclass(frozen=True)
class SurelyLive:
    """What one graph holds while its operation at a position runs; values and readings go by their numbers.

    Args:
      read: per value, a reading by the operation, or by one before that is fused into this one or a later one.
      written: its results.
      later: of values made before and needed afterwards, the last reading.
      once: those of these values that are read but once afterwards.
      again: [values, 2], of those in ``read`` that are read once before, once while the operation runs, and once
        afterwards, the last two readings.
    """

    read: Ids
    written: Ids
    later: Ids
    once: Flags
    again: Ids


def surely_live(places: BufferAliases, at: int, counted: Flags) -> SurelyLive:
    """What the graph that a position is in holds while the operation there runs.

    Args:
      counted: the inputs that are the graph's own to hold.
    """
    numbers, part = places.numbers, int(places.numbers.block_of[at])
    start, stop = numbers.blocks[part].start, numbers.blocks[part].stop
    own = places.kept & (numbers.producer >= start)
    inside = (own | counted) & ~numbers.mask(_views(places)[0]) & ~_elsewhere(places, part)
    there = np.arange(numbers.first_use[start], numbers.first_use[stop])
    before = there[(numbers.use_position[there] <= at) & (places.runs[numbers.use_position[there]] >= at)]
    waiting = inside & (counted | (numbers.producer < at))
    waiting[numbers.use_value[before]] = False
    after = there[(numbers.use_position[there] > at) & waiting[numbers.use_value[there]]]
    later = _last(numbers, after)
    results, options = _reuses(places, at)
    over = _viewed(places, numbers.use_value[options])
    # what a result may be written over is there, or that result, unless it lies elsewhere
    under = (
        inside[results]
        & inside[numbers.use_value[options]]
        & ~numbers.mask(numbers.use_value[later])[numbers.use_value[options]]
    )
    read = _last(
        numbers, np.append(before[inside[numbers.use_value[before]] & ~over[numbers.use_value[before]]], options[under])
    )
    written = inside & (numbers.producer == at)
    written[results[under]] = False
    once = np.bincount(numbers.use_value[after], minlength=inside.size) == 1
    again = _again(
        numbers,
        there,
        np.where(numbers.use_position[there] > at, _AFTER, places.runs[numbers.use_position[there]] >= at),
    )
    kept = numbers.mask(numbers.use_value[read])[numbers.use_value[again[:, 0]]]
    return SurelyLive(read, np.flatnonzero(written), later, once, again[kept])


def _again(numbers: GraphIndex, readings: Ids, when: Ids) -> Ids:
    """Of values that are read once before an operation runs, once meanwhile and once afterwards, the last two readings.

    Args:
      when: of each reading, 0, 1 or 2.
    """
    values = numbers.use_value[readings]
    times = np.bincount(values * _TIMES + when, minlength=len(numbers.values) * _TIMES).reshape(-1, _TIMES)
    found = np.full((len(numbers.values), _TIMES), -1)
    found[values, when] = readings
    again: Ids = found[(times == 1).all(axis=1), 1:]
    return again


def _last(numbers: GraphIndex, readings: Ids) -> Ids:
    """Of the readings of each value, one by the last operation that reads it: of its first such operand."""
    order = np.lexsort((numbers.use_operand[readings], -numbers.use_position[readings], numbers.use_value[readings]))
    return readings[order[np.flatnonzero(np.diff(numbers.use_value[readings[order]], prepend=-1))]]


def _reuses(places: BufferAliases, at: int) -> tuple[Ids, Ids]:
    """Results of an operation and the readings that each may be written over."""
    reuses = places.reuses
    first, last = np.searchsorted(reuses.at, (at, at + 1))
    options = reuses.options[first : last + 1]
    return np.repeat(reuses.made[first:last], np.diff(options)), reuses.over[options[0] : options[-1]]


def _views(places: BufferAliases) -> tuple[Ids, Ids]:
    """Values that may be views, and what each views."""
    numbers = places.numbers
    seen = numbers.use_numbers_at(places.views, np.zeros_like(places.views))
    return numbers.first_result[places.views[seen >= 0]], numbers.use_value[seen[seen >= 0]]


def _viewed(places: BufferAliases, values: Ids) -> Flags:
    """Values, and what they view."""
    views, seen = _views(places)
    return _reached(places.numbers.mask(values), views, seen)


def _elsewhere(places: BufferAliases, part: int) -> Flags:
    """The values of a body that may lie in memory around it: in a carry's place, or where it returns them."""
    numbers, (start, stop, *_, around) = places.numbers, places.numbers.blocks[part]
    if around is None:
        return numbers.mask(np.empty(0, dtype=np.intp))
    carried = numbers.mask(
        np.array([numbers.first_result[start - 1] + i for i, _ in places.lies[part].carried], dtype=np.intp)
    )
    views, seen = _views(places)
    over, made = numbers.use_value[places.reuses.over], np.repeat(places.reuses.made, np.diff(places.reuses.options))
    found = _reached(carried, np.append(seen, over), np.append(views, made))
    returned = numbers.use_value[numbers.first_use[stop - 1] : numbers.first_use[stop]]
    return found | _viewed(places, returned)


def _reached(found: Flags, sources: Ids, targets: Ids) -> Flags:
    """Values, and those that arcs lead to from them."""
    while True:
        further = targets[found[sources] & ~found[targets]]
        if not further.size:
            return found
        found[further] = True


# ---- Floor -----------------------------------------------------------------------------------------------------------


_FORK, _THREE = 3, 4  # ends of a value of which the network knows the only fork, or both
_LATER = 10_000  # values that are read later are looked at, the largest


class _Same(NamedTuple):
    """Ports that hold ``shares`` of bytes at least by the states of their nodes, and in any state ``least``."""

    shares: Costs
    nodes: Ids
    ports: Ids
    least: Costs

    def bytes(self, rows: Assignment) -> Costs:
        """Of each."""
        return np.asarray(self.shares[tuple(rows[self.nodes].T)])


class MemoryLowerBound:
    """Nodes' ports that are in memory while an operation runs.

    ``ends`` are there in any case, ``copies`` where they differ from the input that they are a copy of, what ``later``
    reads where it does not, something of it elsewhere, and some copy of what ``kept`` reads; of ``again``, later
    readers with those that read meanwhile, some copy that these do not take.

    Args:
      donated: positions of the inputs that are given up.
      around: the operation, after those whose bodies it stands in, the outermost first.
    """

    def __init__(self, model: Model, donated: frozenset[int], around: Sequence[Op]) -> None:
        graph, self.model = model.problem.program.graph, model
        numbers, wiring = model.problem.index, model.wiring
        levels = list(_levels(model, around))
        fixed = numbers.mask(index_array(i for i in range(len(graph.inputs)) if i not in donated))
        read = _ports(wiring, [level.read for level in levels])
        later = _ports(wiring, [level.later for level in levels])
        written = wiring.producer[np.concatenate([level.written for level in levels])]
        given, copied = wiring.producer[fixed], fixed[wiring.value_of[read]]
        self.ends = tuple(wiring.ends_at(np.concatenate((given, read[~copied], written[written >= 0]))))
        self.copies = tuple(wiring.ends_at(read[copied]))
        waiting = later[~fixed[wiring.value_of[later]]]
        largest = waiting[np.lexsort((waiting, -numbers.bytes[wiring.value_of[waiting]]))][:_LATER]
        ends = np.bincount(wiring.value_of, minlength=fixed.size)
        alone = ((ends <= _FORK) & np.logical_or.reduce([level.once for level in levels]))[wiring.value_of[largest]]
        self.kept, self.later = (tuple(wiring.ends_at(largest[these])) for these in (alone, ~alone))
        now, after = wiring.port_of_use[np.concatenate([level.again for level in levels])].T
        thrice = (now >= 0) & (after >= 0) & ~fixed[wiring.value_of[now]] & (ends[wiring.value_of[now]] == _THREE)
        self.again = tuple(zip(wiring.ends_at(after[thrice]), wiring.ends_at(now[thrice]), strict=True))
        self._known: dict[tuple[int, int], Costs] = {}
        self._smallest = ResidentCopies(model)
        self._bytes: WeakKeyDictionary[CostedPlan, float] = WeakKeyDictionary()
        self._narrow = bool(buffer_aliases(graph, model.mesh.topology.backend).reads.all)

    def under(self, model: Model) -> "MemoryLowerBound":
        """The same of the same program's model under other pins, with the same inputs given up."""
        other = copy(self)
        other.model, other._smallest, other._bytes = model, ResidentCopies(model), WeakKeyDictionary()
        return other

    def bytes(self, choice: CostedPlan) -> float:
        """Of a plan."""
        if choice not in self._bytes:
            self._bytes[choice] = self._held(choice)
        return self._bytes[choice]

    def _held(self, choice: CostedPlan) -> float:
        layouts = self.model.ports.layouts(choice.rows)
        as_made = layouts == layouts[self.model.wiring.port_producer]
        smallest = self._smallest.bytes(self.kept, layouts, choice.edges)
        kept = sum(self._part(end) * size for end, size in zip(self.kept, smallest, strict=True))
        besides = self._smallest.besides(self.again, layouts, choice.edges)
        kept += sum(self._part(end) * size for (end, _), size in zip(self.again, besides, strict=True))
        ends, copies, later = self._alike
        there = sum(same.bytes(choice.rows).sum() for same in ends)
        copied = sum(same.bytes(choice.rows)[~as_made[same.ports]].sum() for same in copies)
        waiting = sum(np.where(as_made[same.ports], same.bytes(choice.rows), same.least).sum() for same in later)
        return kept + float(there + copied + waiting)

    def prices(self, price: float) -> Prices:
        """What all of it costs at a price per byte."""
        held = {end: (price, self._shares(end)) for end in self.ends}
        copies, later = ({end: price * self._part(end) for end in ends} for ends in (self.copies, self.later))
        again = {end: (price * self._part(end), meanwhile) for end, meanwhile in self.again}
        return Prices(copy=copies, resident=held, waiting=later, path_copy=self.kept_at(price), path_copy_unless=again)

    def kept_at(self, price: float) -> dict[End, float]:
        """What that costs of which some copy is kept."""
        return {end: price * self._part(end) for end in self.kept}

    def least(self, end: End, rows: Assignment) -> float:
        """Bytes of a port in some states of its node, at least; it must be there in any case."""
        return float(self._shares(end)[tuple(rows.T)].min())

    @property
    def rounded(self) -> int:
        """How many of the prices may be rounded up."""
        return len(self.copies) + len(self.later) + len(self.kept) + len(self.again)

    @cached_property
    def _alike(self) -> list[list["_Same"]]:
        """``ends``, ``copies`` and ``later``, those together that hold equal shares of their bytes."""
        return [list(self._together(ends)) for ends in (self.ends, self.copies, self.later)]

    def _together(self, ends: Sequence[End]) -> Iterator["_Same"]:
        model, wiring = self.model, self.model.wiring
        nodes, ports = index_array(chain.from_iterable(ends)).reshape(-1, 2).T
        tables = model.class_ids(lambda n: object_id(model.tables[n]))
        least = np.array([distances.least_bytes for distances in model.reshard_costs.distinct])
        for some in group_by(row_ids((tables[nodes], ports))):
            end, at = ends[int(some[0])], wiring.first_port[nodes[some]] + ports[some]
            yield _Same(self._shares(end), nodes[some], at, self._part(end) * least[model.spaces[at]])

    def _shares(self, end: End) -> Costs:
        """Bytes of a port at least, per joint state of its node; equal nodes get the same array."""
        table, value = self.model.tables[end[0]], self._value(end)
        key = (object_id(table), end[1])
        if key not in self._known:
            split = table.codes[end[1]] < len(value.shape)
            self._known[key] = np.asarray(local_share(self.model.mesh, split) * (value.bytes * self._part(end)))
        return self._known[key]

    def _part(self, end: End) -> float:
        """Of its bytes, which may be kept in 16 bits each."""
        return min(1.0, 2 / self._value(end).itemsize) if self._narrow else 1.0

    def _value(self, end: End) -> Value:
        return self.model.problem.index.value(self.model.wiring.value_at(end))


def _ports(wiring: Wiring, readings: Sequence[Ids]) -> Ids:
    """The ports that readings are, if nodes read there."""
    found = wiring.port_of_use[np.concatenate(readings)]
    return found[found >= 0]


def _levels(model: Model, around: Sequence[Op]) -> Iterator[SurelyLive]:
    """What the graphs hold, from the outermost in."""
    numbers = model.problem.index
    places = buffer_aliases(model.problem.program.graph, model.mesh.topology.backend)
    for op in around:
        at = int(numbers.position[op.id])
        part = int(numbers.block_of[at])
        enters = numbers.first_result[numbers.blocks[part].start - 1]
        yield surely_live(places, at, numbers.mask(index_array(enters + i for i in sorted(places.lies[part].sliced))))
