"""The stages of planning, in a straight line."""

from meshdsl.ir import Program
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.extract import Choice, layouts_of, rows_by_op, trees_of
from meshdsl.planner.fit import Fitter
from meshdsl.planner.memory import Peak
from meshdsl.planner.model import Model
from meshdsl.planner.problem import make_problem
from meshdsl.planner.search import search
from meshdsl.planner.solution import Pins, Solution
from meshdsl.planner.stacks import split_stacks


def solve(program: Program, mesh: Mesh, pins: Pins, memory: float | None = None) -> Solution:
    """The plan of a program: a signature for every operation and the moves between them.

    Args:
      memory: limit in bytes per device; None takes the topology's memory.

    Raises PinError if pins cannot be met and MemoryLimitError if no plan within the limit is found.
    """
    model = Model(make_problem(program, mesh, pins))
    best, bound = search(model)
    choice, peak = Fitter(model, pins).fit(best, mesh.topology.memory if memory is None else memory)
    return written(model, pins, choice, peak, bound)


def written(model: Model, pins: Pins, choice: Choice, peak: Peak, bound: float) -> Solution:
    """A choice as a solution.

    Args:
      peak: its fullest point. bound: seconds that no plan can be below.
    """
    problem = model.problem
    own, uses = layouts_of(model, choice.rows)
    trees = trees_of(model, choice)
    kept = [stack for stack in split_stacks(problem.program, pins, problem.mesh) if stack.stays_split(trees)]
    return Solution(
        mesh=problem.mesh,
        rows=rows_by_op(model, choice.rows),
        layouts=own,
        uses=uses,
        trees=trees,
        seconds=model.scale.seconds(choice.cost),
        lower_bound=bound,
        peak=peak.bytes,
        peak_op=peak.op.id if peak.op else -1,
        held=peak.held(),
        notes=tuple(dict.fromkeys(map(str, kept))),
    )
