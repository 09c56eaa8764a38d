"""What a program says of its memory under all layouts, as arrays.

What is in memory depends on a plan's layouts only for which copies there are and how large they are. Who reads what at
which position, what runs with whom and what may lie in one place (``places``) is the same for every plan. It is laid
out here once, so that the memory of a plan takes a few passes over numbers (``lives``).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Graph
from meshdsl.ir.index import Flags, GraphIndex, Use
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.planner.costs.op_cost import workspace_bytes
from meshdsl.planner.liveness.aliasing import BufferAliases, OperandReads, buffer_aliases
from meshdsl.util.arrays import Ids, index_array, object_id
from meshdsl.util.lazy import memoize_by_object

# ---- Timeline --------------------------------------------------------------------------------------------------------


class TimelineArrays(NamedTuple):
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


class HalfWidth(NamedTuple):
    """Copies in 16 bits (see ``OperandReads``): those read, but for one read in full; those made, but for ``wide``
    values.
    """

    read: Ids
    full: Ids
    made: Ids
    wide: Ids


class Workspace(NamedTuple):
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

    def __init__(self, graph: Graph, places: BufferAliases) -> None:
        self.numbers = numbers = places.numbers
        self.step, self.shape, self.shapes = numbers.root, numbers.shape, numbers.shapes
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


@memoize_by_object
def timeline_of(graph: Graph, backend: str) -> Timeline:
    """The facts of a program, worked out once for a backend."""
    return Timeline(graph, buffer_aliases(graph, backend))


def _rooms(numbers: GraphIndex) -> Iterator[Workspace]:
    for at in np.flatnonzero(numbers.positions_named(["ruled"])).tolist():
        op = numbers.ops[at]
        room = workspace_bytes(op) if op else 0
        if room:
            yield Workspace(at, int(numbers.first_result[at]), room)


def _line(places: BufferAliases) -> TimelineArrays:
    numbers, enters = places.numbers, np.array([op is None for op in places.numbers.ops])
    ends = [(part.stop - 1, i) for part, lies in zip(numbers.blocks, places.lies, strict=True) for i in lies.given]
    return TimelineArrays(
        numbers.first_use,
        places.runs,
        enters,
        enters[numbers.producer],
        places.kept,
        *_views(places),
        *places.reuses,
        *_carried(places),
        numbers.use_numbers_at(*index_array(chain.from_iterable(ends)).reshape(-1, 2).T),
    )


def _views(places: BufferAliases) -> tuple[Ids, Ids]:
    numbers, at = places.numbers, places.views[::-1]
    seen, views = numbers.use_numbers_at(at, np.zeros_like(at)), numbers.first_result[at]
    lengths = numbers.element_counts
    there = seen >= 0
    there[there] = lengths[numbers.use_value[seen[there]]] == lengths[views[there]]
    return seen[there], views[there]


def _carried(places: BufferAliases) -> tuple[Ids, Ids]:
    numbers = places.numbers
    bodies = zip(numbers.blocks, places.lies, strict=True)
    ends = [(part.start - 1, at, part.stop - 1, back) for part, lies in bodies for at, back in lies.carried]
    enters, inputs, last, back = index_array(chain.from_iterable(ends)).reshape(-1, 4).T
    return numbers.first_result[enters] + inputs, numbers.use_numbers_at(last, back)


def _sliced(places: BufferAliases) -> Flags:
    """Inputs that are copies of their own."""
    numbers = places.numbers
    bodies = zip(numbers.blocks, places.lies, strict=True)
    return numbers.mask(
        index_array(numbers.first_result[part.start - 1] + i for part, lies in bodies for i in sorted(lies.sliced))
    )


def _narrow(numbers: GraphIndex, reads: OperandReads, graph: Graph) -> HalfWidth:
    given = {v.id for v in graph.inputs}
    made, wide = reads.read - reads.wide - given, reads.wide | given
    return HalfWidth(
        numbers.use_numbers(reads.all),
        numbers.use_numbers(reads.full),
        numbers.numbers_of(made),
        numbers.numbers_of(wide),
    )


# ---- Placed ----------------------------------------------------------------------------------------------------------
# A program under a choice of layouts: which copies of its values there are, and the bytes that they take.
#
# Copies go by numbers: one in a value's own layout by that of the value, those that moves make by the numbers after.


NOWHERE = -2  # where a copy ends that is not in memory


class ReshardedCopies(NamedTuple):
    """Moves, in order: of which values, from which layouts and to which."""

    values: Ids
    before: Ids
    after: Ids


class Copies(NamedTuple):
    """Values in layouts.

    Args:
      sources: copies that they are made from, or -1. bytes: that one device holds. read: per reading, the copy read.
    """

    values: Ids
    layouts: Ids
    sources: Ids
    bytes: Ids
    read: Ids


@dataclass(frozen=True, eq=False)
class CopyTimeline:
    """A program under a choice of layouts.

    Args:
      layouts: that there are; below they go by their numbers here.
      own: per value, its own. read: per reading, the one that is read. moved: how others than values' own are made.
    """

    timeline: Timeline
    mesh: Mesh
    layouts: Sequence[Layout]
    own: Ids
    read: Ids
    moved: ReshardedCopies

    @cached_property
    def copies(self) -> Copies:
        """The copies that are read or made."""
        count, here = self.own.size, self.timeline.numbers.use_value
        values = np.concatenate((here, self.moved.values, self.moved.values))
        layouts = np.concatenate((self.read, self.moved.before, self.moved.after))
        others = layouts != self.own[values]
        keys, at = np.unique(values[others] * len(self.layouts) + layouts[others], return_inverse=True)
        numbers = values.copy()
        numbers[others] = count + at
        read, before, after = np.split(numbers, [here.size, here.size + self.moved.values.size])
        sources = np.full(count + keys.size, -1)
        sources[after[::-1]] = before[::-1]  # of several moves to one layout, the first
        values = np.concatenate((np.arange(count), keys // len(self.layouts)))
        layouts = np.concatenate((self.own, keys % len(self.layouts)))
        itemsizes = np.where(self._narrow(read, values.size), 2, self.timeline.itemsizes[values])
        return Copies(values, layouts, sources, itemsizes * self._elements(values, layouts), read)

    def room(self, room: Workspace) -> int:
        """Bytes that an operation needs while it runs on one device, beside what it reads and makes."""
        whole, value = self.timeline.numbers.values[room.value], np.array([room.value])
        return room.bytes * int(self._elements(value, self.own[value])[0]) // max(1, prod(whole.shape))

    def _narrow(self, read: Ids, count: int) -> NDArray[np.bool_]:
        """Which copies are kept in 16 bits, and not in their own 32."""
        narrow, found = self.timeline.narrow, np.zeros(count, dtype=np.bool_)
        found[read[narrow.read]] = True
        found[read[narrow.full]] = False
        found[narrow.wide] = False
        found[narrow.made] = True
        return found

    def _elements(self, values: Ids, layouts: Ids) -> Ids:
        """Elements of values in layouts that one device holds."""
        shapes, sizes = self.timeline.shapes, self.mesh.sizes_by_name
        asked = self.timeline.shape[values] * len(self.layouts) + layouts
        known = np.zeros(len(shapes) * len(self.layouts), dtype=np.intp)
        known[asked] = 1
        for key in np.flatnonzero(known).tolist():
            shape, layout = divmod(key, len(self.layouts))
            known[key] = prod(self.layouts[layout].local_shape(shapes[shape], sizes))
        return np.asarray(known[asked])


def copy_timeline(
    graph: Graph,
    mesh: Mesh,
    own: Mapping[int, Layout],
    uses: Mapping[Use, Layout],
    trees: Mapping[int, Sequence[ReshardStep]],
) -> CopyTimeline:
    """A program under a choice of layouts.

    Args:
      own: per value id, its own layout. uses: per (op id, operand), the layout read.
      trees: per value id, the moves that make its other layouts.
    """
    timeline, layouts = timeline_of(graph, mesh.topology.backend), dict[Layout, int]()
    values, readings = timeline.numbers.values, timeline.numbers.uses
    moves = [(i, move) for i, v in enumerate(values) for move in trees.get(v.id, ())]

    def numbers(of: Iterable[Layout]) -> Ids:
        found = list(of)
        once = {object_id(layout): layout for layout in found}  # most are one of few objects
        number = {key: layouts.setdefault(layout, len(layouts)) for key, layout in once.items()}
        return index_array(map(number.__getitem__, map(object_id, found)))

    made, read = numbers(own[v.id] for v in values), numbers(map(uses.__getitem__, readings))
    ends = numbers(move.before for _, move in moves), numbers(move.after for _, move in moves)
    return CopyTimeline(
        timeline, mesh, tuple(layouts), made, read, ReshardedCopies(index_array(i for i, _ in moves), *ends)
    )
