"""Predicted memory: the bytes that one device holds at every program point.

A copy of a value (in its own layout, or one made by moves) lives from the operation that first
needs it to the last one that reads it. Arguments live through the whole step, and an output
that replaces a donated argument takes its place. Values that are fused into their reader take
no memory. A loop adds the peak of its body while it runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from meshdsl.ir import Graph, Op, Program, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Move
from meshdsl.planner.costs import materialised


@dataclass(frozen=True)
class Copy:
    """One layout of one value, alive from operation ``first`` to ``last`` (positions in its graph)."""

    value: Value
    layout: Layout
    bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Peak:
    """The fullest program point: its operation, the graphs around it, and what lives there."""

    bytes: int
    op: Op | None
    copies: tuple[Copy, ...]

    def held(self) -> tuple[tuple[int, int], ...]:
        """(value id, bytes) of what lives there, largest first."""
        return tuple(sorted(((c.value.id, c.bytes) for c in self.copies), key=lambda held: (-held[1], held[0])))


class Liveness:
    """Memory of a program under given layouts.

    Args:
      own: per value id, its own layout.
      uses: per (op id, operand), the layout read.
      trees: per value id, the moves that make its other layouts.
      donated: indices of arguments whose memory is given up.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        own: dict[int, Layout],
        uses: dict[tuple[int, int], Layout],
        trees: dict[int, tuple[Move, ...]],
        donated: frozenset[int] = frozenset(),
    ) -> None:
        self.program, self.mesh = program, mesh
        self.own, self.uses, self.trees = own, uses, trees
        self.donated = donated
        self.kept = materialised(program.graph)

    def peak(self) -> Peak:
        """The fullest point of the step."""
        return self._fullest(self.program.graph, self._all_copies())

    def points(self) -> dict[int, int]:
        """Bytes while each operation runs, by op id; for a loop, without what its body adds."""
        found: dict[int, int] = {}
        self._fill(found, self.program.graph, self._all_copies(), 0)
        return found

    def _fill(self, found: dict[int, int], graph: Graph, copies: list[Copy], outside: int) -> None:
        for op, held in zip(graph.ops, _held(graph, copies), strict=True):
            found[op.id] = outside + held
            for body in op.bodies:
                self._fill(found, body, list(self._copies(body)), outside + held)

    def _all_copies(self) -> list[Copy]:
        """The copies of the outermost graph, with the arguments that are never given up."""
        graph = self.program.graph
        end = len(graph.ops) - 1
        fixed = [v for i, v in enumerate(graph.inputs) if i not in self.donated]
        return [*self._copies(graph), *(self._copy(v, self.own[v.id], -1, end) for v in fixed)]

    def _fullest(self, graph: Graph, copies: list[Copy]) -> Peak:
        best = Peak(-1, None, ())
        for at, (op, total) in enumerate(zip(graph.ops, _held(graph, copies), strict=True)):
            inner = max((self._body(body) for body in op.bodies), key=lambda p: p.bytes, default=Peak(0, op, ()))
            if total + inner.bytes > best.bytes:
                here = tuple(c for c in copies if c.first <= at <= c.last)
                best = Peak(total + inner.bytes, inner.op, (*here, *inner.copies))
        return best

    def _body(self, body: Graph) -> Peak:
        """Peak inside a loop body; its inputs are the copies of the graph around it."""
        return self._fullest(body, list(self._copies(body)))

    def _copies(self, graph: Graph) -> Iterator[Copy]:
        """Every copy that an operation of the graph makes, or that moves make of its inputs."""
        made = {v.id: (at, v) for at, op in enumerate(graph.ops) for v in op.outputs}
        made.update({v.id: (-1, v) for v in graph.inputs})
        inputs = {v.id for v in graph.inputs}
        donated = {graph.inputs[i].id for i in self.donated} if graph is self.program.graph else set()
        for value, layouts in self._readings(graph).items():
            at, tensor = made[value]
            for layout, points in layouts.items():
                own = layout == self.own[value]
                if own and (value in inputs - donated or value not in self.kept):
                    continue
                yield self._copy(tensor, layout, at if own else min(points), max(points))

    def _readings(self, graph: Graph) -> dict[int, dict[Layout, list[int]]]:
        """Per value and layout, where it is made or read."""
        found: dict[int, dict[Layout, list[int]]] = {}
        for at, op in enumerate(graph.ops):
            for v in op.outputs:
                found.setdefault(v.id, {}).setdefault(self.own[v.id], []).append(at)
            for i, read in enumerate(op.inputs):
                if isinstance(read, Value):
                    self._read(found.setdefault(read.id, {}), read.id, self.uses[op.id, i], at)
        return found

    def _read(self, layouts: dict[Layout, list[int]], value: int, layout: Layout, at: int) -> None:
        """Note a reading, and that of the layouts its copy is made from when it is new."""
        new = layout not in layouts
        layouts.setdefault(layout, []).append(at)
        source = next((m.before for m in self.trees.get(value, ()) if m.after == layout), None)
        if new and source is not None and layout != self.own[value]:
            self._read(layouts, value, source, at)

    def _copy(self, value: Value, layout: Layout, first: int, last: int) -> Copy:
        shape = layout.local_shape(value.shape, self.mesh.sizes_by_name)
        return Copy(value, layout, prod(shape) * value.itemsize, first, last)


def _held(graph: Graph, copies: list[Copy]) -> Iterator[int]:
    """Bytes of the copies that live at each operation."""
    change = [0] * (len(graph.ops) + 1)
    for copy in copies:
        change[max(copy.first, 0)] += copy.bytes
        change[copy.last + 1] -= copy.bytes
    return accumulate(change[:-1])
