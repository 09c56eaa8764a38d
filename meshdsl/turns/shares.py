"""How many layers each stage of a pipeline gets.

As many as were asked for; else as many each, or where the stages do not divide the layers, as ``balance`` says, from
what layers, embedding and head take on one device.
"""

from meshdsl.ir import Graph
from meshdsl.layouts.mesh import Mesh
from meshdsl.pipeline.balance import balance
from meshdsl.pipeline.spec import Pipeline
from meshdsl.turns.loads import Clock
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
