"""Rules of JAX primitives: what each operation does to placements on one mesh axis."""

from meshdsl.rules import (
    convolution,
    elementwise,
    indexing,
    linalg,
    matmul,
    random,
    reduction,
    shape,
)
from meshdsl.rules.registry import RULES, asked_rows_of, rows_of, rule

__all__ = [
    "RULES",
    "asked_rows_of",
    "convolution",
    "elementwise",
    "indexing",
    "linalg",
    "matmul",
    "random",
    "reduction",
    "rows_of",
    "rule",
    "shape",
]
