"""A program laid out on one line: positions of operations, numbers of values and readings.

The operations of a graph stand in order, then the bodies in it, one after the other; before the first of every graph is
a position at which its inputs come in. Values are numbered in the order in which they are made, and *readings*, the
operands that are values, in the order of positions.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir import Graph, Op, Value
from meshdsl.planner.exact import Ids
from meshdsl.planner.places import Body, Places

Reading = tuple[int, int]  # op id, operand


class Stretch(NamedTuple):
    """Where a graph lies: from its first operation to one past its last.

    Args:
      loops: the positions of operations that have bodies, and where these lie.
    """

    start: int
    stop: int
    loops: "tuple[tuple[int, tuple[Stretch, ...]], ...]"


class Part(NamedTuple):
    """A graph, the position of its first operation, and how its values lie in memory of the operation around it."""

    graph: Graph
    start: int
    lies: Body


def lay_out(graph: Graph, places: Places, lies: Body, parts: list[Part]) -> Stretch:
    """Add a graph and its bodies to the parts of a line."""
    start = parts[-1].start + len(parts[-1].graph.ops) + 1 if parts else 1
    parts.append(Part(graph, start, lies))
    loops = [(at, op) for at, op in enumerate(graph.ops, start) if op.bodies]
    inside = tuple((at, _bodies(op, places, parts)) for at, op in loops)
    return Stretch(start, start + len(graph.ops), inside)


def _bodies(op: Op, places: Places, parts: list[Part]) -> tuple[Stretch, ...]:
    return tuple(lay_out(body, places, how, parts) for body, how in zip(op.bodies, places.bodies[op.id], strict=True))


class Numbering:
    """The numbers of a program.

    Args:
      ops: per position; None where inputs come in.
      values: by number. made: where they are made.
      readings: by number. read: the values that they are of. first: per position, and one past the last, its first one.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.ops = [op for part in parts for op in (None, *part.graph.ops)]
        made = [values for part in parts for values in (part.graph.inputs, *[op.outputs for op in part.graph.ops])]
        self.values, self.made = list(chain.from_iterable(made)), np.repeat(np.arange(len(made)), array(map(len, made)))
        ids = array(v.id for v in self.values)
        self._number = np.full(ids.max(initial=-1) + 1, -1)  # by value id
        self._number[ids] = np.arange(ids.size)
        read = [
            (at, (op.id, i), x.id)
            for at, op in enumerate(self.ops)
            if op
            for i, x in enumerate(op.inputs)
            if isinstance(x, Value)
        ]
        places, self.readings, values = list(zip(*read, strict=True)) or [()] * 3
        self.first = np.searchsorted(array(places), np.arange(len(self.ops) + 1))
        self.read = self.of(values)
        self._at = {reading: i for i, reading in enumerate(self.readings)}

    def of(self, values: Iterable[int]) -> Ids:
        """Numbers of values, given by their ids; IndexError for others."""
        found: Ids = self._number[array(values)]
        if found.min(initial=0) < 0:
            raise IndexError("a value of another program")
        return found

    def flags(self, values: Iterable[int]) -> NDArray[np.bool_]:
        """Which values are among some, given by their ids."""
        found = np.zeros(len(self.values), dtype=np.bool_)
        found[self.of(values)] = True
        return found

    def at(self, readings: Iterable[Reading]) -> Ids:
        """Numbers of readings; -1 for literals."""
        return array(map(self._at.get, readings, repeat(-1)))


def array(numbers: Iterable[int]) -> Ids:
    """Numbers as an array."""
    return np.fromiter(numbers, dtype=np.intp)


def numbered(things: Iterable[Hashable]) -> Ids:
    """A number for each thing, the same for equal ones."""
    known: dict[Hashable, int] = {}
    return array(known.setdefault(thing, len(known)) for thing in things)


def occurring(numbers: Ids) -> Ids:
    """The numbers that occur, in rising order, as ``np.unique`` has them, which hashes them first and takes longer."""
    found = np.sort(numbers)
    return np.asarray(found[np.append(found[:-1] != found[1:], found.size > 0)[: found.size]])


def grouped(numbers: Ids) -> list[Ids]:
    """The places of equal numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if numbers.size else []
