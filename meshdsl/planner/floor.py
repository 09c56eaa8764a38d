"""What memory holds at least while an operation runs, as a sum over single operands, results and pairs of them.

Predicted memory (``memory``, ``lives``) depends on a whole plan: copies are shared, come early where they are smaller,
lie over one another. Some of them are there in any case (``certain``), each as large as the states of one node or two
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
from functools import cached_property
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from meshdsl.ir import Op, Value
from meshdsl.planner.arrays import array, equal, grouped
from meshdsl.planner.certain import Certain, certain
from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.extract import Choice
from meshdsl.planner.identity import identity
from meshdsl.planner.kept import Kept
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.places import places_of
from meshdsl.planner.prices import Prices
from meshdsl.planner.tables import per_axis
from meshdsl.planner.wiring import End, Wiring

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


class Floor:
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
        numbers, wiring = model.problem.numbers, model.wiring
        levels = list(_levels(model, around))
        fixed = numbers.are(array(i for i in range(len(graph.inputs)) if i not in donated))
        read = _ports(wiring, [level.read for level in levels])
        later = _ports(wiring, [level.later for level in levels])
        written = wiring.made[np.concatenate([level.written for level in levels])]
        given, copied = wiring.made[fixed], fixed[wiring.of[read]]
        self.ends = tuple(wiring.ends_of(np.concatenate((given, read[~copied], written[written >= 0]))))
        self.copies = tuple(wiring.ends_of(read[copied]))
        waiting = later[~fixed[wiring.of[later]]]
        largest = waiting[np.lexsort((waiting, -numbers.bytes[wiring.of[waiting]]))][:_LATER]
        ends = np.bincount(wiring.of, minlength=fixed.size)
        alone = ((ends <= _FORK) & np.logical_or.reduce([level.once for level in levels]))[wiring.of[largest]]
        self.kept, self.later = (tuple(wiring.ends_of(largest[these])) for these in (alone, ~alone))
        now, after = wiring.reading[np.concatenate([level.again for level in levels])].T
        thrice = (now >= 0) & (after >= 0) & ~fixed[wiring.of[now]] & (ends[wiring.of[now]] == _THREE)
        self.again = tuple(zip(wiring.ends_of(after[thrice]), wiring.ends_of(now[thrice]), strict=True))
        self._known: dict[tuple[int, int], Costs] = {}
        self._smallest = Kept(model)
        self._bytes: WeakKeyDictionary[Choice, float] = WeakKeyDictionary()
        self._narrow = bool(places_of(graph, model.mesh.topology.backend).reads.all)

    def under(self, model: Model) -> "Floor":
        """The same of the same program's model under other pins, with the same inputs given up."""
        other = copy(self)
        other.model, other._smallest, other._bytes = model, Kept(model), WeakKeyDictionary()
        return other

    def bytes(self, choice: Choice) -> float:
        """Of a plan."""
        if choice not in self._bytes:
            self._bytes[choice] = self._held(choice)
        return self._bytes[choice]

    def _held(self, choice: Choice) -> float:
        layouts = self.model.ports.layouts(choice.rows)
        as_made = layouts == layouts[self.model.wiring.every]
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
        return Prices(read=copies, held=held, later=later, kept=self.kept_at(price), again=again)

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
        nodes, ports = array(chain.from_iterable(ends)).reshape(-1, 2).T
        tables = model.numbered(lambda n: identity(model.tables[n]))
        least = np.array([distances.least_bytes for distances in model.distances.every])
        for some in grouped(equal((tables[nodes], ports))):
            end, at = ends[int(some[0])], wiring.first[nodes[some]] + ports[some]
            yield _Same(self._shares(end), nodes[some], at, self._part(end) * least[model.spaces[at]])

    def _shares(self, end: End) -> Costs:
        """Bytes of a port at least, per joint state of its node; equal nodes get the same array."""
        table, value = self.model.tables[end[0]], self._value(end)
        key = (identity(table), end[1])
        if key not in self._known:
            split = table.codes[end[1]] < len(value.shape)
            self._known[key] = np.asarray(per_axis(self.model.mesh, split) * (value.bytes * self._part(end)))
        return self._known[key]

    def _part(self, end: End) -> float:
        """Of its bytes, which may be kept in 16 bits each."""
        return min(1.0, 2 / self._value(end).itemsize) if self._narrow else 1.0

    def _value(self, end: End) -> Value:
        return self.model.problem.numbers.value(self.model.wiring.value(end))


def _ports(wiring: Wiring, readings: Sequence[Ids]) -> Ids:
    """The ports that readings are, if nodes read there."""
    found = wiring.reading[np.concatenate(readings)]
    return found[found >= 0]


def _levels(model: Model, around: Sequence[Op]) -> Iterator[Certain]:
    """What the graphs hold, from the outermost in."""
    numbers = model.problem.numbers
    places = places_of(model.problem.program.graph, model.mesh.topology.backend)
    for op in around:
        at = int(numbers.position[op.id])
        part = int(numbers.part[at])
        enters = numbers.makes[numbers.parts[part].start - 1]
        yield certain(places, at, numbers.are(array(enters + i for i in sorted(places.lies[part].sliced))))
