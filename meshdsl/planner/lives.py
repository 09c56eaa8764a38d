"""When the copies of one graph live, and which of them lie in one place.

A copy lives from the operation that makes it, or first needs it, to the last that reads it. A smaller one that moves
make is made as soon as nobody else needs what it is made from. A view adds to the life of what it views; a result that
is written over an operand ends the life of that one before its own begins.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from meshdsl.ir import Graph, Op, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Move
from meshdsl.planner.costs import room_of
from meshdsl.planner.places import Body, Places, places_of

Key = tuple[int, Layout]  # value id and layout: one copy


@dataclass(frozen=True)
class Copy:
    """One layout of one value, alive from operation ``first`` to ``last`` (positions in its graph)."""

    value: Value
    layout: Layout
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Placed:
    """A program under a choice of layouts.

    Args:
      graph: its outermost graph.
      own: per value id, its own layout.
      uses: per (op id, operand), the layout read.
      trees: per value id, the moves that make its other layouts.
    """

    graph: Graph
    mesh: Mesh
    own: Mapping[int, Layout]
    uses: Mapping[tuple[int, int], Layout]
    trees: Mapping[int, tuple[Move, ...]]

    @cached_property
    def places(self) -> Places:
        """What may lie in the same memory."""
        return places_of(self.graph, self.mesh.topology.backend)

    @cached_property
    def narrow(self) -> set[Key]:
        """The copies that are kept in 16 bits, and not in their own 32."""
        return self.places.reads.copies(self.own, self.uses, [v.id for v in self.graph.inputs])

    def copy(self, value: Value, layout: Layout, first: int, last: int) -> Copy:
        """A copy, with its bytes."""
        return Copy(value, layout, self.bytes(value, layout), first, last)

    def room(self, op: Op, at: int) -> Copy:
        """What an operation needs while it runs, as if its first result had these bytes more."""
        value = op.outputs[0]
        layout = self.own[value.id]
        return Copy(value, layout, room_of(op) * self._elements(value, layout) // max(1, prod(value.shape)), at, at)

    def bytes(self, value: Value, layout: Layout) -> int:
        """Bytes that one device holds of a value."""
        itemsize = 2 if (value.id, layout) in self.narrow else value.itemsize
        return self._elements(value, layout) * itemsize

    def _elements(self, value: Value, layout: Layout) -> int:
        return prod(layout.local_shape(value.shape, self.mesh.sizes_by_name))


class Lives:
    """When the copies of one graph live.

    Args:
      given: ids of inputs that may be written over.
    """

    def __init__(self, plan: Placed, graph: Graph, given: frozenset[int]) -> None:
        self.plan, self.graph, self.within = plan, graph, plan.places.within[id(graph)]
        self.inputs, self.given = {v.id for v in graph.inputs}, given
        self.values = {v.id: v for v in graph.inputs} | {v.id: v for op in graph.ops for v in op.outputs}
        self.spans: dict[Key, list[int]] = {(v.id, plan.own[v.id]): [-1, -1] for v in graph.inputs}
        self.viewed: dict[Key, Key] = {}
        self.over: dict[Key, Key] = {}
        self.outside: set[Key] = set()
        self.smaller: list[tuple[Key, Key]] = []
        self._read_all()
        self._shrink()
        self._view()
        self._reuse()

    def copies(self, counted: frozenset[int]) -> Iterator[Copy]:
        """Every copy that is made here, and those of inputs that are to be counted."""
        for key, (first, last) in self.spans.items():
            value, layout = key
            if layout == self.plan.own[value]:
                there = value in counted if value in self.inputs else value in self.plan.places.kept
            else:
                there = True
            if there and first <= last and key not in self.outside:
                yield self.plan.copy(self.values[value], layout, first, last)
        for at, op in enumerate(self.graph.ops):
            if room_of(op):
                yield self.plan.room(op, at)

    def put_outside(self, lies: Body) -> None:
        """Leave out what lies in memory of the graph around: inputs, and what is returned in their place."""
        for at, back in lies.carried:
            value = self.graph.inputs[at].id
            self._carry((value, self.plan.own[value]), self._returned(back))
        for back in lies.given:
            key = self._returned(back)
            if key is not None and key[0] not in self.inputs:
                self.outside.add(key)

    def _carry(self, start: Key, end: Key | None) -> None:
        """What was written over the start of a carry lies in its place, and its end if nobody needs that any more."""
        there = {key for key in self.spans if self._root(key) == start}
        self.outside |= there
        if end is not None and end not in there and self.spans[end][0] > max(self.spans[key][1] for key in there):
            self.outside.add(end)

    def _returned(self, back: int) -> Key | None:
        end, value = self.graph.ops[-1], self.graph.returned[back]
        return self._viewed((value.id, self.plan.uses[end.id, back])) if isinstance(value, Value) else None

    def _root(self, key: Key) -> Key:
        while key in self.over:
            key = self.over[key]
        return key

    def _viewed(self, key: Key) -> Key:
        while key in self.viewed:
            key = self.viewed[key]
        return key

    def _read_all(self) -> None:
        """Note where every copy is made and last read."""
        for at, op in enumerate(self.graph.ops):
            for v in op.outputs:
                self.spans[v.id, self.plan.own[v.id]] = [at, at]
            for i, read in enumerate(op.inputs):
                if isinstance(read, Value):
                    self._read(read.id, self.plan.uses[op.id, i], at)

    def _read(self, value: int, layout: Layout, at: int) -> None:
        """Note a reading, and that of the layouts its copy is made from when it is new."""
        span = self.spans.get((value, layout))
        if span is None:
            span = self.spans[value, layout] = [at, at]
            source = next((m.before for m in self.plan.trees.get(value, ()) if m.after == layout), None)
            if source is not None:
                self._make((value, source), (value, layout), at)
        span[1] = max(span[1], self.within.runs[at])

    def _make(self, source: Key, made: Key, at: int) -> None:
        """Note what a copy is made from: one that is smaller is made as soon as nobody else needs that."""
        if source in self.spans and self._bytes(made) < self._bytes(source):
            self.smaller.append((source, made))
        else:
            self._read(*source, at)

    def _shrink(self) -> None:
        """Make what is smaller in its time, one after the other."""
        taken: dict[int, int] = {}
        for source, made in self.smaller:
            first = max(self.spans[source][1], 0)
            taken[first] = taken.get(first, -1) + 1
            at = min(self.spans[made][0], first + taken[first])
            self.spans[made][0], self.spans[source][1] = at, max(at, first)

    def _view(self) -> None:
        """Readings of views are readings of what they view, if that is in memory."""
        for at in reversed(self.within.views):
            op = self.graph.ops[at]
            read, made = op.inputs[0], op.outputs[0]
            if isinstance(read, Value) and prod(read.shape) == prod(made.shape):
                seen, view = (read.id, self.plan.uses[op.id, 0]), (made.id, self.plan.own[made.id])
                if self._in_memory(seen):
                    span = self.spans[seen]
                    span[1] = max(span[1], self.spans.pop(view)[1])
                    self.viewed[view] = seen

    def _in_memory(self, key: Key) -> bool:
        value, layout = key
        return value in self.plan.places.kept or layout != self.plan.own[value]

    def _reuse(self) -> None:
        """Results are written over operands that are not needed any more."""
        for at, reuses in self.within.reuses.items():
            for reuse in reuses:
                made = reuse.value, self.plan.own[reuse.value]
                read = (self._viewed((value, self.plan.uses[op, operand])) for op, operand, value in reuse.over)
                old = next((key for key in read if self._free(key, at) and self._bytes(key) == self._bytes(made)), None)
                if old is not None and made not in self.viewed:
                    self.spans[old][1], self.over[made] = at - 1, old

    def _free(self, key: Key, at: int) -> bool:
        """Whether a copy may be written over at this position."""
        value, layout = key
        mine = value not in self.inputs or value in self.given or layout != self.plan.own[value]
        return mine and self._in_memory(key) and self.spans[key][1] == at

    def _bytes(self, key: Key) -> int:
        return self.plan.bytes(self.values[key[0]], key[1])
