"""What a program says of its memory under all layouts, as arrays.

What is in memory depends on a plan's layouts only for which copies there are and how large they are. Who reads what at
which position, what runs with whom and what may lie in one place (``places``) is the same for every plan. It is laid
out here once, so that the memory of a plan takes a few passes over numbers (``lives``).
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir import Graph, Value
from meshdsl.planner.costs import room_of
from meshdsl.planner.exact import Ids
from meshdsl.planner.narrow import Reads
from meshdsl.planner.numbering import Numbering, Part, array, lay_out
from meshdsl.planner.places import Body, Places, Reuse, places_of

Flags = NDArray[np.bool_]


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
        parts: list[Part] = []
        self.step = lay_out(graph, places, Body(sliced=frozenset(range(len(graph.inputs)))), parts)
        self.numbers = numbers = Numbering(parts)
        shapes: dict[tuple[int, ...], int] = {}
        self.shape = array(shapes.setdefault(v.shape, len(shapes)) for v in numbers.values)
        self.shapes, self.itemsizes = tuple(shapes), array(v.itemsize for v in numbers.values)
        self.rooms = tuple(_rooms(numbers))
        self.line = _line(numbers, parts, places)
        sliced = numbers.flags(part.graph.inputs[i].id for part in parts for i in part.lies.sliced)
        self.counted = np.where(self.line.inputs, sliced, self.line.kept)
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
    for at, op in enumerate(numbers.ops):
        room = room_of(op) if op else 0
        if op and room:
            yield Room(at, int(numbers.of([op.outputs[0].id])[0]), room)


def _line(numbers: Numbering, parts: Sequence[Part], places: Places) -> Line:
    return Line(
        numbers.first,
        np.concatenate([part.start + np.array((-1, *places.within[id(part.graph)].runs)) for part in parts]),
        np.array([op is None for op in numbers.ops]),
        numbers.flags(v.id for part in parts for v in part.graph.inputs),
        numbers.flags(places.kept),
        *_views(numbers, parts, places),
        *_reuses(numbers, parts, places),
        *_carried(numbers, parts),
        numbers.at((part.graph.ops[-1].id, i) for part in parts for i in part.lies.given),
    )


def _views(numbers: Numbering, parts: Sequence[Part], places: Places) -> tuple[Ids, Ids]:
    ops = [part.graph.ops[at] for part in parts for at in places.within[id(part.graph)].views]
    views = [op for op in reversed(ops) if isinstance(x := op.inputs[0], Value) and _as_long(x, op.outputs[0])]
    return numbers.at((op.id, 0) for op in views), numbers.of(op.outputs[0].id for op in views)


def _as_long(one: Value, other: Value) -> bool:
    return prod(one.shape) == prod(other.shape)


def _reuses(numbers: Numbering, parts: Sequence[Part], places: Places) -> tuple[Ids, Ids, Ids, Ids]:
    found = [place for part in parts for place in _written_over(part, places)]
    over = [reading for _, reuse in found for reading, _ in reuse.over]
    options = np.cumsum([0, *(len(reuse.over) for _, reuse in found)])
    return array(at for at, _ in found), numbers.of(reuse.value for _, reuse in found), options, numbers.at(over)


def _written_over(part: Part, places: Places) -> Iterator[tuple[int, Reuse]]:
    """What may be written over what, with its position."""
    for at, reuses in places.within[id(part.graph)].reuses.items():
        yield from ((part.start + at, reuse) for reuse in reuses)


def _carried(numbers: Numbering, parts: Sequence[Part]) -> tuple[Ids, Ids]:
    ends = [(part.graph, at, back) for part in parts for at, back in part.lies.carried]
    inputs = numbers.of(graph.inputs[at].id for graph, at, _ in ends)
    return inputs, numbers.at((graph.ops[-1].id, back) for graph, _, back in ends)


def _narrow(numbers: Numbering, reads: Reads, graph: Graph) -> Narrow:
    given = {v.id for v in graph.inputs}
    made, wide = reads.read - reads.wide - given, reads.wide | given
    return Narrow(numbers.at(reads.all), numbers.at(reads.full), numbers.of(made), numbers.of(wide))
