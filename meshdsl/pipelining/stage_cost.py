"""What the work of a stage costs on one device that holds all of its operands, before anything is planned.

Stages are chosen before the step is planned, so their costs are those of unsharded operations: the planner's roofline
times, and the peak of its buffer assignment. ``layers_per_stage`` balances layers by them.
"""

from collections.abc import Iterable

from meshdsl.ir.graph import Graph, Op, walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.pipelining.scan_stages import HEAD, PROLOGUE, TAIL, Stages
from meshdsl.planner.costs.op_cost import flops_of, unsharded_seconds, work_of
from meshdsl.planner.costs.traffic import traffic_of
from meshdsl.schedules.partition import partition_layers
from meshdsl.schedules.spec import Pipeline


class StageTimer:
    """Seconds of operations of a graph on one device that holds their operands whole."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.mesh, self.traffic = mesh, traffic_of(graph, mesh.topology.fusion)

    def seconds(self, ops: Iterable[Op]) -> float:
        """Returns the seconds of operations, those in the bodies of loops by their iterations."""
        return sum(self._alone(op) + self._in_bodies(op) for op in ops)

    def _in_bodies(self, op: Op) -> float:
        return sum(self._alone(inner) * graph.trips for body in op.bodies for graph, inner in walk(body))

    def _alone(self, op: Op) -> float:
        if op.bodies or op.name in ("return", "constant", "constrain"):
            return 0.0
        return unsharded_seconds(op, work_of(op, self.traffic.of(op)), self.mesh)


def matrix_flops(graph: Graph) -> float:
    """Returns the FLOPs of matrix products and convolutions, by their iterations."""
    return sum(flops_of(op) * inside.trips for inside, op in walk(graph))


def layers_per_stage(graph: Graph, stages: Stages, mesh: Mesh, pipeline: Pipeline) -> tuple[int, ...]:
    """Returns the layers of every stage, in model order.

    These are the user's numbers if given, equal numbers if the stages divide the layers, and otherwise the partition of
    least lockstep time (``partition_layers``), weighing the first stage with the embedding and the last with the head.
    """
    layers, count = stages.forward.length, stages.ranks * pipeline.chunks
    if pipeline.layers:
        return pipeline.layers
    if layers % count == 0:
        return (layers // count,) * count
    timer = StageTimer(graph, mesh)
    first, last = (
        timer.seconds(op for op in graph.ops if stages.times.get(op.id) in times)
        for times in ((PROLOGUE, TAIL), (HEAD,))
    )
    per_layer = timer.seconds(scan.op for scan in stages.scans) / layers
    return partition_layers([per_layer] * layers, count, first, last)
