"""Kinds of operations: the rows and the work of equal ones are derived once, and are one object.

A model of a hundred equal layers has the operations of one, a hundred times over. They are of one kind if name,
parameters, shapes, dtypes and literals are equal, and the same operands and results are kept in memory. A literal's
value counts: zeros are parts of a sum, and a negative factor turns maxima into minima.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshdsl.ir import Op, Value
from meshdsl.layouts.rule import Signature
from meshdsl.planner.costs import Work, tensors, work_of
from meshdsl.planner.node import Kind, Rows, shapes_of
from meshdsl.rules import asked_rows_of, rows_of
from meshdsl.trace.graphs import values

_Part = tuple[Hashable, ...]  # shape, dtype, whether it is kept, and of a literal the value


class Kinds:
    """The kinds of a program's operations, their literals left out.

    Args:
      kept: ids of the values that are kept in memory.
    """

    def __init__(self, kept: set[int]) -> None:
        self._kept = kept
        self._known: dict[Hashable, Kind] = {}
        self._rows: dict[Hashable, Rows] = {}
        self._more: dict[tuple[Kind, Rows], Kind] = {}

    def of(self, op: Op) -> Kind:
        """The kind of one operation."""
        kept = self._kept
        parts = tuple(
            [
                (x.shape, x.dtype, x.id in kept) if isinstance(x, Value) else (x.shape, x.dtype, None, _bits(x.value))
                for x in (*op.inputs, *op.outputs)
            ]
        )
        key = (op.name, parts, len(op.inputs), tuple(op.params.items()))
        try:
            found = self._known.get(key)
        except TypeError:  # parameters that cannot be hashed
            return self._made(op, op.id)
        return found or self._known.setdefault(key, self._made(op, (op.name, _kept_aside(parts), *key[2:])))

    def asking(self, op: Op) -> tuple[Kind, Rows]:
        """The kind of an operation with the rows that a layout may ask for, and those rows."""
        kind, real = self.of(op), _real(op)
        more = tuple(_only(row, real) for row in asked_rows_of(op))
        return self._more.setdefault((kind, more), replace(kind, rows=(*kind.rows, *more))), more

    def _made(self, op: Op, key: Hashable) -> Kind:
        """A new kind, its rows being those of others for which the key is the same."""
        real = _real(op)
        rows = self._rows.get(key) or self._rows.setdefault(key, tuple(_only(row, real) for row in rows_of(op)))
        return Kind(rows, shapes_of((*values(op.inputs), *op.outputs)), _work(op, self._kept))


def _kept_aside(parts: Sequence[_Part]) -> tuple[_Part, ...]:
    """What rows depend on; never the same of a literal and a value."""
    return tuple(part[:2] + part[3:] for part in parts)


def _work(op: Op, kept: set[int]) -> Work:
    """What an operation does, its literals left out."""
    work, real = work_of(op, kept), _real(op)
    sides = tuple(replace(side, tensor=real.index(side.tensor)) for side in work.sides if side.tensor in real)
    return replace(work, touched=tuple(work.touched[i] for i in real), sides=sides)


def _real(op: Op) -> list[int]:
    """The operands and results that are no literals, by position."""
    return [i for i, v in enumerate(tensors(op)) if isinstance(v, Value)]


def _bits(value: Any) -> Any:
    """A literal's value as one that can be compared, which an array cannot."""
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes() if hasattr(value, "dtype") else value


def _only(row: Signature, real: Sequence[int]) -> Signature:
    placed = (*row.inputs, *row.outputs)
    inside = tuple(replace(e, port=real.index(e.port)) for e in row.collectives)
    return Signature((), tuple(placed[i] for i in real), row.size, inside)
