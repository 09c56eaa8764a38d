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
from jax import lax

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import S
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.collectives import identity
from meshdsl.pipelining.interpreter import within
from meshdsl.primitives.constrain import bind_constrain
from meshdsl.schedules.simulate import HANDING
from meshdsl.trace.passes.rolls import roll_p

# ---- Lanes -----------------------------------------------------------------------------------------------------------


def unused(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What is there before anything is; no result depends on it."""
    return jnp.zeros(shape, dtype)


# ---- Packing ---------------------------------------------------------------------------------------------------------


class PackedRows(NamedTuple):
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

    def __init__(self, items: Sequence[Sequence[PackedRows]]) -> None:
        self.items = items
        self.kinds = {row.kind: row for each in items for row in each}

    @property
    def columns(self) -> list[PackedRows]:
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

    def _buffer(self, stage: int, column: PackedRows, arrays: Sequence[jax.Array], rows: int) -> jax.Array:
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


# ---- Ranks -----------------------------------------------------------------------------------------------------------
# What all ranks of a pipeline have, side by side: stacks with a dim of ranks, which lie split over the axis.


class Ranks:
    """The ``p`` ranks of an axis. Stacks have a dim of ranks in front, rooms one of slots after it."""

    def __init__(self, axis: str, p: int) -> None:
        self.axis, self.p = axis, p

    def split(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """A stack of what the ranks have, each device holding its own."""
        made: jax.Array = bind_constrain(x, Layout(**{self.axis: S(dim)}))
        return made

    def put(self, room: Arrays, found: Arrays, slot: jax.Array) -> Arrays:
        """The room with what each rank has in its slot; nowhere if that is past the last."""
        return tuple(self.split(jax.vmap(_put)(kept, x, slot)) for kept, x in zip(room, found, strict=True))

    def get(self, room: Arrays, slot: jax.Array) -> Arrays:
        """What each rank has in its slot."""
        return tuple(self.split(jax.vmap(pick)(kept, slot)) for kept in room)

    def handed(self, made: Arrays, shift: int) -> Arrays:
        """What ranks hand to those some places further on."""
        if shift % self.p == 0:
            return made
        with within(HANDING):
            return tuple(self.split(roll_p.bind(self.split(x), axis=0, shift=shift % self.p)) for x in made)


def pick(x: jax.Array, at: jax.Array) -> jax.Array:
    """One of the first dim."""
    found: jax.Array = lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
    return found


def _put(kept: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    return kept.at[at].set(x, mode="drop", wrap_negative_indices=False)
