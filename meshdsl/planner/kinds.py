"""Kinds of operations: the rows and the work of equal ones are derived once, and are one object.

A model of a hundred equal layers has the operations of one, a hundred times over. They are of one kind if name,
parameters, shapes, dtypes and literals are equal, and the same operands and results are kept in memory. A literal's
value counts: zeros are parts of a sum, and a negative factor turns maxima into minima.
"""

from collections.abc import Hashable, Sequence, Set
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

    def __init__(self, kept: Set[int]) -> None:
        self.kept = kept
        self._of: dict[int, int] = {}  # by op id
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, Kind] = {}
        self._rows: dict[Hashable, Rows] = {}
        self._more: dict[tuple[Kind, Rows], Kind] = {}

    def number(self, op: Op) -> int:
        """A number, the same for operations of one kind; one with parameters that cannot be compared is alone."""
        found = self._of.get(op.id)
        if found is None:
            found = self._of[op.id] = self._numbered(op)
        return found

    def of(self, op: Op) -> Kind:
        """The kind of one operation."""
        number = self.number(op)
        return self._known.get(number) or self._known.setdefault(number, self._made(op))

    def asking(self, op: Op) -> tuple[Kind, Rows]:
        """The kind of an operation with the rows that a layout may ask for, and those rows."""
        kind, real = self.of(op), _real(op)
        more = tuple(_only(row, real) for row in asked_rows_of(op))
        return self._more.setdefault((kind, more), replace(kind, rows=(*kind.rows, *more))), more

    def _numbered(self, op: Op) -> int:
        try:
            return self._numbers.setdefault(_question(op, _parts(op, self.kept)), len(self._numbers))
        except TypeError:
            return -1 - op.id

    def _made(self, op: Op) -> Kind:
        """A new kind, its rows being those of others that differ only in what is kept."""
        real, parts = _real(op), [part[:2] + part[3:] for part in _parts(op, self.kept)]
        key = op.id if self.number(op) < 0 else _question(op, parts)
        rows = self._rows.get(key) or self._rows.setdefault(key, tuple(_only(row, real) for row in rows_of(op)))
        return Kind(rows, shapes_of((*values(op.inputs), *op.outputs)), _work(op, self.kept))


def _parts(op: Op, kept: Set[int]) -> list[_Part]:
    """What there is to say of the operands and results; never the same of a literal and a value."""
    return [
        (x.shape, x.dtype, x.id in kept) if isinstance(x, Value) else (x.shape, x.dtype, None, _bits(x.value))
        for x in (*op.inputs, *op.outputs)
    ]


def _question(op: Op, parts: Sequence[_Part]) -> Hashable:
    """What a kind depends on."""
    return op.name, tuple(parts), len(op.inputs), tuple(op.params.items())


def _work(op: Op, kept: Set[int]) -> Work:
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
