"""What a plan's text asks of a program, whatever the plan: who makes and reads its values, and where they stand."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.once import once
from meshdsl.plan.places import Places
from meshdsl.planner.exact import Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.numbering import numbering_of


class Index:
    """The operations of a graph and its bodies, in program order; of the graph itself it does not keep hold.

    Args:
      ops: with the bodies that they stand in, if they do. order: per op id, its position among them.
      sources: the lines that they come from. places: what those are called.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops = [(None if home is graph else home, op) for home, op in walk(graph)]
        self.order = {op.id: i for i, (_, op) in enumerate(self.ops)}
        sources = {identity(op.source): op.source for _, op in self.ops}  # most are one of few objects
        self.sources = list(dict.fromkeys(sources.values()))
        self.places = Places(self.sources)
        self._numbers = numbers = numbering_of(graph)
        self._made: list[int] = np.where(numbers.by_id >= 0, numbers.made[numbers.by_id], 0).tolist()  # by value id
        by_value, begins = numbers.by_value
        self._read: tuple[list[int], list[int]] = numbers.at[by_value].tolist(), numbers.operand[by_value].tolist()
        self._begins: list[int] = begins[numbers.by_id].tolist()
        self._ends: list[int] = begins[numbers.by_id + 1].tolist()

    def value(self, value: int) -> Value:
        """A value, given by its id, as in all that follow."""
        return self._numbers.value(value)

    def maker(self, value: int) -> Op | None:
        """What makes a value; None for what comes in."""
        return self._numbers.ops[self._made[value]]

    def home(self, value: int) -> Graph | None:
        """The body that a value is in, if it is."""
        around = self._numbers.parts[int(self._numbers.part[self._made[value]])].around
        return around[0].bodies[around[1]] if around else None

    def readers(self, value: int) -> list[tuple[Op, int]]:
        """The operations that read a value, in program order, and as which operand."""
        there, ops = slice(self._begins[value], self._ends[value]), self._numbers.ops
        return [(op, i) for at, i in zip(*(some[there] for some in self._read), strict=True) if (op := ops[at])]

    def in_order(self, values: Iterable[int]) -> list[int]:
        """Values in program order."""
        numbers, ids = self._numbers, list(values)
        made = numbers.of(ids)
        order = np.lexsort((made, self._ranks[numbers.made[made]]))
        return [ids[i] for i in order.tolist()]

    @cached_property
    def _ranks(self) -> Ids:
        """Per position, a number that says what comes before what; what comes into a body comes after its operation."""
        found = np.array([2 * self.order[op.id] if op else -1 for op in self._numbers.ops])
        for part in self._numbers.parts:
            if part.around:
                found[part.start - 1] = 2 * self.order[part.around[0].id] + 1
        return found


@once
def index_of(graph: Graph) -> Index:
    """The index of a graph."""
    return Index(graph)
