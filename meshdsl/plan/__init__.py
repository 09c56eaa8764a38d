"""The plan as a value: what a step communicates, why, and what it is predicted to cost.

``build_plan`` makes a ``Plan`` from the planner's solution and ``load_plan`` reads one from a file. Modules in order:

    types      plain data that every reader of a plan is typed against: PlanData, Array, Collective, Line, Span
    reasons    who waits for a collective, and why: the reason column
    op_times   seconds per operation, spans in program order, source lines, FLOPs
    divided    how much of the compute each mesh axis divides, and which outputs nothing divided leads to
    merged     products of which compilers for GPUs make one
    simulate   the step with communication hidden behind computation (list scheduling, Graham 1966)
    prefetch   which loops send ahead and behind
    rings      which products run in parts beside the hops of a gather or reduction
    text       the printed plan
    diff       the difference of two plans, and its text
    budget     the most that a plan may communicate, for tests
    file       the plan file: format, writing, reading, faults
    report     the HTML page, a trace for Perfetto, a graph for Model Explorer
    plan       ``Plan``: the data with the operations that users call
    compiled   what a compiled program communicates, in the form of a plan
    build      from a solution to a plan
    validate   whether a given plan is valid for a program

``solve``, ``Instance``, ``Answer`` and ``load_instance`` are the solver of the IOPDDL contest (``planner/contest``).
"""

from meshdsl.plan.build import build_plan
from meshdsl.plan.diff import PlanDiff, diff_plans
from meshdsl.plan.plan import Plan, load_plan
from meshdsl.plan.types import Array, Collective, Line, Span
from meshdsl.planner.contest import Answer, Instance, load_instance, solve

__all__ = [
    "Answer",
    "Array",
    "Collective",
    "Instance",
    "Line",
    "Plan",
    "PlanDiff",
    "Span",
    "build_plan",
    "diff_plans",
    "load_instance",
    "load_plan",
    "solve",
]
