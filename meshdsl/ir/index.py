"""Def-use chains: which operation produces a value, which ones consume it, and where they stand.

There are two forms of the same thing. A *pass* that rewrites graphs needs the chains of one graph, without its bodies,
for a moment: ``producers`` and ``consumers`` build them as dictionaries. Everything after tracing reads a program that
does not change any more: ``graph_index`` numbers the operations, values and uses of the graph and all of its bodies
once, and answers questions about all of them at a time with arrays.

    position   operation                          value       use: operand 0, operand 1
       0       (inputs of the step)               0 1
       1       t = sin x                          2           0: value 0
       2       c = scan[body] t w                 3           1: value 2     2: value 1
       3       return c                                       3: value 3
       4       (inputs of the body)               4 5
       5       y = mul a b                        6           4: value 4     5: value 5
       6       return y                                       6: value 6

Every graph is a *block* of consecutive positions: an entry, at which its inputs are defined, then its operations in
order. The step comes first, and the blocks of bodies follow in the order of their loops. Values are numbered in the
order of definition. A *use* is an operand that is a value, and uses are numbered by position. Literals are no values.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Graph, Literal, Op, Value, element_bits
from meshdsl.util.arrays import Ids, index_array, intern_rows, ranges
from meshdsl.util.lazy import memoize_by_object

Flags = NDArray[np.bool_]
Use = tuple[int, int]  # op id, operand

# ---- One graph -------------------------------------------------------------------------------------------------------


def producers(graph: Graph) -> dict[int, Op]:
    """Returns the operation that produces each value, by value id, without those of bodies and without graph inputs."""
    return {v.id: op for op in graph.ops for v in op.outputs}


def consumers(graph: Graph) -> dict[int, list[Op]]:
    """Returns the operations that consume each value, by value id, once per use, without those of bodies."""
    found: dict[int, list[Op]] = {}
    for op in graph.ops:
        for x in op.inputs:
            if isinstance(x, Value):
                found.setdefault(x.id, []).append(op)
    return found


# ---- A graph and its bodies ------------------------------------------------------------------------------------------


class GraphBlock(NamedTuple):
    """A graph as a block of positions: from its first operation to one past its last; its entry is at ``start - 1``.

    Args:
      inputs: the values defined at its entry.
      trips: its iterations per step.
      owner: the operation whose body it is, and the number of the body; None for the step itself.
    """

    start: int
    stop: int
    inputs: tuple[Value, ...]
    trips: int
    owner: tuple[Op, int] | None


class BlockRange(NamedTuple):
    """The positions of a graph, with those of its operations that have bodies, and the ranges of these bodies."""

    start: int
    stop: int
    loops: "tuple[tuple[int, tuple[BlockRange, ...]], ...]"


class GraphIndex:
    """Positions of operations and numbers of values and uses, of a graph and its bodies; does not refer to the graph.

    Args:
      ops: [positions], None at the entry of a block.
      blocks: the graph and its bodies.
      block_of: [positions], the number of the block.
      root: the positions of the graph, with its loops.
      values: [values].
      number_by_id: [largest id + 1], the number of a value by its id; -1 for ids of no value.
      producer: [values], the position at which each is defined.
      first_result: [positions + 1], the first value defined there or later.
      use_value: [uses], the value.
      use_position: [uses], the position of the consumer.
      use_operand: [uses], the position among its operands.
      first_use: [positions + 1], the first use there or later.
      literals: position, operand and literal of all operands that are no values.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops: list[Op | None] = []
        self.blocks: list[GraphBlock] = []
        self.root = self._add_block(graph, None)
        self.block_of = np.repeat(np.arange(len(self.blocks)), [b.stop - b.start + 1 for b in self.blocks])
        inputs = {block.start - 1: block.inputs for block in self.blocks}
        results = [op.outputs if op else inputs[at] for at, op in enumerate(self.ops)]
        self.values = list(chain.from_iterable(results))
        self.first_result = np.cumsum([0, *map(len, results)])
        self.producer = np.repeat(np.arange(len(results)), np.diff(self.first_result))
        ids = index_array(map(_ID, self.values))
        self.number_by_id = np.full(ids.max(initial=-1) + 1, -1)
        self.number_by_id[ids] = np.arange(ids.size)
        self._number_uses()

    def _add_block(self, graph: Graph, owner: tuple[Op, int] | None) -> BlockRange:
        self.ops += (None, *graph.ops)
        start, stop = len(self.ops) - len(graph.ops), len(self.ops)
        self.blocks.append(GraphBlock(start, stop, graph.inputs, graph.trips, owner))
        loops = [(at, op) for at, op in enumerate(graph.ops, start) if op.bodies]
        inside = [(at, tuple(self._add_block(body, (op, i)) for i, body in enumerate(op.bodies))) for at, op in loops]
        return BlockRange(start, stop, tuple(inside))

    def _number_uses(self) -> None:
        operands = [op.inputs if op else () for op in self.ops]
        atoms, counts = list(chain.from_iterable(operands)), index_array(map(len, operands))
        ids, at = index_array(map(_ID, atoms)), np.repeat(np.arange(counts.size), counts)
        operand, is_value = np.arange(at.size) - (np.cumsum(counts) - counts)[at], ids >= 0
        self.use_position, self.use_operand = at[is_value], operand[is_value]
        self.use_value = self.number_by_id[ids[is_value]]
        self.first_use = np.searchsorted(self.use_position, np.arange(counts.size + 1))
        self._most_operands = counts.max(initial=1)
        others = np.flatnonzero(~is_value)
        literals: list[Literal] = [atoms[k] for k in others.tolist()]  # type: ignore[misc]
        self.literals = list(zip(at[others].tolist(), operand[others].tolist(), literals, strict=True))

    # ---- operations ----

    @property
    def op_count(self) -> int:
        """Number of operations, those of bodies included."""
        return len(self.ops) - len(self.blocks)

    @cached_property
    def position(self) -> Ids:
        """[largest op id + 1], the position of an operation by its id; -1 for ids of no operation."""
        at = np.flatnonzero([op is not None for op in self.ops])
        ids = index_array(op.id for op in self.ops if op)
        found = np.full(ids.max(initial=-1) + 1, -1)
        found[ids] = at
        return found

    @cached_property
    def op_names(self) -> list[str]:
        """[positions], the name of the operation; "" at entries."""
        return [op.name if op else "" for op in self.ops]

    def positions_named(self, names: Iterable[str]) -> Flags:
        """Returns the mask of the positions with operations of these names."""
        return np.fromiter(map(frozenset(names).__contains__, self.op_names), dtype=np.bool_)

    def enclosing_ops(self, op: int) -> tuple[Op, ...]:
        """Returns the operations in whose bodies one stands, given by its id: the outermost first, itself last."""
        found, at = list[Op](), self.position[op]
        while inner := self.ops[at]:
            found.append(inner)
            owner = self.blocks[int(self.block_of[at])].owner
            at = self.position[owner[0].id] if owner else 0
        return tuple(reversed(found))

    # ---- values ----

    def number_of(self, value: int) -> int:
        """Returns the number of the value with this id; raises IndexError if there is none."""
        found = int(self.number_by_id[value])
        if found < 0:
            raise IndexError(f"no value of this program has the id {value}")
        return found

    def numbers_of(self, values: Iterable[int]) -> Ids:
        """Returns the numbers of the values with these ids; raises IndexError if there is none with one of them."""
        found: Ids = self.number_by_id[index_array(values)]
        if found.min(initial=0) < 0:
            raise IndexError("no value of this program has one of the ids")
        return found

    def value(self, value: int) -> Value:
        """Returns the value with this id."""
        return self.values[self.number_of(value)]

    def mask(self, values: Ids) -> Flags:
        """Returns the mask of the values with these numbers."""
        found = np.zeros(len(self.values), dtype=np.bool_)
        found[values] = True
        return found

    def mask_of(self, values: Iterable[int]) -> Flags:
        """Returns the mask of the values with these ids."""
        return self.mask(self.numbers_of(values))

    def ids(self, values: Flags) -> list[int]:
        """Returns the ids of the values in a mask."""
        return [self.values[i].id for i in np.flatnonzero(values).tolist()]

    @cached_property
    def trips(self) -> Ids:
        """[values], how often per step each is defined."""
        return index_array(block.trips for block in self.blocks)[self.block_of[self.producer]]

    @property
    def shape(self) -> Ids:
        """[values], the number of the shape in ``shapes``."""
        return self._shapes[0]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """All shapes, each once."""
        return self._shapes[1]

    @property
    def dtype(self) -> Ids:
        """[values], a number for the dtype."""
        return self._dtypes[0]

    @cached_property
    def bits(self) -> Ids:
        """[values], bits of an element."""
        return index_array(map(element_bits, self._dtypes[1]))[self.dtype]

    @cached_property
    def element_counts(self) -> Ids:
        """[values], elements of the whole tensor."""
        return index_array(map(prod, self.shapes))[self.shape]

    @property
    def bytes(self) -> Ids:
        """[values], bytes of the whole tensor."""
        return -(-self.element_counts * self.bits // 8)

    @cached_property
    def _shapes(self) -> tuple[Ids, tuple[tuple[int, ...], ...]]:
        return intern_rows(map(attrgetter("shape"), self.values))

    @cached_property
    def _dtypes(self) -> tuple[Ids, tuple[Any, ...]]:
        return intern_rows(map(attrgetter("dtype"), self.values))

    # ---- uses ----

    @cached_property
    def uses(self) -> list[Use]:
        """[uses], the id of the consumer and the operand."""
        ids = index_array(op.id if op else -1 for op in self.ops)
        return list(zip(ids[self.use_position].tolist(), self.use_operand.tolist(), strict=True))

    @cached_property
    def uses_by_value(self) -> tuple[Ids, Ids]:
        """All uses sorted by value, then position; and [values + 1], where those of each value begin among them."""
        order = np.argsort(self.use_value, kind="stable")
        return order, np.searchsorted(self.use_value[order], np.arange(len(self.values) + 1))

    def uses_of(self, values: Ids) -> Ids:
        """Returns the uses of the values with these numbers, value after value, in order of position."""
        order, begins = self.uses_by_value
        return order[ranges(begins[values], begins[values + 1] - begins[values])]

    def used_once(self) -> Flags:
        """Returns the mask of the values with at most one consumer; it may read them as several operands."""
        first, last = np.zeros(len(self.values), dtype=np.intp), np.zeros(len(self.values), dtype=np.intp)
        first[self.use_value[::-1]], last[self.use_value] = self.use_position[::-1], self.use_position
        return np.asarray(first == last)

    def use_numbers(self, uses: Iterable[Use]) -> Ids:
        """Returns the numbers of uses, given by op id and operand; -1 for literals."""
        ops, operands = index_array(chain.from_iterable(uses)).reshape(-1, 2).T
        return self.use_numbers_at(self.position[ops], operands)

    def use_numbers_at(self, positions: Ids, operands: Ids) -> Ids:
        """Returns the numbers of uses, given by the position of the consumer and operand; -1 for literals."""
        wanted = positions * self._most_operands + operands
        known = self.use_position * self._most_operands + self.use_operand
        found = np.searchsorted(known, wanted)
        return np.where(np.append(known, -1)[found] == wanted, found, -1)


_ID = attrgetter("id")


@memoize_by_object
def graph_index(graph: Graph) -> GraphIndex:
    """Returns the index of a graph and its bodies, built once per graph; the graph must not change any more."""
    return GraphIndex(graph)


def ops_named(graph: Graph, *names: str) -> list[Op]:
    """Returns the operations of these names, in the graph and its bodies."""
    index = graph_index(graph)
    return [op for at in np.flatnonzero(index.positions_named(names)).tolist() if (op := index.ops[at])]
