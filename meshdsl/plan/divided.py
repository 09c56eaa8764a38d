"""How much of a step a plan divides: the share of the compute per mesh axis, and what no division leads to.

A comparison of numbers under a plan tests only what the plan divides. At a small size the best plan may leave most of
the step whole, and whatever is computed from whole arrays alone is equal under any plan:

    divided_shares      the part of the compute seconds, at whole arrays, of operations that the axis divides
    undivided_outputs   outputs that nothing split, partial or communicated leads to: the divided values are followed
                        forward through the graph, through loops until no further carry is reached
"""

from collections.abc import Iterable
from math import prod

from meshdsl.ir.graph import Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.loops import ABSENT, LoopPort, PortRole, loop_ports
from meshdsl.ir.solution import Solution
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Split
from meshdsl.plan.op_times import OpTimes

# ---- Shares ----------------------------------------------------------------------------------------------------------


def divided_shares(program: TracedProgram, solution: Solution, times: OpTimes) -> dict[str, float]:
    """Returns, per mesh axis of several devices, the part of the compute that it divides, from 0 to 1.

    An axis divides an operation if it splits any of its operands or results, or if a shard_map of the user's divides
    over it there. Operations weigh as many seconds as they take on one device with whole arrays, iterations counted,
    the cost of starting them left out.
    """
    mesh, wide = solution.mesh, _wide_axes(solution)
    total, divided = 0.0, dict.fromkeys((axis for axis, _ in wide), 0.0)
    for graph, op in walk(program.graph):
        rows = solution.rows.get(op.id)
        if rows is None:
            continue
        blocks = prod(mesh.axis(axis) for axis in op.manual)
        seconds = blocks * graph.trips * times.whole_seconds(op)
        total += seconds
        for axis, i in wide:
            if axis in op.manual or any(isinstance(at, Split) for at in (*rows[i].inputs, *rows[i].outputs)):
                divided[axis] += seconds
    return {axis: seconds / total if total else 0.0 for axis, seconds in divided.items()}


def _wide_axes(solution: Solution) -> list[tuple[str, int]]:
    """The mesh axes of several devices with their positions."""
    return [(axis, i) for i, (axis, size) in enumerate(solution.mesh.sizes_by_name.items()) if size > 1]


# ---- Outputs ---------------------------------------------------------------------------------------------------------


def undivided_outputs(program: TracedProgram, solution: Solution) -> tuple[str, ...]:
    """Returns the paths of the outputs that nothing split, partial or communicated leads to."""
    reach = _Reach(solution)
    reached, last = reach.values(program.graph, ()), program.graph.ops[-1]
    return tuple(
        leaf.path
        for i, (leaf, x) in enumerate(zip(program.outputs, last.inputs, strict=True))
        if not (isinstance(x, Value) and x.id in reached) and not reach.is_placed(solution.uses.get((last.id, i)))
    )


class _Reach:
    """Follows divided values forward through graphs under a solution."""

    def __init__(self, solution: Solution) -> None:
        self.solution, self.wide = solution, _wide_axes(solution)

    def is_placed(self, layout: Layout | None) -> bool:
        """Whether a layout is split or partial on an axis of several devices."""
        return layout is not None and any(layout.on(axis) is not B for axis, _ in self.wide)

    def values(self, graph: Graph, inputs: Iterable[int]) -> set[int]:
        """Returns the ids of the values that are divided or computed from such, given those of the graph's inputs."""
        layouts = self.solution.layouts
        reached = {*inputs, *(v.id for v in graph.inputs if self.is_placed(layouts.get(v.id)))}
        for op in graph.ops:
            if op.bodies:
                reached |= self._results(op, reached)
            elif self._is_divided(op) or any(x.id in reached for x in op.inputs):
                reached |= {v.id for v in op.outputs}
            reached |= {v.id for v in op.outputs if self.is_placed(layouts.get(v.id))}
        return reached

    def _is_divided(self, op: Op) -> bool:
        rows, uses = self.solution.rows.get(op.id), self.solution.uses
        if any(axis in op.manual for axis, _ in self.wide):
            return True
        return any(self.is_placed(uses.get((op.id, i))) for i in range(len(op.inputs))) or (
            rows is not None and any(at is not B for _, i in self.wide for at in (*rows[i].inputs, *rows[i].outputs))
        )

    def _results(self, op: Op, reached: set[int]) -> set[int]:
        """The ids of the results of a loop or conditional that are reached, given the values around it."""
        ports, entered = list(loop_ports(op)), [set[int]() for _ in op.bodies]
        while True:
            inside = [self.values(body, ids) for body, ids in zip(op.bodies, entered, strict=True)]
            found = [port for port in ports if self._is_reached(op, port, reached, inside)]
            before = sum(map(len, entered))
            for b, i in (at for port in found for at in port.inputs):
                entered[b].add(op.bodies[b].inputs[i].id)
            if sum(map(len, entered)) == before:
                break
        if any(port.role is PortRole.PREDICATE for port in found):  # what runs depends on divided values
            return {v.id for v in op.outputs}
        return {op.outputs[port.result].id for port in found if port.result != ABSENT}

    def _is_reached(self, op: Op, port: LoopPort, reached: set[int], inside: list[set[int]]) -> bool:
        enters = port.operand != ABSENT and (
            op.inputs[port.operand].id in reached or self.is_placed(self.solution.uses.get((op.id, port.operand)))
        )
        return enters or any(op.bodies[b].returned[j].id in inside[b] for b, j in port.outputs)
