"""Rules from outside: a function of the user's as one operation of the plan."""

from meshdsl.custom_rules.api import FunctionWithRule, RuleText, rule
from meshdsl.custom_rules.validate import check_rules

__all__ = ["FunctionWithRule", "RuleText", "check_rules", "rule"]
