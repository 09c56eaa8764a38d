"""Rules of JAX primitives: what each operation does to placements on one mesh axis."""

from meshdsl.rules import elementwise
from meshdsl.rules.registry import RULES, rows_of, rule

__all__ = ["RULES", "elementwise", "rows_of", "rule"]
