"""FLOPs of a plan: what one device multiplies and adds in a step."""

from math import prod

from meshdsl.ir import Program, walk
from meshdsl.layouts.placement import Split
from meshdsl.planner.costs import work_of
from meshdsl.planner.solution import Solution


def plan_flops(program: Program, solution: Solution) -> float:
    """FLOPs of the matrix products and convolutions of one step on one device, loops counted.

    An axis shares an operation's work if it splits any of its operands or results.
    """
    nothing = set[int]()
    return sum(work_of(op, nothing).flops * graph.trips / _shares(op.id, solution) for graph, op in walk(program.graph))


def _shares(op: int, solution: Solution) -> int:
    """Among how many devices the work of an operation is shared."""
    rows = zip(solution.mesh.sizes, solution.rows.get(op, ()), strict=False)
    return prod(size for size, row in rows if any(isinstance(at, Split) for at in (*row.inputs, *row.outputs)))
