"""Rules of operations that work along one dim: scans, sorts, choices of the largest.

The dims beside it are independent of each other. The dim itself can be split if the devices
exchange something: blocks that are sorted, the totals of blocks that are scanned, and where the
largest are chosen, what each has found. Sums pass through a running sum,
maxima through a running maximum.
"""

from typing import Any

import jax.numpy as jnp

from meshdsl.ir.graph import Op
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, P, Partial, Placement, S
from meshdsl.layouts.sharding_rule import Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.shape import kept, named

# ---- Ordering --------------------------------------------------------------------------------------------------------


_PASSING = {"cumsum": P, "cummax": P("max"), "cummin": P("min")}


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Op) -> Rule:
    """A running reduction commutes with the reduction it runs; blocks are joined by the totals of those before."""
    passing, dim = _PASSING.get(op.name), int(op.params["axis"])
    blocks = Signature((S(dim),), (S(dim),), collectives=(Exchange("gather", 1, dim, length=1),))
    return along(op, dim, extra=(blocks, Signature((passing,), (passing,))) if passing else (blocks,))


@rule("sort")
def sort(op: Op) -> Rule:
    """The first operands are keys. The others are moved as the keys say, and moving commutes with any reduction.

    Where equal keys may change places, others would on blocks; unless all operands are keys, that shows.
    """
    moved = range(op.params["num_keys"], len(op.inputs))
    values = moved if op.params["is_stable"] else range(0)
    groups = [*((i,) for i in values), tuple(values)] if values else []
    extra = tuple(_moved(op, placed, group) for group in groups for placed in (P, P("max"), P("min")))
    blocks = (S(op.params["dimension"]),) * len(op.inputs)
    merged = Signature(blocks, blocks, collectives=tuple(Exchange("sort", i) for i in range(len(op.inputs))))
    same = op.params["is_stable"] or not moved
    return along(op, op.params["dimension"], extra=(merged, *extra) if same else extra)


def _moved(op: Op, placed: Placement, group: tuple[int, ...]) -> Signature:
    ports = tuple(placed if i in group else B for i in range(len(op.inputs)))
    return Signature(ports, ports)


@rule("top_k")
def top_k(op: Op) -> Rule:
    """Values and positions: those of the whole are among the candidates of the blocks."""
    dim = top_k_dim(op)
    inside = (Exchange("gather", 0, dim, length=op.params["k"]), Exchange("gather", 2))
    return along(op, dim, extra=(Signature((S(dim),), (B, B), collectives=inside),))


def top_k_dim(op: Op) -> int:
    """The dim in which a top_k chooses; older versions of JAX always take the last one."""
    rank = len(op.inputs[0].shape)
    return int(op.params.get("axis", -1)) % rank


@rule("approx_top_k")
def approx_top_k(op: Op) -> Rule:
    """Values and positions. Of equal elements any may be chosen, so candidates of blocks could be others."""
    return along(op, op.params["reduction_dimension"])


def along(op: Op, axis: int, **properties: Any) -> Rule:
    """All dims but one, the same for every operand and result."""
    rank = len(op.inputs[0].shape)
    dims = kept(rank, axis % rank)
    return Rule((dims,) * len(op.inputs), (dims,) * len(op.outputs), **properties)


# ---- Reduction -------------------------------------------------------------------------------------------------------
# Rules of reductions: a split dim that is reduced leaves parts to be reduced.
#
# Which parts depends on the reduction: sums leave ``P``, maxima ``P(max)``, minima ``P(min)``;
# on bools *or* is the max and *and* the min. A reduction also commutes with parts of its own
# kind. There is no placement for partial products or bits, nor for partial positions, so there the
# devices exchange what each has found at once.


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
