"""The plan: a value that says what a step communicates, why, and what it will cost."""

from meshdsl.plan.build import build_plan
from meshdsl.plan.diff import PlanDiff, diff_plans
from meshdsl.plan.file import load_plan
from meshdsl.plan.value import Array, Collective, Plan

__all__ = ["Array", "Collective", "Plan", "PlanDiff", "build_plan", "diff_plans", "load_plan"]
