"""Rules of operations that work along one dim: scans, sorts, choices of the largest.

The dim that is scanned or sorted stays whole; the others are independent of each other. Sums
pass through a running sum, maxima through a running maximum.
"""

from typing import Any

from meshdsl.ir import Op
from meshdsl.layouts.placement import P
from meshdsl.layouts.rule import Row, Rule
from meshdsl.rules.registry import rule
from meshdsl.rules.structural import kept

_PASSING = {"cumsum": P, "cummax": P("max"), "cummin": P("min")}


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Op) -> Rule:
    """A running reduction commutes with the reduction it runs."""
    passing = _PASSING.get(op.name)
    return along(op, op.params["axis"], extra=(Row((passing,), (passing,)),) if passing else ())


@rule("sort")
def sort(op: Op) -> Rule:
    """Any number of operands, sorted together."""
    return along(op, op.params["dimension"])


@rule("top_k")
def top_k(op: Op) -> Rule:
    """Values and positions; older versions of JAX always take the last dim."""
    return along(op, op.params.get("axis", -1))


@rule("approx_top_k")
def approx_top_k(op: Op) -> Rule:
    """Values and positions."""
    return along(op, op.params["reduction_dimension"])


def along(op: Op, axis: int, **properties: Any) -> Rule:
    """All dims but one, the same for every operand and result."""
    rank = len(op.inputs[0].shape)
    dims = kept(rank, axis % rank)
    return Rule((dims,) * len(op.inputs), (dims,) * len(op.outputs), **properties)
