"""Predicted memory: the bytes that one device holds at every program point.

A copy of a value (in its own layout, or one made by moves) lives from the operation that first
needs it to the last one that reads it. Arguments live through the whole step, and an output
that replaces a donated argument takes its place. Values that are fused into their reader take
no memory. A loop adds the peak of its body while it runs. What may lie in the same memory is
told by ``planner/places.py``, when copies live by ``planner/lives.py``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from meshdsl.ir import Graph, Op
from meshdsl.planner.lives import Copy, Lives, Placed
from meshdsl.planner.places import Body


@dataclass(frozen=True)
class Peak:
    """The fullest program point: its operation, the graphs around it, and what lives there."""

    bytes: int
    op: Op | None
    copies: tuple[Copy, ...]

    def held(self) -> tuple[tuple[int, int], ...]:
        """(value id, bytes) of what lives there, largest first."""
        return tuple(sorted(((c.value.id, c.bytes) for c in self.copies), key=lambda held: (-held[1], held[0])))


@dataclass(frozen=True)
class Liveness:
    """Memory of a program under given layouts.

    Args:
      donated: indices of arguments whose memory is given up.
    """

    placed: Placed
    donated: frozenset[int] = frozenset()

    def peak(self) -> Peak:
        """The fullest point of the step."""
        return self._fullest(self.placed.graph, self._all_copies())

    def points(self) -> dict[int, int]:
        """Bytes while each operation runs, by op id; for a loop, without what its body adds."""
        found: dict[int, int] = {}
        self._fill(found, self.placed.graph, self._all_copies(), 0)
        return found

    def _fill(self, found: dict[int, int], graph: Graph, copies: list[Copy], outside: int) -> None:
        for op, held in zip(graph.ops, _held(graph, copies), strict=True):
            found[op.id] = outside + held
            for body, lies in zip(op.bodies, self.placed.places.bodies.get(op.id, ()), strict=True):
                self._fill(found, body, self._inside(body, lies), outside + held)

    def _all_copies(self) -> list[Copy]:
        """The copies of the outermost graph, with the arguments that are never given up."""
        graph = self.placed.graph
        end = len(graph.ops) - 1
        fixed = [v for i, v in enumerate(graph.inputs) if i not in self.donated]
        given = frozenset(graph.inputs[i].id for i in self.donated)
        lives = Lives(self.placed, graph, given)
        return [*lives.copies(given), *(self.placed.copy(v, self.placed.own[v.id], -1, end) for v in fixed)]

    def _fullest(self, graph: Graph, copies: list[Copy]) -> Peak:
        best, inside, place = -1, Peak(0, None, ()), 0
        for at, (op, total) in enumerate(zip(graph.ops, _held(graph, copies), strict=True)):
            inner = self._fullest_body(op)
            if total + inner.bytes > best:
                best, inside, place = total + inner.bytes, inner, at
        here = (c for c in copies if c.first <= place <= c.last)
        return Peak(best, inside.op, (*here, *inside.copies))

    def _fullest_body(self, op: Op) -> Peak:
        """The fullest point of the bodies of an operation; the operation itself, and nothing, if it has none."""
        lies = zip(op.bodies, self.placed.places.bodies.get(op.id, ()), strict=True)
        bodies = (self._fullest(body, self._inside(body, how)) for body, how in lies)
        return max(bodies, key=lambda p: p.bytes, default=Peak(0, op, ()))

    def _inside(self, body: Graph, lies: Body) -> list[Copy]:
        """The copies of a body, beside those of the graph around it: its inputs and what it returns in their place."""
        carried = frozenset(body.inputs[i].id for i, _ in lies.carried)
        lives = Lives(self.placed, body, carried)
        lives.put_outside(lies)
        return list(lives.copies(frozenset(body.inputs[i].id for i in lies.sliced)))


def _held(graph: Graph, copies: list[Copy]) -> Iterator[int]:
    """Bytes of the copies that live at each operation."""
    change = [0] * (len(graph.ops) + 1)
    for copy in copies:
        change[max(copy.first, 0)] += copy.bytes
        change[copy.last + 1] -= copy.bytes
    return accumulate(change[:-1])
