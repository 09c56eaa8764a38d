"""The registry of rules by primitive name, and the one-axis table of an operation."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import dtypes

from meshdsl.ir.graph import Literal, Op
from meshdsl.layouts.placement import B, P, Partial, Placement
from meshdsl.layouts.sharding_rule import Rule, Signature

RuleOf = Callable[[Op], Rule]
RULES: dict[str, RuleOf] = {}
ONCE = ("debug_callback", "debug_print", "io_callback")  # run for their effects: on the first device, whole operands


def rule(*names: str) -> Callable[[RuleOf], RuleOf]:
    """Returns a decorator that registers a function from an operation to its rule for primitives of these names."""

    def register(make: RuleOf) -> RuleOf:
        for name in names:
            RULES[name] = make
        return make

    return register


def rows_of(op: Op) -> tuple[Signature, ...]:
    """Returns the one-axis table of ``op``; only the all-``B`` row if no rule is registered."""
    made = RULES.get(op.name)
    if made is None:
        return (all_broadcast(op),)
    return tuple(row for row in made(op).rows() if _fits(row, op))


def rows_if_pinned_partial(op: Op) -> tuple[Signature, ...]:
    """Returns the rows that are legal on an axis only where the user constrains the result to their placement."""
    made = RULES.get(op.name)
    return () if made is None else tuple(row for row in made(op).rows_if_pinned_partial() if _fits(row, op))


def all_broadcast(op: Op) -> Signature:
    """Returns the row with every operand and result ``B``, which is legal for any operation."""
    return Signature((B,) * len(op.inputs), (B,) * len(op.outputs))


def carries(placed: Placement, dtype: Any) -> bool:
    """Whether values of ``dtype`` can have this placement: sums need a zero, maxima and minima an order."""
    if not isinstance(placed, Partial):
        return True
    if dtypes.issubdtype(dtype, dtypes.extended):
        return False
    return _has_sums(dtype) if placed is P else not jnp.issubdtype(dtype, jnp.complexfloating)


@cache
def _has_sums(dtype: Any) -> bool:
    """Whether there is a zero to fill sums with: bools are not added, and some floats are powers of two only."""
    return bool(jnp.issubdtype(dtype, np.number)) and not np.zeros((), dtype).astype(np.complex64)


def masked(dtype: Any) -> Placement:
    """Returns the placement of a value that one device holds while the others hold zeros."""
    return P if carries(P, dtype) else P("max")


def _fits(row: Signature, op: Op) -> bool:
    """Whether literals are ``B`` and every placement suits its dtype."""
    operands = zip(row.inputs, op.inputs, strict=True)
    results = zip(row.outputs, op.outputs, strict=True)
    return all(p is B or not isinstance(x, Literal) for p, x in operands) and all(
        carries(p, x.dtype) for p, x in (*zip(row.inputs, op.inputs, strict=True), *results)
    )
