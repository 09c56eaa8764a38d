"""Predicted memory: the bytes that one device holds at every program point, and its peak.

A copy of a value (in the layout of its producer, or made by a reshard) is live from the op that makes or first needs it
to its last use. Undonated inputs are live through the whole step, and an output that aliases a donated input takes its
place. Fused values take no memory. A loop adds the peak of its body while it runs, and a function with a rule that of
its operations.

    w = input           w ========================
    a = x @ w             a ========
    b = tanh(a)                    b ====           overwrites a in place
    c = b @ w                         c ==========

What a loop carries from one iteration to the next because it sends ahead or behind (``meshdsl.ir.prefetch``) is live
twice in the whole body: the copy of this iteration, and the one of the next or the last.

``aliasing`` says which values share memory, ``liveness_kernels`` when copies are live.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np

from meshdsl.ir.graph import Graph, Op, Value, walk
from meshdsl.ir.index import BlockRange
from meshdsl.ir.prefetch import PipelinedLoop
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.liveness.timeline import NOWHERE, CopyTimeline, Timeline, copy_timeline
from meshdsl.trace.read_jaxpr import read_jaxpr
from meshdsl.util.arrays import Ids, index_array
from meshdsl.util.lazy import Lazy


class ProgramPoint(NamedTuple):
    """An op, with the bytes that are live while it runs.

    Args:
      bytes: per device, those of the enclosing graphs included.
      path: positions of the enclosing loops, the outermost first, and of the op.
    """

    bytes: int
    path: tuple[int, ...]


class BufferCopy(NamedTuple):
    """A value in one layout, or the workspace of the op that produces it."""

    value: Value
    layout: Layout
    bytes: int


class LiveBuffers(NamedTuple):
    """Copies, by the numbers of their values and layouts, and their bytes."""

    values: Ids
    layouts: Ids
    bytes: Ids


class Workspace(NamedTuple):
    """Bytes that an op needs on one device while it runs, besides operands and results.

    Args:
      at: position of the op.
      value: its first result.
    """

    at: int
    value: int
    bytes: int


@dataclass(frozen=True)
class Peak:
    """The program point at which most bytes are live; the copies there are listed on demand.

    Args:
      op: None for the point at which the inputs enter.
      path: see ``ProgramPoint``.
    """

    bytes: int
    op: Op | None
    live: Lazy[tuple[BufferCopy, ...]]
    path: tuple[int, ...] = ()

    @property
    def copies(self) -> tuple[BufferCopy, ...]:
        """The live copies."""
        return self.live.value

    def bytes_by_value(self) -> tuple[tuple[int, int], ...]:
        """Returns (value id, bytes) of each live copy, the largest first."""
        sizes = ((copy.value.id, copy.bytes) for copy in self.copies)
        return tuple(sorted(sizes, key=lambda each: (-each[1], each[0])))


@dataclass(frozen=True, eq=False)
class Liveness:
    """Memory of a program under given layouts.

    Args:
      placed: the program under its layouts.
      donated: positions of the inputs whose memory is given up.
      loops: by op id, those that send ahead or behind.
    """

    placed: CopyTimeline
    donated: frozenset[int] = frozenset()
    loops: Mapping[int, PipelinedLoop] = field(default_factory=dict)

    def peak(self) -> Peak:
        """Returns the peak of the step."""
        return self.peak_at(self._fullest(self.placed.timeline.step))

    def peak_at(self, point: ProgramPoint) -> Peak:
        """Returns a program point with its live copies."""
        op = self.placed.timeline.index.ops[point.path[-1]]
        live = [buffers for at in point.path for buffers in self._live(at)]
        copies = Lazy(partial(_list_copies, self.placed.timeline, self.placed.layouts, live))
        return Peak(point.bytes, op, copies, point.path)

    def bytes_by_value(self, path: tuple[int, ...]) -> Ids:
        """Returns [values], the bytes of each at a program point; a workspace counts for the op's first result."""
        live = [buffers for at in path for buffers in self._live(at)]
        values, sizes = (np.concatenate(column) for column in zip(*((b.values, b.bytes) for b in live), strict=True))
        return np.bincount(values, sizes, self.placed.own.size).astype(np.intp)

    def bytes_by_op(self) -> dict[int, int]:
        """Returns the live bytes while each op runs, by its id; for a loop, without what its body adds."""
        return dict(self._bytes_by_op(self.placed.timeline.step, 0))

    def _bytes_by_op(self, block: BlockRange, outside: int) -> Iterator[tuple[int, int]]:
        ops = self.placed.timeline.index.ops[block.start : block.stop]
        held = (self._held[block.start : block.stop] + outside).tolist()
        yield from ((op.id, total) for op, total in zip(ops, held, strict=True) if op)
        for at, bodies in block.loops:
            for body in bodies:
                yield from self._bytes_by_op(body, held[at - block.start])

    def fullest_by_op(self) -> dict[int, int]:
        """Returns the live bytes while each op runs, by its id; for a loop, at the fullest point in its bodies."""
        return dict(self._fullest_by_op(self.placed.timeline.step, 0))

    def _fullest_by_op(self, block: BlockRange, outside: int) -> Iterator[tuple[int, int]]:
        ops = self.placed.timeline.index.ops[block.start : block.stop]
        totals = (self._totals(block)[0] + outside).tolist()
        yield from ((op.id, total) for op, total in zip(ops, totals, strict=True) if op)
        for at, bodies in block.loops:
            for body in bodies:
                yield from self._fullest_by_op(body, int(self._held[at]) + outside)

    def points_over(self, limit: float, count: int, spacing: int) -> list[ProgramPoint]:
        """Returns up to ``count`` program points over a limit of bytes, the fullest first.

        Args:
          spacing: two points are at least this part (1 / spacing) of the step's ops apart.
        """
        held, inner = self._totals(self.placed.timeline.step)
        over, found, apart = np.where(held > limit, held, 0), list[int](), -(-held.size // spacing)
        while len(found) < count and over.any():
            at = int(over.argmax())
            found.append(at)
            over[max(0, at - apart + 1) : at + apart] = 0
        return [_point(self.placed.timeline.step, held, inner, at) for at in found]

    def _fullest(self, block: BlockRange) -> ProgramPoint:
        held, inner = self._totals(block)
        return _point(block, held, inner, int(held.argmax()))

    def _totals(self, block: BlockRange) -> tuple[Ids, dict[int, ProgramPoint]]:
        """Returns the bytes while each op of a graph runs, and per op with bodies the fullest point in these."""
        inner = {at: max(map(self._fullest, bodies), key=lambda point: point.bytes) for at, bodies in block.loops}
        held = self._held[block.start : block.stop].copy()
        for at, point in inner.items():
            held[at - block.start] += point.bytes
        return held, inner

    def _live(self, at: int) -> tuple[LiveBuffers, LiveBuffers]:
        """Returns the copies that are live at a position, and the workspaces of its op."""
        placed, (copies, first, last) = self.placed, self._ranges
        here = copies[(first <= at) & (at <= last)]
        workspaces = [workspace for workspace in self._workspaces if workspace.at == at]
        values = index_array(workspace.value for workspace in workspaces)
        more = LiveBuffers(values, placed.own[values], index_array(workspace.bytes for workspace in workspaces))
        return LiveBuffers(placed.copies.values[here], placed.copies.layouts[here], placed.copies.bytes[here]), more

    @cached_property
    def _held(self) -> Ids:
        """[positions], bytes that are live in the graph of each."""
        copies, first, last = self._ranges
        sizes, is_live = self.placed.copies.bytes[copies], first <= last
        change = np.zeros(len(self.placed.timeline.index.ops) + 1, dtype=np.intp)
        np.add.at(change, first[is_live], sizes[is_live])
        np.subtract.at(change, last[is_live] + 1, sizes[is_live])
        held = change.cumsum()
        for workspace in self._workspaces:
            held[workspace.at] += workspace.bytes
        for at, size in (*((at, size) for at, _, size in self.placed.sent_together), *self.placed.in_parts):
            held[at] += size
        for copy, size in self.placed.rounded_parts:
            held[first[copy]] += size
        return held

    @cached_property
    def _ranges(self) -> tuple[Ids, Ids, Ids]:
        """Copies with the first and last positions at which they are live; one without memory ends before it begins."""
        from meshdsl.planner.liveness.liveness_kernels import live_ranges  # numba is slow to import

        timeline, producer = self.placed.timeline, self.placed.timeline.index.producer
        fixed = timeline.never_overwritten(self.donated)
        first, last = live_ranges(timeline.arrays, self.placed.copies, producer, fixed)
        first[timeline.filled_early] = np.minimum(first[timeline.filled_early], timeline.filled_at)
        for at, copies, _ in self.placed.sent_together:
            first[copies] = np.minimum(first[copies], at)
        last[: producer.size][~timeline.has_memory] = NOWHERE
        last[: producer.size][fixed & (producer < timeline.step.start)] = timeline.step.stop - 1
        numbers, starts, ends = self._carried
        first[numbers], last[numbers] = starts, ends
        columns = (np.arange(first.size), numbers), (first, starts), (last, ends)
        copies, first, last = (np.concatenate(column) for column in columns)
        return copies, first, last

    @cached_property
    def _workspaces(self) -> tuple[Workspace, ...]:
        """The workspaces of ops with custom rules, which are divided as the first result is."""
        placed, index, found = self.placed, self.placed.timeline.index, list[Workspace]()
        for at in placed.timeline.ruled:
            op, value = index.ops[at], int(index.first_result[at])
            assert op is not None
            local, whole = placed.part(value)
            found.append(Workspace(at, value, workspace_bytes(op, placed.mesh) * local // whole))
        return tuple(found)

    @property
    def _carried(self) -> tuple[Ids, Ids, Ids]:
        """Numbers of the copies that loops carry because they send ahead or behind, and the ends of their bodies."""
        placed, found = self.placed, list[tuple[int, int, int]]()
        copies, index = placed.copies, placed.timeline.index
        blocks = {block.owner[0].id: block for block in index.blocks if block.owner} if self.loops else {}
        for op, loop in self.loops.items():
            held = [(index.number_of(value.id), placed.layouts.index(layout)) for value, layout in loop.copies]
            held += [(n, int(placed.own[n])) for n in (index.number_of(value.id) for value in loop.unreduced)]
            for value, layout in held:
                (number,) = np.flatnonzero((copies.values == value) & (copies.layouts == layout))
                found.append((int(number), blocks[op].start, blocks[op].stop - 1))
        numbers, starts, ends = index_array(chain.from_iterable(found)).reshape(-1, 3).T
        return numbers, starts, ends


def workspace_bytes(op: Op, mesh: Mesh) -> int:
    """Returns the bytes that a function with a rule needs beside operands and results, on whole operands.

    They are stated, or else those of the temporary values of the function's operations, where these take memory.
    """
    ruled = op.params["ruled"]
    if not ruled.stated.temporaries:
        return 0
    types = tuple((x.shape, x.dtype) for x in op.inputs)
    return int(ruled.spent.room) if ruled.spent else _temporary_bytes(ruled.function, types, mesh)


@lru_cache(maxsize=256)
def _temporary_bytes(function: Callable[..., Any], types: tuple[tuple[Any, Any], ...], mesh: Mesh) -> int:
    return peak_inside(read_jaxpr(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*each) for each in types))), mesh)


def peak_inside(graph: Graph, mesh: Mesh) -> int:
    """Returns the peak bytes of a graph on one device, without its inputs and results."""
    ops = [op for _, op in walk(graph)]
    made = [v for op in ops for v in (*op.outputs, *(v for body in op.bodies for v in body.inputs))]
    own = {v.id: Layout() for v in (*graph.inputs, *made)}
    uses = {(op.id, i): Layout() for op in ops for i, x in enumerate(op.inputs) if isinstance(x, Value)}
    peak = Liveness(copy_timeline(graph, mesh, own, uses, {})).peak().bytes
    boundary = {v.id: v.bytes for v in (*graph.inputs, *(x for x in graph.returned if isinstance(x, Value)))}
    return max(0, peak - sum(boundary.values()))


def _point(block: BlockRange, held: Ids, inner: dict[int, ProgramPoint], at: int) -> ProgramPoint:
    """Returns the fullest program point in an op of a graph."""
    inside = inner.get(block.start + at)
    return ProgramPoint(int(held[at]), (block.start + at, *(inside.path if inside else ())))


def _list_copies(timeline: Timeline, layouts: Sequence[Layout], live: Iterable[LiveBuffers]) -> tuple[BufferCopy, ...]:
    columns = (zip(*(column.tolist() for column in buffers), strict=True) for buffers in live)
    values = timeline.index.values
    return tuple(BufferCopy(values[v], layouts[at], size) for rows in columns for v, at, size in rows)
