"""The rule of matrix products: batch, free and contracted dims.

``b m k, b k n -> b m n``: batch and free dims go through in blocks, blocks of a contracted
dim give partial sums, and the product is linear in each operand.
"""

from math import gcd

import jax.numpy as jnp

from meshdsl.ir import Op
from meshdsl.layouts.placement import B, P
from meshdsl.layouts.rule import Dims, Rule, Signature
from meshdsl.rules.registry import rule

MAX = P("max")


@rule("dot_general")
def dot_general(op: Op) -> Rule:
    """Factors from the dimension numbers; the product is linear in both operands."""
    left, right, result, reduced = _product(op)
    return Rule((left, right), (result,), reduced=reduced, linear=bilinear(op), extra=_of_bools(op))


def _of_bools(op: Op) -> tuple[Signature, ...]:
    """A product of bools is an *or* of *ands*, which parts of an *or* pass through."""
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
    """Factors of the operands and of the result, which has batch, left free, right free dims; and the summed ones."""
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
    """A product is linear in both operands; but parts of a sum of whole numbers may have wrapped, which others see."""
    result = op.outputs[0].dtype
    kept = jnp.issubdtype(result, jnp.integer) and all(x.dtype.itemsize >= result.itemsize for x in op.inputs[:2])
    whole = any(jnp.issubdtype(x.dtype, jnp.integer) for x in op.inputs[:2])
    return () if whole and not kept else ((0,), (1,))
