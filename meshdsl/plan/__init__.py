"""The plan: a value that says what a step communicates, why, and what it will cost."""

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
