"""The stages of planning, in a straight line."""

from itertools import permutations

from meshdsl.ir import Program
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.extract import Choice, Evaluator, layouts_of, rows_by_op, trees_of
from meshdsl.planner.model import Model
from meshdsl.planner.problem import make_problem
from meshdsl.planner.solution import Pins, Solution
from meshdsl.planner.sweep import Sweeper


def solve(program: Program, mesh: Mesh, pins: Pins, memory: float | None = None) -> Solution:
    """Choose a signature for every operation and the moves between them."""
    model = Model(make_problem(program, mesh, pins))
    choice = search(model)
    own, uses = layouts_of(model, choice.rows)
    return Solution(
        mesh,
        rows_by_op(model, choice.rows),
        own,
        uses,
        trees_of(model, choice),
        model.scale.seconds(choice.cost),
        0.0,
        0,
        0,
    )


def search(model: Model) -> Choice:
    """The best state that sweeps find, over orders of the mesh axes."""
    sweeper, evaluator = Sweeper(model), Evaluator(model)
    found = [evaluator.evaluate(sweeper.sweep(model.whole, order)) for order in permutations(range(model.width))]
    return min(found, key=lambda choice: choice.cost)
