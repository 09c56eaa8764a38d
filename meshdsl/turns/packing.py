"""Arrays of stages that are not alike, in buffers that are: one per dtype, filled up to what the largest stage has.

An array lies in rows. Of a microbatch, a row is what is known of one example. A whole array has as many rows as there
are ranks, so that its buffer can lie split by rows as well as by stage, and needs never be whole on a device.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.lowering.walk import Arrays


class Packing:
    """How every stage's arrays lie in buffers.

    Args:
      items: per stage, dtype and length of a row of each of its arrays.
    """

    def __init__(self, items: Sequence[Sequence[tuple[Any, int]]]) -> None:
        self.items = [[(str(dtype), length) for dtype, length in each] for each in items]
        self.dtypes = dict(sorted({str(dtype): dtype for each in items for dtype, _ in each}.items()))

    @property
    def columns(self) -> list[tuple[int, Any]]:
        """Per buffer, the length of its rows, and its dtype."""
        return [(self._longest(name), dtype) for name, dtype in self.dtypes.items()]

    def _longest(self, name: str) -> int:
        return max(sum(length for dtype, length in each if dtype == name) for each in self.items)

    def pack(self, stage: int, arrays: Sequence[jax.Array], rows: int) -> Arrays:
        """The buffers of a stage, from its arrays in rows."""
        return tuple(self._buffer(stage, name, arrays, rows) for name in self.dtypes)

    def _buffer(self, stage: int, name: str, arrays: Sequence[jax.Array], rows: int) -> jax.Array:
        found = [x for (dtype, _), x in zip(self.items[stage], arrays, strict=True) if dtype == name]
        rest = self._longest(name) - sum(x.shape[1] for x in found)
        filled = [jnp.zeros((rows, rest), self.dtypes[name])] if rest else []
        return jnp.concatenate([*found, *filled], axis=1)

    def unpack(self, stage: int, buffers: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays of a stage in rows, from its buffers."""
        by_name, at, found = dict(zip(self.dtypes, buffers, strict=True)), dict.fromkeys(self.dtypes, 0), []
        for name, length in self.items[stage]:
            found.append(by_name[name][:, at[name] : at[name] + length])
            at[name] += length
        return found


def row_length(shape: Sequence[int], rows: int) -> int:
    """The length of a row of a whole array in so many."""
    return -(-prod(shape) // rows)


def in_rows(x: jax.Array, rows: int) -> jax.Array:
    """A whole array in so many rows, the last filled up."""
    flat = x.reshape(-1)
    rest = -flat.size % rows
    return (jnp.pad(flat, (0, rest)) if rest else flat).reshape(rows, -1)


def out_of_rows(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The whole array again."""
    return x.reshape(-1)[: prod(shape)].reshape(shape)


def examples(x: jax.Array, dim: int, rows: int) -> jax.Array:
    """What is known of a microbatch, in a row per example; they lie along a dim."""
    return jnp.moveaxis(x, dim, 0).reshape(rows, -1)


def of_examples(x: jax.Array, dim: int, shape: Sequence[int]) -> jax.Array:
    """The array again, from what is in rows; ``shape`` is that of any number of examples."""
    rest = [n for d, n in enumerate(shape) if d != dim]
    return jnp.moveaxis(x.reshape(-1, *rest), 0, dim)
