"""A program laid out on one line: positions of operations, numbers of values and readings.

The operations of a graph stand in order, then the bodies in it, one after the other; before the first of every graph is
a position at which its inputs come in. Values are numbered in the order in which they are made, and *readings*, the
operands that are values, in the order of positions. A program is gone through once for this; what is asked of all its
operations is then asked of arrays.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Graph, Literal, Op, Value
from meshdsl.util.arrays import Ids, index_array, intern_rows, ranges
from meshdsl.util.lazy import memoize_by_object

Flags = NDArray[np.bool_]
Use = tuple[int, int]  # op id, operand


class GraphBlock(NamedTuple):
    """Where a graph lies: from its first operation to one past its last.

    Args:
      owner: the operation whose body it is, and which one; None for the outermost.
    """

    start: int
    stop: int
    inputs: tuple[Value, ...]
    trips: int
    owner: tuple[Op, int] | None


class BlockRange(NamedTuple):
    """The same, with the positions of operations that have bodies, and where these lie."""

    start: int
    stop: int
    loops: "tuple[tuple[int, tuple[BlockRange, ...]], ...]"


class GraphIndex:
    """The numbers of a program; of its graph it does not keep hold.

    Args:
      blocks: the graph and its bodies. root: where the graph lies.
      ops: per position; None where inputs come in. block_of: per position, that which it is of.
      values: by number. number_by_id: their numbers by id; -1 where there is none.
      producer: per value, where it is made. first_result: per position, its first result.
      use_value: per reading, the value. use_position: where. use_operand: which one.
      first_use: per position, and one past the last, its first reading.
      literals: of operations: their position, which operand they are, and they themselves.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops: list[Op | None] = []
        self.blocks: list[GraphBlock] = []
        self.root = self._lay_out(graph, None)
        self.block_of = np.repeat(np.arange(len(self.blocks)), [part.stop - part.start + 1 for part in self.blocks])
        starts = {part.start - 1: part.inputs for part in self.blocks}
        made = [op.outputs if op else starts[at] for at, op in enumerate(self.ops)]
        self.values = list(chain.from_iterable(made))
        self.first_result = np.cumsum([0, *map(len, made)])
        self.producer = np.repeat(np.arange(len(made)), np.diff(self.first_result))
        ids = index_array(map(_ID, self.values))
        self.number_by_id = np.full(ids.max(initial=-1) + 1, -1)
        self.number_by_id[ids] = np.arange(ids.size)
        self._read()

    def _lay_out(self, graph: Graph, around: tuple[Op, int] | None) -> BlockRange:
        """Add a graph and its bodies to the line."""
        self.ops += (None, *graph.ops)
        start, stop = len(self.ops) - len(graph.ops), len(self.ops)
        self.blocks.append(GraphBlock(start, stop, graph.inputs, graph.trips, around))
        loops = [(at, op) for at, op in enumerate(graph.ops, start) if op.bodies]
        inside = [(at, tuple(self._lay_out(body, (op, i)) for i, body in enumerate(op.bodies))) for at, op in loops]
        return BlockRange(start, stop, tuple(inside))

    def _read(self) -> None:
        """Number the readings."""
        operands = [op.inputs if op else () for op in self.ops]
        atoms, counts = list(chain.from_iterable(operands)), index_array(map(len, operands))
        ids, at = index_array(map(_ID, atoms)), np.repeat(np.arange(counts.size), counts)
        operand, are = np.arange(at.size) - (np.cumsum(counts) - counts)[at], ids >= 0
        self.use_position, self.use_operand, self.use_value = at[are], operand[are], self.number_by_id[ids[are]]
        self.first_use, self._most = (
            np.searchsorted(self.use_position, np.arange(counts.size + 1)),
            counts.max(initial=1),
        )
        others = np.flatnonzero(~are)
        literals: list[Literal] = [atoms[k] for k in others.tolist()]  # type: ignore[misc]
        self.literals = list(zip(at[others].tolist(), operand[others].tolist(), literals, strict=True))

    @cached_property
    def position(self) -> Ids:
        """By op id; -1 for others."""
        at = np.flatnonzero([op is not None for op in self.ops])
        ids = index_array(op.id for op in self.ops if op)
        found = np.full(ids.max(initial=-1) + 1, -1)
        found[ids] = at
        return found

    @property
    def op_count(self) -> int:
        """Of operations."""
        return len(self.ops) - len(self.blocks)

    def enclosing_ops(self, op: int) -> tuple[Op, ...]:
        """The operations that one stands in, given by its id, the outermost first, and itself."""
        found, at = list[Op](), self.position[op]
        while mine := self.ops[at]:
            found.append(mine)
            around = self.blocks[int(self.block_of[at])].owner
            at = self.position[around[0].id] if around else 0
        return tuple(reversed(found))

    def uses_of(self, values: Ids) -> Ids:
        """The readings of values, value after value, in the order of positions."""
        readings, begins = self.uses_by_value
        return readings[ranges(begins[values], begins[values + 1] - begins[values])]

    @cached_property
    def uses_by_value(self) -> tuple[Ids, Ids]:
        """All readings, value after value, and per value, and one past the last, where its own begin."""
        readings = np.argsort(self.use_value, kind="stable")
        return readings, np.searchsorted(self.use_value[readings], np.arange(len(self.values) + 1))

    @cached_property
    def uses(self) -> list[Use]:
        """By number."""
        ids = index_array(op.id if op else -1 for op in self.ops)
        return list(zip(ids[self.use_position].tolist(), self.use_operand.tolist(), strict=True))

    @cached_property
    def op_names(self) -> list[str]:
        """Of operations, by position."""
        return [op.name if op else "" for op in self.ops]

    @property
    def shape(self) -> Ids:
        """Per value, the number of its shape among ``shapes``."""
        return self._shapes[0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """That there are."""
        return self._shapes[1]

    @property
    def dtype(self) -> Ids:
        """Per value, the number of its dtype."""
        return self._dtypes[0]

    @cached_property
    def itemsizes(self) -> Ids:
        """Per value, bytes of an element."""
        return index_array(Value(0, (), dtype).itemsize for dtype in self._dtypes[1])[self.dtype]

    @cached_property
    def element_counts(self) -> Ids:
        """Per value, elements of the whole tensor."""
        return index_array(map(prod, self.shapes))[self.shape]

    @property
    def bytes(self) -> Ids:
        """Per value, of the whole tensor."""
        return self.element_counts * self.itemsizes

    @cached_property
    def _shapes(self) -> tuple[Ids, tuple[tuple[int, ...], ...]]:
        return intern_rows(map(attrgetter("shape"), self.values))

    @cached_property
    def _dtypes(self) -> tuple[Ids, tuple[Any, ...]]:
        return intern_rows(map(attrgetter("dtype"), self.values))

    @cached_property
    def trips(self) -> Ids:
        """Per value, how often what makes it runs."""
        return index_array(part.trips for part in self.blocks)[self.block_of[self.producer]]

    def numbers_of(self, values: Iterable[int]) -> Ids:
        """Numbers of values, given by their ids; IndexError for others."""
        found: Ids = self.number_by_id[index_array(values)]
        if found.min(initial=0) < 0:
            raise IndexError("a value of another program")
        return found

    def value(self, value: int) -> Value:
        """A value, given by its id."""
        return self.values[self.number_of(value)]

    def number_of(self, value: int) -> int:
        """That of one value, given by its id; IndexError for others."""
        found = int(self.number_by_id[value])
        if found < 0:
            raise IndexError("a value of another program")
        return found

    def mask_of(self, values: Iterable[int]) -> Flags:
        """Which values are among some, given by their ids."""
        return self.mask(self.numbers_of(values))

    def mask(self, values: Ids) -> Flags:
        """Which values are among some, given by their numbers."""
        found = np.zeros(len(self.values), dtype=np.bool_)
        found[values] = True
        return found

    def ids(self, values: Flags) -> list[int]:
        """The ids of some values."""
        return [self.values[i].id for i in np.flatnonzero(values).tolist()]

    def positions_named(self, names: Iterable[str]) -> Flags:
        """The positions that have operations of these names."""
        return np.fromiter(map(frozenset(names).__contains__, self.op_names), dtype=np.bool_)

    def use_numbers(self, readings: Iterable[Use]) -> Ids:
        """Numbers of readings; -1 for literals."""
        ops, operands = index_array(chain.from_iterable(readings)).reshape(-1, 2).T
        return self.use_numbers_at(self.position[ops], operands)

    def use_numbers_at(self, at: Ids, operands: Ids) -> Ids:
        """The same of operands of operations at positions."""
        asked, known = at * self._most + operands, self.use_position * self._most + self.use_operand
        found = np.searchsorted(known, asked)
        return np.where(np.append(known, -1)[found] == asked, found, -1)


_ID = attrgetter("id")


@memoize_by_object
def graph_index(graph: Graph) -> GraphIndex:
    """The numbers of a graph."""
    return GraphIndex(graph)


def ops_named(graph: Graph, *names: str) -> list[Op]:
    """The operations of these names, in the graph and its bodies."""
    numbers = graph_index(graph)
    return [op for at in np.flatnonzero(numbers.positions_named(names)).tolist() if (op := numbers.ops[at])]
