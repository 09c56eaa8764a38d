"""The rule of matrix products: batch, free and contracted dims.

``b m k, b k n -> b m n``: batch and free dims go through in blocks, blocks of a contracted
dim give partial sums, and the product is linear in each operand.
"""

import jax.numpy as jnp

from meshdsl.ir import Op
from meshdsl.layouts.rule import Dims, Rule
from meshdsl.rules.registry import rule


@rule("dot_general")
def dot_general(op: Op) -> Rule:
    """Factors from the dimension numbers; the result is batch, left free, right free dims."""
    (contracted, batch) = op.params["dimension_numbers"]
    ranks = [len(x.shape) for x in op.inputs]
    shared = [dict(zip(batch[side], _names("b"), strict=False)) for side in (0, 1)]
    summed = [dict(zip(contracted[side], _names("k"), strict=False)) for side in (0, 1)]
    labels = [_labels(ranks[i], {**shared[i], **summed[i]}, "mn"[i]) for i in (0, 1)]
    free = [tuple(labels[i][j] for j in range(ranks[i]) if j not in {**shared[i], **summed[i]}) for i in (0, 1)]
    result = (*((name,) for name in shared[0].values()), *free[0], *free[1])
    reduced = dict.fromkeys(summed[0].values(), "sum")
    return Rule((labels[0], labels[1]), (result,), reduced=reduced, linear=() if _widens(op) else ((0,), (1,)))


def _names(letter: str) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(8))


def _labels(rank: int, known: dict[int, str], free: str) -> Dims:
    return tuple((known.get(i, f"{free}{i}"),) for i in range(rank))


def _widens(op: Op) -> bool:
    """Parts of a narrow integer sum may wrap, which a wider product would see."""
    result = op.outputs[0].dtype
    return any(jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize < result.itemsize for x in op.inputs)
