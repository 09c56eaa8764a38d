"""What a piece of work takes on one device that has all of it, told from its operations before anything is planned."""

from collections.abc import Iterable

from meshdsl.ir.graph import Graph, Op, Value, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.pipelining.scan_stages import HEAD, PROLOGUE, TAIL, Stages
from meshdsl.planner.costs.op_cost import materialized_ids, unsharded_seconds, work_of
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.schedules.partition import partition_layers
from meshdsl.schedules.spec import Pipeline

# ---- Loads -----------------------------------------------------------------------------------------------------------


class StageTimer:
    """Seconds of operations on one device that has everything whole."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.mesh, self.kept = mesh, materialized_ids(graph)

    def seconds(self, ops: Iterable[Op]) -> float:
        """Of operations of the step itself, loops included."""
        return sum(self._seconds(op) + self._inside(op) for op in ops)

    def _inside(self, op: Op) -> float:
        return sum(self._seconds(inner) * graph.trips for body in op.bodies for graph, inner in walk(body))

    def _seconds(self, op: Op) -> float:
        if op.bodies or op.name in ("return", "constant", "constrain"):
            return 0.0
        return unsharded_seconds(op, work_of(op, self.kept), self.mesh)


def flops(graph: Graph) -> float:
    """FLOPs of the matrix products and convolutions of a graph, loops counted."""
    return sum(work_of(op, set()).flops * inside.trips for inside, op in walk(graph))


def room(graph: Graph, mesh: Mesh) -> int:
    """Bytes that a graph needs at its fullest point, beside its inputs and what it returns."""
    ops = [op for _, op in walk(graph)]
    made = [v for op in ops for v in (*op.outputs, *(v for body in op.bodies for v in body.inputs))]
    own = {v.id: Layout() for v in (*graph.inputs, *made)}
    uses = {(op.id, i): Layout() for op in ops for i, x in enumerate(op.inputs) if isinstance(x, Value)}
    peak = Liveness(copy_timeline(graph, mesh, own, uses, {})).peak().bytes
    given = {v.id: v.bytes for v in (*graph.inputs, *(x for x in graph.returned if isinstance(x, Value)))}
    return max(0, peak - sum(given.values()))


# ---- Shares ----------------------------------------------------------------------------------------------------------
# How many layers each stage of a pipeline gets.
#
# As many as were asked for; else as many each, or where the stages do not divide the layers, as
# ``partition_layers`` says, from
# what layers, embedding and head take on one device.


def shares(graph: Graph, stages: Stages, mesh: Mesh, asked: Pipeline) -> tuple[int, ...]:
    """Layers per stage, in the order of the model."""
    layers, parts = stages.forward.length, stages.ranks * asked.chunks
    if asked.layers:
        return asked.layers
    if layers % parts == 0:
        return (layers // parts,) * parts
    clock = StageTimer(graph, mesh)
    first, last = (
        clock.seconds(op for op in graph.ops if stages.times.get(op.id) in times)
        for times in ((PROLOGUE, TAIL), (HEAD,))
    )
    each = clock.seconds(scan.op for scan in stages.scans) / layers
    return partition_layers([each] * layers, parts, first, last)
