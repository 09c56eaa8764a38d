"""Rings forced in plans at random."""

from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.solution import Solution
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.rings import disjoint_rings, priced_rings, with_rings


def with_all_rings(program: TracedProgram, solution: Solution) -> Solution:
    """The solution with as many rings as no two share a product."""
    priced = priced_rings(program, solution, OpTimes(program, solution, Reasons(program, solution)))
    return with_rings(solution, disjoint_rings(priced)) if priced else solution
