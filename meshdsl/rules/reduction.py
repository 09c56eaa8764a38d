"""Rules of reductions: a split dim that is reduced leaves parts to be reduced.

Which parts depends on the reduction: sums leave ``P``, maxima ``P(max)``, minima ``P(min)``;
on bools *or* is the max and *and* the min. A reduction also commutes with parts of its own
kind. There is no placement for partial products or bits, nor for partial positions, so there the
devices exchange what each has found at once.
"""

import jax.numpy as jnp

from meshdsl.ir import Op
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, Partial, S
from meshdsl.layouts.rule import Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.structural import kept, named

REDUCES = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
JOINED = ("reduce_prod", "reduce_xor", "reduce_or", "reduce_and")  # what all devices found is reduced once more
REDUCES_BOOLS = {"reduce_or": "max", "reduce_and": "min"}


@rule("argmax", "argmin")
def position(op: Op) -> Rule:
    """Blocks of the dims that stay; of the one that goes, the devices exchange what each has found."""
    (dim,), rank = map(int, op.params["axes"]), len(op.inputs[0].shape)
    left = named(*(f"d{i}" for i in range(rank) if i != dim))
    inside = (Exchange("gather", 0, dim, length=1), Exchange("gather", 1))
    return Rule((kept(rank, dim),), (left,), extra=(Signature((S(dim),), (B,), collectives=inside),))


@rule(*REDUCES, *REDUCES_BOOLS, "reduce_prod", "reduce_xor")
def reduction(op: Op) -> Rule:
    """Blocks of the dims that stay; from those that go parts, or all devices' results where parts have no name."""
    axes, rank = op.params["axes"], len(op.inputs[0].shape)
    left = named(*(f"d{i}" for i in range(rank) if i not in axes))
    kind = reduces(op)
    if kind is None:
        inside = (Exchange("gather", 1),)
        joined = tuple(Signature((S(d),), (B,), collectives=inside) for d in axes if op.name in JOINED)
        return Rule((kept(rank, *axes),), (left,), extra=joined)
    part = Partial(kind)
    gone = {f"d{i}": kind for i in axes}
    return Rule((kept(rank),), (left,), reduced=gone, extra=(Signature((part,), (part,)),))


def reduces(op: Op) -> str | None:
    """The reduction of placements that this operation does, if there is one."""
    if op.name in REDUCES_BOOLS and op.outputs[0].dtype == jnp.bool_:
        return REDUCES_BOOLS[op.name]
    return REDUCES.get(op.name)


@rule("reduce")
def reduce(op: Op) -> Rule:
    """Any reduction of several operands at once: operands first, then a start for each."""
    count, rank, gone = len(op.outputs), len(op.inputs[0].shape), op.params["dimensions"]
    left = named(*(f"d{i}" for i in range(rank) if i not in gone))
    return Rule((kept(rank, *gone),) * count + ((),) * count, (left,) * count)
