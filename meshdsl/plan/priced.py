"""What the parts of a pipeline's tick cost under a solution; the parts are in the scopes of the operations."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from meshdsl.ir import Op, Program, Value, walk
from meshdsl.pipeline.costs import BACKWARD, FORWARD, HANDING, HEAD, STASH, WEIGHTS, Costs, part_of
from meshdsl.pipeline.pipelined import Pipelined
from meshdsl.plan.value import Collective
from meshdsl.plan.work import Work
from meshdsl.planner.costs import room_of
from meshdsl.planner.solution import Solution

_PARTS = (FORWARD, BACKWARD, WEIGHTS, HEAD, HANDING)  # as the fields of Costs are called


def priced(
    program: Program, solution: Solution, waits: Iterable[tuple[Op, Collective]], work: Work
) -> Pipelined | None:
    """How the program takes its microbatches, with the costs of its parts if there are stages.

    Args:
      waits: every collective with the operation that waits for it.
    """
    pipeline = program.pipeline
    if pipeline is None or not pipeline.axis:
        return pipeline
    spent: dict[str, float] = defaultdict(float)
    for graph, op in walk(program.graph):
        spent[part_of(op.scope)] += work.seconds(op) * graph.trips
    for op, c in waits:
        spent[part_of(op.scope)] += c.seconds * c.trips
    handed = [c for op, c in waits if part_of(op.scope) == HANDING]
    costs = Costs(
        **{part: spent[part] for part in _PARTS},
        others=sum(seconds for part, seconds in spent.items() if part not in _PARTS),
        kept=_stash(program, solution) // max(1, pipeline.slots),
        memory=solution.peak,
        exchanges=sum(c.trips for c in handed),
        sent=sum(c.trips * c.bytes for c in handed),
        room=_room(program, solution),
    )
    return replace(pipeline, costs=costs)


def _stash(program: Program, solution: Solution) -> int:
    """Bytes of the stash on a device."""
    made = (op for _, op in walk(program.graph) if op.name == "constrain" and part_of(op.scope) == STASH)
    return sum(_local_bytes(v, solution) for op in made for v in op.outputs)


def _room(program: Program, solution: Solution) -> int:
    """Bytes of a device for the work of stages that are not alike."""
    found = [op for _, op in walk(program.graph) if room_of(op) and part_of(op.scope)]
    return max((room_of(op) * _local_bytes(op.outputs[0], solution) // op.outputs[0].bytes for op in found), default=0)


def _local_bytes(v: Value, solution: Solution) -> int:
    return prod(solution.layouts[v.id].local_shape(v.shape, solution.mesh.sizes_by_name)) * v.itemsize
