"""What a program says of its memory under all layouts, as arrays.

What is in memory depends on a plan's layouts only for which copies there are and how large they are. Who reads what at
which position, what runs with whom and what may lie in one place (``places``) is the same for every plan. It is laid
out here once, so that the memory of a plan takes a few passes over numbers (``lives``).
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from meshdsl.ir import Graph
from meshdsl.planner.arrays import array
from meshdsl.planner.costs import room_of
from meshdsl.planner.exact import Ids
from meshdsl.planner.narrow import Reads
from meshdsl.planner.numbering import Flags, Numbering
from meshdsl.planner.places import Places, places_of


class Line(NamedTuple):
    """What the compiled loops need; positions, values and readings go by their numbers.

    Args:
      first: per position, and one past the last, its first reading.
      runs: per position, the one at which its operation runs.
      enters: where inputs come in.
      inputs: values that come in. kept: those that are written to memory.
      seen: readings of what is viewed, and the values that view it (``views``), the last ones first.
      at: where results (``made``) may be written over what is read, by the readings ``over``.
      options: per result, and one past the last, the first of these.
      carried: inputs of bodies that are one place with what is returned, and its reading (``back``; -1 for a literal).
      given: readings of what is returned straight into results.
    """

    first: Ids
    runs: Ids
    enters: Flags
    inputs: Flags
    kept: Flags
    seen: Ids
    views: Ids
    at: Ids
    made: Ids
    options: Ids
    over: Ids
    carried: Ids
    back: Ids
    given: Ids


class Narrow(NamedTuple):
    """Copies in 16 bits (see ``Reads``): those read, but for one read in full; those made, but for ``wide`` values."""

    read: Ids
    full: Ids
    made: Ids
    wide: Ids


class Room(NamedTuple):
    """Bytes that an operation needs while it runs, divided as one of its values is."""

    at: int
    value: int
    bytes: int


class Timeline:
    """The facts of a program.

    Args:
      step: where its outermost graph lies.
      numbers: of its operations, values and readings.
      shapes: of values. shape: per value, the number of its own. itemsizes: per value, bytes of an element.
      counted: values whose own copies take memory: those that are kept, and of inputs those that lie nowhere else.
      rooms: what operations need beside operands and results.
    """

    def __init__(self, graph: Graph, places: Places) -> None:
        self.numbers = numbers = places.numbers
        self.step, self.shape, self.shapes = numbers.step, numbers.shape, numbers.shapes
        self.itemsizes = numbers.itemsizes
        self.rooms = tuple(_rooms(numbers))
        self.line = _line(places)
        self.counted = np.where(self.line.inputs, _sliced(places), self.line.kept)
        self.narrow = _narrow(numbers, places.reads, graph)

    def fixed(self, donated: Iterable[int]) -> Flags:
        """Inputs that are never written over, where the step gives up those at some positions."""
        found = self.line.inputs.copy()
        found[self.line.carried] = False
        found[list(donated)] = False
        return found


_KNOWN: WeakKeyDictionary[Graph, dict[str, Timeline]] = WeakKeyDictionary()


def timeline_of(graph: Graph, backend: str) -> Timeline:
    """The facts of a program, worked out once for a backend."""
    known = _KNOWN.setdefault(graph, {})
    if backend not in known:
        known[backend] = Timeline(graph, places_of(graph, backend))
    return known[backend]


def _rooms(numbers: Numbering) -> Iterator[Room]:
    for at in np.flatnonzero(numbers.named(["ruled"])).tolist():
        op = numbers.ops[at]
        room = room_of(op) if op else 0
        if room:
            yield Room(at, int(numbers.makes[at]), room)


def _line(places: Places) -> Line:
    numbers, enters = places.numbers, np.array([op is None for op in places.numbers.ops])
    ends = [(part.stop - 1, i) for part, lies in zip(numbers.parts, places.lies, strict=True) for i in lies.given]
    return Line(
        numbers.first,
        places.runs,
        enters,
        enters[numbers.made],
        places.kept,
        *_views(places),
        *places.reuses,
        *_carried(places),
        numbers.reading_at(*array(chain.from_iterable(ends)).reshape(-1, 2).T),
    )


def _views(places: Places) -> tuple[Ids, Ids]:
    numbers, at = places.numbers, places.views[::-1]
    seen, views = numbers.reading_at(at, np.zeros_like(at)), numbers.makes[at]
    lengths = numbers.lengths
    there = seen >= 0
    there[there] = lengths[numbers.read[seen[there]]] == lengths[views[there]]
    return seen[there], views[there]


def _carried(places: Places) -> tuple[Ids, Ids]:
    numbers = places.numbers
    bodies = zip(numbers.parts, places.lies, strict=True)
    ends = [(part.start - 1, at, part.stop - 1, back) for part, lies in bodies for at, back in lies.carried]
    enters, inputs, last, back = array(chain.from_iterable(ends)).reshape(-1, 4).T
    return numbers.makes[enters] + inputs, numbers.reading_at(last, back)


def _sliced(places: Places) -> Flags:
    """Inputs that are copies of their own."""
    numbers = places.numbers
    bodies = zip(numbers.parts, places.lies, strict=True)
    return numbers.are(array(numbers.makes[part.start - 1] + i for part, lies in bodies for i in sorted(lies.sliced)))


def _narrow(numbers: Numbering, reads: Reads, graph: Graph) -> Narrow:
    given = {v.id for v in graph.inputs}
    made, wide = reads.read - reads.wide - given, reads.wide | given
    return Narrow(numbers.reading(reads.all), numbers.reading(reads.full), numbers.of(made), numbers.of(wide))
