"""What a planning problem is made of: nodes, their tensors, and how these are wired."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, NamedTuple

from meshdsl.ir import Op, Program, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, Placement, Split
from meshdsl.layouts.rule import Signature
from meshdsl.planner.costs import Work
from meshdsl.planner.numbering import Flags, Numbering, numbering_of
from meshdsl.planner.solution import Pins

if TYPE_CHECKING:
    from meshdsl.planner.kinds import Kinds
    from meshdsl.planner.wiring import Wiring

Rows = tuple[Signature, ...]
Shapes = tuple[tuple[tuple[int, ...], int], ...]  # shape and itemsize per port
NO_WORK, FREE = Work(0.0, (), 4), Layout()


class Port(NamedTuple):
    """One tensor of a node: its value, whether the node defines it, and who reads it (op id, operand)."""

    value: Value
    defines: bool
    reader: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Kind:
    """What nodes that stand for equal operations have in common: one object, so that what follows from it is known.

    Args:
      rows: the table on one axis; a row lists one placement per port.
    """

    rows: Rows
    shapes: Shapes
    work: Work = NO_WORK


def shapes_of(values: Iterable[Value]) -> Shapes:
    """Shapes and itemsizes of these tensors."""
    return tuple((v.shape, v.itemsize) for v in values)


@dataclass(eq=False, slots=True)
class Node:
    """A variable of the problem.

    Args:
      op: the operation it stands for, if any.
      trips: how often it runs.
      pin: the layout that was stated for it; axes it does not name are free.
      split: ports that axes have to split, along whichever dim.
      asked: rows that only some axes may take, those where a layout was stated that asks for them.
      linked: its tensors, and ``name`` what it is called, where it stands for no operation.
    """

    kind: Kind
    op: Op | None = None
    trips: int = 1
    pin: Layout = FREE
    split: tuple[tuple[int, tuple[str, ...]], ...] = ()
    asked: tuple[tuple[Signature, tuple[str, ...]], ...] = ()
    linked: tuple[Port, ...] = ()
    name: str = ""

    @property
    def ports(self) -> tuple[Port, ...]:
        """Its tensors: of an operation the operands that are values, then the results."""
        if self.op is None:
            return self.linked
        uses = [Port(v, False, (self.op.id, i)) for i, v in enumerate(self.op.inputs) if isinstance(v, Value)]
        return (*uses, *[Port(v, True) for v in self.op.outputs])

    @property
    def rows(self) -> Rows:
        """Its table on one axis."""
        return self.kind.rows

    @property
    def what(self) -> str:
        """What errors call it."""
        return self.name if self.op is None else f"{self.op.called} at {self.op.source}"

    def takes(self, row: Signature, axis: str) -> bool:
        """Whether an axis may take a row of the table."""
        return all(axis in axes for asked, axes in self.asked if asked == row)

    def placements(self, row: int) -> tuple[Placement, ...]:
        """Placement of every port in one row."""
        return (*self.rows[row].inputs, *self.rows[row].outputs)


@dataclass(eq=False)
class Problem:
    """Nodes, and who makes and reads every value.

    Args:
      kinds: of the program's operations.
      wiring: of the nodes.
      unsent: values that are never sent, by number: constants, which every device makes for itself.
      apart: per value id, axes that split it always, along whichever dim.
    """

    program: Program
    mesh: Mesh
    pins: Pins
    nodes: list[Node]
    kinds: "Kinds"
    wiring: "Wiring"
    unsent: Flags
    apart: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def numbers(self) -> Numbering:
        """Of the program."""
        return numbering_of(self.program.graph)


def same_layout(ports: tuple[Port, ...], pin: Layout, name: str, partial: bool = False, trips: int = 1) -> Node:
    """A node all of whose ports have one layout."""
    kind = _alike(shapes_of(port.value for port in ports), partial)
    return Node(kind, trips=trips, pin=pin, linked=ports, name=name)


def linking(ports: tuple[Port, ...], rows: Rows, name: str, trips: int) -> Node:
    """A node for no operation, with a table of its own."""
    return Node(Kind(rows, shapes_of(port.value for port in ports)), trips=trips, linked=ports, name=name)


@cache
def _alike(shapes: Shapes, partial: bool) -> Kind:
    return Kind(_alike_rows(len(shapes), len(shapes[0][0]), partial), shapes)


@cache
def _alike_rows(ports: int, rank: int, partial: bool) -> Rows:
    kinds: list[Placement] = [P, P("max"), P("min")] if partial else []
    return tuple(Signature((), (placed,) * ports) for placed in (B, *map(Split, range(rank)), *kinds))
