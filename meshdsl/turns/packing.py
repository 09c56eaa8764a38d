"""Arrays of stages that are not alike, in buffers that are: one per dtype, filled up to what the largest stage has.

Totals have one per way of putting them together, too: sums do not lie beside what is largest or smallest.

An array lies in rows. Of a microbatch, a row is what is known of one example. A whole array has as many rows as there
are ranks, so that its buffer can lie split by rows as well as by stage, and needs never be whole on a device.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshdsl.lowering.moves import identity
from meshdsl.lowering.walk import Arrays


class Rows(NamedTuple):
    """Rows of one array or buffer: how long they are, and how what lies in them is put together with others' rows."""

    length: int
    dtype: Any
    reduction: str = "sum"

    @property
    def kind(self) -> tuple[str, str]:
        """What lies in one buffer has the same."""
        return str(self.dtype), self.reduction

    def nothing(self, *shape: int) -> jax.Array:
        """Rows to which anything can be added."""
        return jnp.full((*shape, self.length), identity(self.reduction, self.dtype), self.dtype)


class Packing:
    """How every stage's arrays lie in buffers.

    Args:
      items: per stage, the rows of each of its arrays.
    """

    def __init__(self, items: Sequence[Sequence[Rows]]) -> None:
        self.items = items
        self.kinds = {row.kind: row for each in items for row in each}

    @property
    def columns(self) -> list[Rows]:
        """Per buffer, its rows."""
        return [self.kinds[kind]._replace(length=self._longest(kind)) for kind in sorted(self.kinds)]

    def _longest(self, kind: tuple[str, str]) -> int:
        return max(sum(row.length for row in each if row.kind == kind) for each in self.items)

    def nothing(self, *shape: int) -> Arrays:
        """Buffers to which anything can be added; ``shape`` is what comes before the length of rows."""
        return tuple(column.nothing(*shape) for column in self.columns)

    def pack(self, stage: int, arrays: Sequence[jax.Array], rows: int) -> Arrays:
        """The buffers of a stage, from its arrays in rows."""
        return tuple(self._buffer(stage, column, arrays, rows) for column in self.columns)

    def _buffer(self, stage: int, column: Rows, arrays: Sequence[jax.Array], rows: int) -> jax.Array:
        found = [x for row, x in zip(self.items[stage], arrays, strict=True) if row.kind == column.kind]
        rest = column.length - sum(x.shape[1] for x in found)
        filled = [column._replace(length=rest).nothing(rows)] if rest else []
        return jnp.concatenate([*found, *filled], axis=1)

    def unpack(self, stage: int, buffers: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays of a stage in rows, from its buffers."""
        of_kind, at, found = dict(zip(sorted(self.kinds), buffers, strict=True)), dict.fromkeys(self.kinds, 0), []
        for row in self.items[stage]:
            start = at[row.kind]
            at[row.kind] += row.length
            found.append(of_kind[row.kind][:, start : at[row.kind]])
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
