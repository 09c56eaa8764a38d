"""Rules of JAX primitives: what each operation does to placements on one mesh axis."""

from meshdsl.rules import (
    contraction,
    effects,
    elementwise,
    indexing,
    linalg,
    ordering,
    ragged,
    random,
    reduction,
    structural,
    windows,
)
from meshdsl.rules.registry import RULES, asked_rows_of, rows_of, rule

__all__ = [
    "RULES",
    "asked_rows_of",
    "contraction",
    "effects",
    "elementwise",
    "indexing",
    "linalg",
    "ordering",
    "ragged",
    "random",
    "reduction",
    "rows_of",
    "rule",
    "structural",
    "windows",
]
