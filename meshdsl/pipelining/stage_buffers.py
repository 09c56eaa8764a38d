"""Arrays of all ranks of a pipeline: stacked by rank, in buffers with slots, and packed if stages differ.

What the ranks of the pipeline's axis hold is stacked along a leading dim of ranks, which is split over the axis, so
that each device holds its own (``Ranks``). Sending to another rank is a roll of that dim: one collective-permute. A
buffer has a dim of slots after it; slot numbers come from the schedule (``schedules.lockstep.BufferSlots``).

Stages that ``md.stage`` cuts send arrays of different shapes. ``Packing`` lays them out in equal buffers, one per
dtype, each as long as the largest stage needs. Totals also have one buffer per reduction: sums and maxima do not share
one. Within a buffer an array lies in *rows*. A row of a microbatch is one example. A whole array has as many rows as
there are ranks, so that its buffer can be split by rows as well as by stage and no device needs to hold all of it.
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
from meshdsl.pipelining.interpreter import traced_in
from meshdsl.primitives.constrain import bind_constrain
from meshdsl.schedules.simulate import HANDING
from meshdsl.trace.passes.rolls import roll_p

# ---- Stacks by rank --------------------------------------------------------------------------------------------------


def uninitialized(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns the contents of a buffer before its first write; no result may depend on it (tests fill it with NaN)."""
    return jnp.zeros(shape, dtype)


class Ranks:
    """The ``count`` ranks along a mesh axis."""

    def __init__(self, axis: str, count: int) -> None:
        self.axis, self.count = axis, count

    def split(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """Returns the stack with its dim of ranks constrained to be split over the axis."""
        constrained: jax.Array = bind_constrain(x, Layout(**{self.axis: S(dim)}))
        return constrained

    def uninitialized(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns a stack of one uninitialized array of this shape per rank."""
        return self.split(uninitialized((self.count, *shape), dtype))

    def put(self, buffers: Arrays, arrays: Arrays, slot: jax.Array) -> Arrays:
        """Returns the buffers with every rank's array in its slot; a slot past the last writes nothing."""

        def write(buffer: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
            return buffer.at[at].set(x, mode="drop", wrap_negative_indices=False)

        return tuple(self.split(jax.vmap(write)(buffer, x, slot)) for buffer, x in zip(buffers, arrays, strict=True))

    def get(self, buffers: Arrays, slot: jax.Array) -> Arrays:
        """Returns what every rank has in its slot."""
        return tuple(self.split(jax.vmap(pick)(buffer, slot)) for buffer in buffers)

    def send(self, arrays: Arrays, shift: int) -> Arrays:
        """Returns what every rank receives if each sends its array ``shift`` ranks further, around the ring."""
        if shift % self.count == 0:
            return arrays
        with traced_in(HANDING):
            return tuple(self.split(roll_p.bind(self.split(x), axis=0, shift=shift % self.count)) for x in arrays)


def pick(x: jax.Array, at: jax.Array) -> jax.Array:
    """Returns element ``at`` of the first dim."""
    found: jax.Array = lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
    return found


# ---- Packed rows -----------------------------------------------------------------------------------------------------


class PackedRows(NamedTuple):
    """Rows of an array or buffer.

    Args:
      length: elements per row.
      reduction: how rows of several microbatches are combined.
    """

    length: int
    dtype: Any
    reduction: str = "sum"

    @property
    def kind(self) -> tuple[str, str]:
        """Arrays of one kind share a buffer."""
        return str(self.dtype), self.reduction

    def neutral(self, *shape: int) -> jax.Array:
        """Returns rows filled with the identity of the reduction, ``shape`` being the dims before the row."""
        return jnp.full((*shape, self.length), identity(self.reduction, self.dtype), self.dtype)


class Packing:
    """Where every stage's arrays lie in the buffers.

    Args:
      items: per stage, the rows of each of its arrays.
    """

    def __init__(self, items: Sequence[Sequence[PackedRows]]) -> None:
        self.items = items
        self.kinds = {row.kind: row for each in items for row in each}

    @property
    def columns(self) -> list[PackedRows]:
        """Per buffer, its rows: as long as the largest stage needs."""

        def longest(kind: tuple[str, str]) -> int:
            return max(sum(row.length for row in each if row.kind == kind) for each in self.items)

        return [self.kinds[kind]._replace(length=longest(kind)) for kind in sorted(self.kinds)]

    def neutral(self, *shape: int) -> Arrays:
        """Returns buffers filled with the identities of their reductions."""
        return tuple(column.neutral(*shape) for column in self.columns)

    def pack(self, stage: int, arrays: Sequence[jax.Array], rows: int) -> Arrays:
        """Returns the buffers of a stage, from its arrays in rows, padded to the length of the columns."""
        buffers = []
        for column in self.columns:
            parts = [x for row, x in zip(self.items[stage], arrays, strict=True) if row.kind == column.kind]
            rest = column.length - sum(x.shape[1] for x in parts)
            padding = [column._replace(length=rest).neutral(rows)] if rest else []
            buffers.append(jnp.concatenate([*parts, *padding], axis=1))
        return tuple(buffers)

    def unpack(self, stage: int, buffers: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the arrays of a stage in rows, from its buffers."""
        of_kind, offset, found = dict(zip(sorted(self.kinds), buffers, strict=True)), dict.fromkeys(self.kinds, 0), []
        for row in self.items[stage]:
            start = offset[row.kind]
            offset[row.kind] += row.length
            found.append(of_kind[row.kind][:, start : offset[row.kind]])
        return found


def row_length(shape: Sequence[int], rows: int) -> int:
    """Returns the elements per row of a whole array in ``rows`` rows."""
    return -(-prod(shape) // rows)


def to_rows(x: jax.Array, rows: int) -> jax.Array:
    """Returns a whole array in rows, the last one padded."""
    flat = x.reshape(-1)
    rest = -flat.size % rows
    return (jnp.pad(flat, (0, rest)) if rest else flat).reshape(rows, -1)


def from_rows(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns the whole array of this shape from its rows."""
    return x.reshape(-1)[: prod(shape)].reshape(shape)


def to_example_rows(x: jax.Array, dim: int, rows: int) -> jax.Array:
    """Returns an array with a row per example, ``dim`` being the dim of examples."""
    return jnp.moveaxis(x, dim, 0).reshape(rows, -1)


def from_example_rows(x: jax.Array, dim: int, shape: Sequence[int]) -> jax.Array:
    """Returns the array from a row per example; ``shape`` may be that of another number of examples."""
    rest = [n for d, n in enumerate(shape) if d != dim]
    return jnp.moveaxis(x.reshape(-1, *rest), 0, dim)
