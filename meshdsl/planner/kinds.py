"""Kinds of operations: the rows and the work of equal ones are derived once, and are one object.

A model of a hundred equal layers has the operations of one, a hundred times over. They are of one kind if name,
parameters, shapes, dtypes and literals are equal, and the same operands and results are kept in memory. A literal's
value counts: zeros are parts of a sum, and a negative factor turns maxima into minima.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from meshdsl.ir import Graph, Literal, Op, Value
from meshdsl.layouts.rule import Signature
from meshdsl.planner.arrays import array, numbered
from meshdsl.planner.costs import Work, tensors, work_of, written
from meshdsl.planner.exact import Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.node import Kind, Rows, shapes_of
from meshdsl.planner.numbering import Flags, Numbering, numbering_of
from meshdsl.rules import asked_rows_of, rows_of
from meshdsl.trace.graphs import values

_LITERAL, _FUSED, _KEPT = range(3)
_AHEAD = 2  # numbers of an operation that come before those of its operands


class Kinds:
    """The kinds of a program's operations, their literals left out.

    Args:
      kept: the values that are kept in memory, by number; None for those that are written.
    """

    def __init__(self, graph: Graph, kept: Flags | None = None) -> None:
        self._numbers, self._kept = numbering_of(graph), written(graph) if kept is None else kept
        self._known: dict[int, Kind] = {}
        self._rows: dict[bytes, Rows] = {}
        self._more: dict[tuple[Kind, Rows], Kind] = {}

    def number(self, op: Op) -> int:
        """A number, the same for operations of one kind; one with parameters that cannot be compared is alone."""
        return self._of[op.id]

    def of(self, op: Op) -> Kind:
        """The kind of one operation."""
        number = self._of[op.id]
        if number not in self._known:
            self._known[number] = self._made(op)
        return self._known[number]

    def asking(self, op: Op) -> tuple[Kind, Rows]:
        """The kind of an operation with the rows that a layout may ask for, and those rows."""
        kind, real = self.of(op), _real(op)
        more = tuple(_only(row, real) for row in asked_rows_of(op))
        return self._more.setdefault((kind, more), replace(kind, rows=(*kind.rows, *more))), more

    def work(self, op: Op) -> Work:
        """What an operation does."""
        found = [v.id for v in tensors(op) if isinstance(v, Value)]
        kept = self._kept[self._numbers.of(found)].tolist()
        return work_of(op, {v for v, is_kept in zip(found, kept, strict=True) if is_kept})

    @cached_property
    def _said(self) -> "_Said":
        return _Said(self._numbers)

    @cached_property
    def _of(self) -> list[int]:
        """By op id."""
        numbers = numbered(self._said.of_all(self._kept))
        found: list[int] = numbers[self._numbers.position].tolist()
        return found

    def _made(self, op: Op) -> Kind:
        """A new kind, its rows being those of others that differ only in what is kept."""
        real, key = _real(op), self._said.plainly[int(self._numbers.position[op.id])]
        rows = self._rows.get(key) or self._rows.setdefault(key, tuple(_only(row, real) for row in rows_of(op)))
        return Kind(rows, shapes_of((*values(op.inputs), *op.outputs)), _without_literals(self.work(op), real))


class _Said:
    """What kinds depend on: per position, as bytes, a number for name and parameters, and how many operands there are.

    After that comes a number for each operand and result: for its shape and dtype, and the value of a literal.
    """

    def __init__(self, numbers: Numbering) -> None:
        self._numbers, literals = numbers, numbers.literals
        at, operands = array(at for at, *_ in literals), array(operand for _, operand, _ in literals)
        counts = np.bincount(numbers.at, minlength=len(numbers.ops)) + np.bincount(at, minlength=len(numbers.ops))
        sizes = _AHEAD + counts + np.diff(numbers.makes)
        self._ends = np.cumsum(sizes)
        begins = self._ends - sizes
        self._read = begins[numbers.at] + _AHEAD + numbers.operand
        self._made = (begins + _AHEAD + counts - numbers.makes[:-1])[numbers.made] + np.arange(len(numbers.values))
        self._numbered = np.empty(sizes.sum(), dtype=np.intp)
        self._numbered[begins], self._numbered[begins + 1] = _forms(numbers), counts
        said = numbered(_literal(x) for *_, x in literals)
        self._numbered[begins[at] + _AHEAD + operands] = said * 3 + _LITERAL

    def of_all(self, kept: Flags) -> Iterator[bytes]:
        """Per position, which values are kept included."""
        numbers = self._numbers
        said = (numbers.shape * (numbers.dtype.max(initial=0) + 1) + numbers.dtype) * 3 + np.where(kept, _KEPT, _FUSED)
        self._numbered[self._read], self._numbered[self._made] = said[numbers.read], said
        raw, width = self._numbered.tobytes(), self._numbered.itemsize
        ends = (self._ends * width).tolist()
        return (raw[begin:end] for begin, end in zip((0, *ends), ends, strict=False))

    @cached_property
    def plainly(self) -> list[bytes]:
        """Per position, whatever is kept."""
        return list(self.of_all(np.zeros(len(self._numbers.values), dtype=np.bool_)))


def _forms(numbers: Numbering) -> Ids:
    """Per position, a number for name and parameters; what cannot be compared is alone."""
    known: dict[Hashable, int] = {}
    found = []
    for at, op in enumerate(numbers.ops):
        try:
            asked = op and ((op.name, *op.params.items()) if op.params else op.name)
            found.append(known.setdefault(asked, len(known)))
        except TypeError:
            found.append(-1 - at)
    return array(found)


def _without_literals(work: Work, real: Sequence[int]) -> Work:
    """What an operation does, of those operands and results that are no literals."""
    sides = tuple(replace(side, tensor=real.index(side.tensor)) for side in work.sides if side.tensor in real)
    return replace(work, touched=tuple(work.touched[i] for i in real), sides=sides)


def _real(op: Op) -> list[int]:
    """The operands and results that are no literals, by position."""
    return [i for i, v in enumerate(tensors(op)) if isinstance(v, Value)]


def _literal(x: Literal) -> Hashable:
    """What there is to say of it."""
    said = x.shape, x.dtype, _bits(x.value)
    try:
        hash(said)
    except TypeError:
        return identity(x)
    return said


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
