"""Rules of operations along one dim: reductions, running reductions, sorts, selections of the largest.

All other dims are batch dims. Which rows the dim itself allows depends on the algebra:

* A reduction over a split dim gives partial results: sums give ``P``, maxima ``P(max)``, minima ``P(min)``; on bools
  ``or`` is the max and ``and`` the min. It also commutes with partial values of its own kind.
* There is no placement for partial products, bits or positions; there, and in scans, sorts and selections, the devices
  exchange totals, blocks or candidates inside the operation.
* A running sum is linear, and a running maximum commutes with maxima, so these partial values pass.
"""

from typing import Any

import jax.numpy as jnp

from meshdsl.ir.graph import Op
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, P, Partial, Placement, S
from meshdsl.layouts.sharding_rule import Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.shape import kept, named

# ---- Running reductions, sorts, selections ---------------------------------------------------------------------------


_PASSING = {"cumsum": P, "cummax": P("max"), "cummin": P("min")}


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(op: Op) -> Rule:
    """A running reduction commutes with its own reduction; a block needs the totals of the blocks before it."""
    passing, dim = _PASSING.get(op.name), int(op.params["axis"])
    blocks = Signature((S(dim),), (S(dim),), collectives=(Exchange("gather", 1, dim, length=1),))
    return along(op, dim, extra=(blocks, Signature((passing,), (passing,))) if passing else (blocks,))


@rule("sort")
def sort(op: Op) -> Rule:
    """The first operands are keys; the others are permuted with them, and a permutation commutes with any reduction.

    An unstable sort may order equal keys differently on blocks, which shows unless all operands are keys.
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
    """Values and positions: the largest of all are among the largest of the blocks."""
    dim = top_k_dim(op)
    inside = (Exchange("gather", 0, dim, length=op.params["k"]), Exchange("gather", 2))
    return along(op, dim, extra=(Signature((S(dim),), (B, B), collectives=inside),))


def top_k_dim(op: Op) -> int:
    """Returns the dim along which a top_k selects; in older versions of JAX always the last one."""
    rank = len(op.inputs[0].shape)
    return int(op.params.get("axis", -1)) % rank


@rule("approx_top_k")
def approx_top_k(op: Op) -> Rule:
    """Values and positions, of which any approximation is legal: only the other dims are split."""
    return along(op, op.params["reduction_dimension"])


def along(op: Op, axis: int, **properties: Any) -> Rule:
    """All dims but one, the same for every operand and result."""
    rank = len(op.inputs[0].shape)
    dims = kept(rank, axis % rank)
    return Rule((dims,) * len(op.inputs), (dims,) * len(op.outputs), **properties)


# ---- Reductions ------------------------------------------------------------------------------------------------------


REDUCES = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
JOINED = ("reduce_prod", "reduce_xor", "reduce_or", "reduce_and")  # the results of all devices are reduced once more
REDUCES_BOOLS = {"reduce_or": "max", "reduce_and": "min"}


@rule("argmax", "argmin")
def position(op: Op) -> Rule:
    """Blocks of the other dims; along the reduced one, the devices exchange their extremes."""
    (dim,), rank = map(int, op.params["axes"]), len(op.inputs[0].shape)
    left = named(*(f"d{i}" for i in range(rank) if i != dim))
    inside = (Exchange("gather", 0, dim, length=1), Exchange("gather", 1))
    return Rule((kept(rank, dim),), (left,), extra=(Signature((S(dim),), (B,), collectives=inside),))


@rule(*REDUCES, *REDUCES_BOOLS, "reduce_prod", "reduce_xor")
def reduction(op: Op) -> Rule:
    """Blocks of the other dims; reduced ones give partial results, or are gathered where there is no such placement."""
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
    """Returns the reduction of partial placements that this operation computes, or None."""
    if op.name in REDUCES_BOOLS and op.outputs[0].dtype == jnp.bool_:
        return REDUCES_BOOLS[op.name]
    return REDUCES.get(op.name)


@rule("reduce")
def reduce(op: Op) -> Rule:
    """Any reduction of several operands at once: operands first, then an initial value for each."""
    count, rank, gone = len(op.outputs), len(op.inputs[0].shape), op.params["dimensions"]
    left = named(*(f"d{i}" for i in range(rank) if i not in gone))
    return Rule((kept(rank, *gone),) * count + ((),) * count, (left,) * count)
