"""How many layers each stage of a pipeline gets.

As many as were asked for; else as many each, or where the stages do not divide the layers, as ``balance`` says, from
what layers, embedding and head take on one device.
"""

from collections.abc import Iterable

from meshdsl.ir import Graph, Op, walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.pipeline.balance import balance
from meshdsl.pipeline.spec import Pipeline
from meshdsl.planner.costs import materialised, work_of
from meshdsl.planner.tables import alone_seconds
from meshdsl.turns.stages import HEAD, PROLOGUE, TAIL, Stages


def shares(graph: Graph, stages: Stages, mesh: Mesh, asked: Pipeline) -> tuple[int, ...]:
    """Layers per stage, in the order of the model."""
    layers, parts = stages.forward.length, stages.ranks * asked.chunks
    if asked.layers:
        return asked.layers
    if layers % parts == 0:
        return (layers // parts,) * parts
    clock = Clock(graph, mesh)
    first, last = (
        clock.seconds(op for op in graph.ops if stages.times.get(op.id) in times)
        for times in ((PROLOGUE, TAIL), (HEAD,))
    )
    each = clock.seconds(scan.op for scan in stages.scans) / layers
    return balance([each] * layers, parts, first, last)


class Clock:
    """Seconds of operations on one device that has everything whole."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.mesh, self.kept = mesh, materialised(graph)

    def seconds(self, ops: Iterable[Op]) -> float:
        """Of operations of the step itself, loops included."""
        return sum(self._seconds(op) + self._inside(op) for op in ops)

    def _inside(self, op: Op) -> float:
        return sum(self._seconds(inner) * graph.trips for body in op.bodies for graph, inner in walk(body))

    def _seconds(self, op: Op) -> float:
        if op.bodies or op.name in ("return", "constant", "constrain"):
            return 0.0
        return alone_seconds(op, work_of(op, self.kept), self.mesh)
