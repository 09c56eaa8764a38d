"""A program under a choice of layouts: which copies of its values there are, and the bytes that they take.

Copies go by numbers: one in a value's own layout by that of the value, those that moves make by the numbers after.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir import Graph
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Move
from meshdsl.planner.arrays import array
from meshdsl.planner.exact import Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.numbering import Reading
from meshdsl.planner.timeline import Room, Timeline, timeline_of

NOWHERE = -2  # where a copy ends that is not in memory


class Moved(NamedTuple):
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
class Placed:
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
    moved: Moved

    @cached_property
    def copies(self) -> Copies:
        """The copies that are read or made."""
        count, here = self.own.size, self.timeline.numbers.read
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

    def room(self, room: Room) -> int:
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


def placed(
    graph: Graph,
    mesh: Mesh,
    own: Mapping[int, Layout],
    uses: Mapping[Reading, Layout],
    trees: Mapping[int, Sequence[Move]],
) -> Placed:
    """A program under a choice of layouts.

    Args:
      own: per value id, its own layout. uses: per (op id, operand), the layout read.
      trees: per value id, the moves that make its other layouts.
    """
    timeline, layouts = timeline_of(graph, mesh.topology.backend), dict[Layout, int]()
    values, readings = timeline.numbers.values, timeline.numbers.readings
    moves = [(i, move) for i, v in enumerate(values) for move in trees.get(v.id, ())]

    def numbers(of: Iterable[Layout]) -> Ids:
        found = list(of)
        once = {identity(layout): layout for layout in found}  # most are one of few objects
        number = {key: layouts.setdefault(layout, len(layouts)) for key, layout in once.items()}
        return array(map(number.__getitem__, map(identity, found)))

    made, read = numbers(own[v.id] for v in values), numbers(map(uses.__getitem__, readings))
    ends = numbers(move.before for _, move in moves), numbers(move.after for _, move in moves)
    return Placed(timeline, mesh, tuple(layouts), made, read, Moved(array(i for i, _ in moves), *ends))
