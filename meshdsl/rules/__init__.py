"""Rules of JAX primitives: what each operation does to placements on one mesh axis."""

from meshdsl.rules import contraction, elementwise, reduction, structural
from meshdsl.rules.registry import RULES, rows_of, rule

__all__ = ["RULES", "contraction", "elementwise", "reduction", "rows_of", "rule", "structural"]
