"""A plan at random: any state of the planning problem is a plan, and each has to compute the same."""

import numpy as np

from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.solution import Pins, Solution
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.objective import Evaluator, layouts_of, rows_by_op, trees_of
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model


def wander(program: TracedProgram, mesh: Mesh, pins: Pins, rng: np.random.Generator) -> Solution:
    """A solution in which every operation runs in one of its signatures, whatever that costs; constants are whole."""
    model = Model(make_problem(program, mesh, pins))
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    drawn = np.array([found[rng.integers(len(found))] for found in states])
    unsent = model.wiring.node_of[model.wiring.producer[model.problem.unsent]]
    drawn[unsent] = model.first_states[unsent]
    choice = Evaluator(model).evaluate(drawn)
    own, uses = layouts_of(model, choice.rows)
    rows, trees = rows_by_op(model, choice.rows), trees_of(model, choice)
    return Solution(mesh, rows, own, uses, trees, model.scale.seconds(choice.cost), 0.0, 0, -1)
