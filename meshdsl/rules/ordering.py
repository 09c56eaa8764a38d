"""Rules of operations that work along one dim: scans, sorts, choices of the largest.

The dims beside it are independent of each other. The dim itself can be split if the devices
exchange something: blocks that are sorted, the totals of blocks that are scanned, and where the
largest are chosen, what each has found. Sums pass through a running sum,
maxima through a running maximum.
"""

from typing import Any

from meshdsl.ir import Op
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, P, Placement, S
from meshdsl.layouts.rule import Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.structural import kept

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
