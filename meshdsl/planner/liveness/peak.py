"""Predicted memory: the bytes that one device holds at every program point.

A copy of a value (in its own layout, or one made by moves) lives from the operation that first
needs it to the last one that reads it. Arguments live through the whole step, and an output
that replaces a donated argument takes its place. Values that are fused into their reader take
no memory. A loop adds the peak of its body while it runs. What may lie in the same memory is
told by ``planner/places.py``, when copies live by ``planner/lives.py``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from meshdsl.ir.graph import Op, Value
from meshdsl.ir.index import BlockRange
from meshdsl.layouts.layout import Layout
from meshdsl.planner.liveness.timeline import NOWHERE, CopyTimeline, Timeline
from meshdsl.util.arrays import Ids, index_array
from meshdsl.util.lazy import Lazy

_POINTS, _APART = 24, 48  # that are too full: at most, and of how many parts of the step they stand in others


class BufferCopy(NamedTuple):
    """One layout of one value, or what an operation needs beside its first result while it runs."""

    value: Value
    layout: Layout
    bytes: int


class LiveBuffer(NamedTuple):
    """Copies, by the numbers of their values and layouts, and their bytes."""

    values: Ids
    layouts: Ids
    bytes: Ids


@dataclass(frozen=True)
class Peak:
    """The fullest program point: its operation and the graphs around it; what lives there is listed when asked for.

    Args:
      places: the positions of the loops around the operation, and its own.
    """

    bytes: int
    op: Op | None
    alive: Lazy[tuple[BufferCopy, ...]]
    places: tuple[int, ...] = ()

    @property
    def copies(self) -> tuple[BufferCopy, ...]:
        """What lives there."""
        return self.alive.value

    def held(self) -> tuple[tuple[int, int], ...]:
        """(value id, bytes) of what lives there, largest first."""
        return tuple(sorted(((c.value.id, c.bytes) for c in self.copies), key=lambda held: (-held[1], held[0])))


@dataclass(frozen=True, eq=False)
class Liveness:
    """Memory of a program under given layouts.

    Args:
      donated: indices of arguments whose memory is given up.
    """

    placed: CopyTimeline
    donated: frozenset[int] = frozenset()

    def peak(self) -> Peak:
        """The fullest point of the step."""
        return self.at(*self._fullest(self.placed.timeline.step))

    def at(self, total: int, places: tuple[int, ...]) -> Peak:
        """A point, given as ``_point`` gives it."""
        op = self.placed.timeline.numbers.ops[places[-1]]
        alive = [held for at in places for held in self._alive(at)]
        return Peak(total, op, Lazy(partial(_listed, self.placed.timeline, self.placed.layouts, alive)), places)

    def by_value(self, places: tuple[int, ...]) -> Ids:
        """Bytes at a point, by the numbers of the values that they are of or needed with."""
        found = [held for at in places for held in self._alive(at)]
        values, sizes = (np.concatenate(column) for column in zip(*((h.values, h.bytes) for h in found), strict=True))
        return np.bincount(values, sizes, self.placed.own.size).astype(np.intp)

    def points(self) -> dict[int, int]:
        """Bytes while each operation runs, by op id; for a loop, without what its body adds."""
        return dict(self._points(self.placed.timeline.step, 0))

    def _points(self, stretch: BlockRange, outside: int) -> Iterator[tuple[int, int]]:
        ops = self.placed.timeline.numbers.ops[stretch.start : stretch.stop]
        held = (self._held[stretch.start : stretch.stop] + outside).tolist()
        yield from ((op.id, total) for op, total in zip(ops, held, strict=True) if op)
        for at, bodies in stretch.loops:
            for body in bodies:
                yield from self._points(body, held[at - stretch.start])

    def over(self, limit: float) -> list[tuple[int, tuple[int, ...]]]:
        """Some points that hold more than a limit, apart from each other, the fullest first, as ``_point``."""
        held, inside = self._totals(self.placed.timeline.step)
        left, found, apart = np.where(held > limit, held, 0), list[int](), -(-held.size // _APART)
        while len(found) < _POINTS and left.any():
            at = int(left.argmax())
            found.append(at)
            left[max(0, at - apart + 1) : at + apart] = 0
        return [self._point(self.placed.timeline.step, held, inside, at) for at in found]

    def _fullest(self, stretch: BlockRange) -> tuple[int, tuple[int, ...]]:
        """The fullest point of a graph, as ``_point``."""
        held, inside = self._totals(stretch)
        return self._point(stretch, held, inside, int(held.argmax()))

    def _totals(self, stretch: BlockRange) -> tuple[Ids, dict[int, tuple[int, tuple[int, ...]]]]:
        """Bytes while each operation of a graph runs, and by position of those with bodies, the fullest point there."""
        inside = {at: max(map(self._fullest, bodies), key=lambda found: found[0]) for at, bodies in stretch.loops}
        held = self._held[stretch.start : stretch.stop].copy()
        for at, (more, _) in inside.items():
            held[at - stretch.start] += more
        return held, inside

    @staticmethod
    def _point(
        stretch: BlockRange, held: Ids, inside: dict[int, tuple[int, tuple[int, ...]]], at: int
    ) -> tuple[int, tuple[int, ...]]:
        """Bytes at an operation of a graph, and its position, those of the operations in loops after it."""
        return int(held[at]), (stretch.start + at, *inside.get(stretch.start + at, (0, ()))[1])

    def _alive(self, at: int) -> tuple[LiveBuffer, LiveBuffer]:
        """What lives at a position, and what its operation needs besides."""
        placed, (first, last) = self.placed, self._spans
        here, rooms = np.flatnonzero((first <= at) & (at <= last)), [r for r in placed.timeline.rooms if r.at == at]
        values = index_array(room.value for room in rooms)
        more = LiveBuffer(values, placed.own[values], index_array(map(placed.room, rooms)))
        return LiveBuffer(placed.copies.values[here], placed.copies.layouts[here], placed.copies.bytes[here]), more

    @cached_property
    def _held(self) -> Ids:
        """Bytes of the copies that live at each position."""
        (first, last), sizes = self._spans, self.placed.copies.bytes
        there = first <= last
        change = np.zeros(len(self.placed.timeline.numbers.ops) + 1, dtype=np.intp)
        np.add.at(change, first[there], sizes[there])
        np.subtract.at(change, last[there] + 1, sizes[there])
        held = change.cumsum()
        for room in self.placed.timeline.rooms:
            held[room.at] += self.placed.room(room)
        return held

    @cached_property
    def _spans(self) -> tuple[Ids, Ids]:
        """From where to where each copy is in memory; one that is nowhere ends before it begins."""
        from meshdsl.planner.liveness.liveness_kernels import (
            live_ranges,  # with its compiler, too much to import for those who plan nothing
        )

        timeline, made = self.placed.timeline, self.placed.timeline.numbers.producer
        fixed = timeline.fixed(self.donated)
        first, last = live_ranges(timeline.line, self.placed.copies, made, fixed)
        last[: made.size][~timeline.counted] = NOWHERE
        last[: made.size][fixed & (made < timeline.step.start)] = timeline.step.stop - 1
        return first, last


def _listed(timeline: Timeline, layouts: Sequence[Layout], alive: Iterable[LiveBuffer]) -> tuple[BufferCopy, ...]:
    """Copies by their numbers."""
    every = (zip(*(column.tolist() for column in held), strict=True) for held in alive)
    return tuple(BufferCopy(timeline.numbers.values[v], layouts[at], size) for some in every for v, at, size in some)
