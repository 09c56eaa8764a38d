"""Rules of matrix products: batch, free and contracted dims.

``b m k, b k n -> b m n``: batch and free dims pass in blocks, blocks of a contracted dim give partial sums, and the
product is linear in each operand (bilinear), so a partial sum of one operand passes if the other is whole. The local
program is the product itself, on blocks.
"""

from math import gcd

import jax.numpy as jnp

from meshdsl.ir.graph import Op
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.registry import rule
from meshdsl.rules.shape import named

# ---- Dense products --------------------------------------------------------------------------------------------------


MAX = P("max")


@rule("dot_general")
def dot_general(op: Op) -> Rule:
    """Factors from the dimension numbers; the product is linear in both operands."""
    left, right, result, reduced = _product(op)
    return Rule((left, right), (result,), reduced=reduced, linear=bilinear(op), extra=_of_bools(op))


def _of_bools(op: Op) -> tuple[Signature, ...]:
    """Rows of products of bools: an *or* of *ands*, through which parts of an *or* pass."""
    return (Signature((MAX, B), (MAX,)), Signature((B, MAX), (MAX,))) if op.outputs[0].dtype == jnp.bool_ else ()


@rule("scaled_dot")
def scaled_dot(op: Op) -> Rule:
    """A product of operands with scales, one for each ``c`` elements of the contracted dim ``(k c)``."""
    left, right, result, reduced = _product(op)
    factors: list[Dims] = []
    sizes: dict[str, int] = {}
    for side, dims in enumerate((left, right)):
        whole, scales = op.inputs[side].shape, op.inputs[2 + side].shape
        for (name,), n, count in zip(dims, whole, scales, strict=True):
            sizes[name] = gcd(count, sizes.get(name, count)) if name in reduced else n
        factors.append(tuple((name, f"c{side}") if name in reduced else (name,) for (name,) in dims))
    return Rule((*factors, *factors), (result,), reduced=reduced, sizes=sizes)


def _product(op: Op) -> tuple[Dims, Dims, Dims, dict[str, str]]:
    """Factors of both operands and of the result (batch, left free, right free dims), and those that are reduced."""
    (contracted, batch) = op.params["dimension_numbers"]
    ranks = [len(x.shape) for x in op.inputs[:2]]
    shared = [dict(zip(batch[side], _names("b"), strict=False)) for side in (0, 1)]
    summed = [dict(zip(contracted[side], _names("k"), strict=False)) for side in (0, 1)]
    labels = [_labels(ranks[i], {**shared[i], **summed[i]}, "mn"[i]) for i in (0, 1)]
    free = [tuple(labels[i][j] for j in range(ranks[i]) if j not in {**shared[i], **summed[i]}) for i in (0, 1)]
    result = (*((name,) for name in shared[0].values()), *free[0], *free[1])
    return (
        labels[0],
        labels[1],
        result,
        dict.fromkeys(summed[0].values(), "max" if op.outputs[0].dtype == jnp.bool_ else "sum"),
    )


def _names(letter: str) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(8))


def _labels(rank: int, known: dict[int, str], free: str) -> Dims:
    return tuple((known.get(i, f"{free}{i}"),) for i in range(rank))


def bilinear(op: Op) -> tuple[tuple[int, ...], ...]:
    """Groups in which a product is linear: both operands, unless parts of an integer sum wrap in a narrower dtype."""
    result = op.outputs[0].dtype
    kept = jnp.issubdtype(result, jnp.integer) and all(x.dtype.itemsize >= result.itemsize for x in op.inputs[:2])
    whole = any(jnp.issubdtype(x.dtype, jnp.integer) for x in op.inputs[:2])
    return () if whole and not kept else ((0,), (1,))


# ---- Ragged products -------------------------------------------------------------------------------------------------
# Rows in groups, one matrix per group (mixtures of experts).
#
#     lhs [rows, k], rhs [group, k, n], sizes [group] -> [rows, n]      the experts' outputs
#     lhs [k, rows], rhs [rows, n],     sizes [group] -> [group, k, n]  their weight gradients
#
# The group of a row is known only at run time, so neither rows nor groups can be split; other dims are as above. Group
# sizes may differ along batch dims and others in front of the rows, [batch ... group], and are split with the operands.


@rule("ragged_dot_general")
def ragged_dot(op: Op) -> Rule:
    """Bilinear; contracted dims give partial sums."""
    numbers = op.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (rows,), groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    pairs = [(f"k{i}", *dims) for i, dims in enumerate(zip(left_sum, right_sum, strict=True))]
    pairs += [(f"b{i}", *dims) for i, dims in enumerate(zip(left_batch, right_batch, strict=True))]
    common = [pair for pair in pairs if pair[1] != rows]
    left = _ragged_labels("m", len(op.inputs[0].shape), {i: name for name, i, _ in common}, {rows})
    ragged_right = {j for _, i, j in pairs if i == rows}
    right = _ragged_labels("n", len(op.inputs[1].shape), {j: name for name, _, j in common}, {*groups, *ragged_right})
    made = (
        *([None] if rows in left_sum else []),
        *(left[i] for i in left_batch),
        *(name for i, name in enumerate(left) if i not in (*left_sum, *left_batch)),
        *(name for i, name in enumerate(right) if i not in (*right_sum, *right_batch, *groups)),
    )
    reduced = {name: "sum" for name, _, _ in common if name.startswith("k")}
    # sizes have the batch dims, then those in front of the rows among the dims that the rows are one of
    beside = left_sum if rows in left_sum else [i for i in range(len(left)) if i not in (*left_sum, *left_batch)]
    ahead = (*left_batch, *beside[: list(beside).index(rows)]) if len(op.inputs[2].shape) > 1 else ()
    sizes = named(*(left[i] for i in ahead), None)
    return Rule((named(*left), named(*right), sizes), (named(*made),), reduced=reduced, linear=bilinear(op))


def _ragged_labels(free: str, rank: int, shared: dict[int, str], whole: set[int]) -> tuple[str | None, ...]:
    """A label per dim: shared with the other operand, none for a whole dim, or its own."""
    return tuple(None if i in whole else shared.get(i, f"{free}{i}") for i in range(rank))
