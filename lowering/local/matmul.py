"""The local program of ragged products with batch dims: one product per batch.

The compiler for TPUs takes the group sizes of one batch only (libtpu 0.0.52). On a device that has one batch, as where
experts are split over all devices, the program is one product.
"""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Op
from meshdsl.lowering.local.registry import Local, bind, local


@local("ragged_dot_general")
def ragged_dot(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Multiplies each batch of a block."""
    sizes, numbers = arrays[2], op.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    if not left_batch or sizes.ndim != len(left_batch) + 1:
        return bind(op, *arrays)
    inside = type(numbers)(
        ((_without(left_sum, left_batch), _without(right_sum, right_batch)), ((), ())),
        _without(numbers.lhs_ragged_dimensions, left_batch),
        _without(numbers.rhs_group_dimensions, right_batch),
    )
    batches = sizes.shape[:-1]
    rows = map(_in_front, arrays, (left_batch, right_batch, range(len(batches))))
    made = [bind(op, *each, ragged_dot_dimension_numbers=inside)[0] for each in zip(*rows, strict=True)]
    at = 0 if numbers.rhs_group_dimensions else 1  # groups of contracted rows come first
    stacked = jnp.stack(made, at)
    return (stacked.reshape(*stacked.shape[:at], *batches, *stacked.shape[at + 1 :]),)


def _without(dims: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """Returns the numbers of dims of an array without its batch dims."""
    return tuple(d - sum(b < d for b in batch) for d in dims)


def _in_front(x: jax.Array, batch: Sequence[int]) -> jax.Array:
    """Returns ``x`` with its batch dims merged into one in front."""
    moved = jnp.moveaxis(x, tuple(batch), range(len(batch)))
    return moved.reshape(prod(moved.shape[: len(batch)]), *moved.shape[len(batch) :])
