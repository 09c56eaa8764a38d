"""Kinds of operations: the rows and the work of equal ones are derived once, and are one object.

A model of a hundred equal layers has the operations of one, a hundred times over. They are of one kind if name,
parameters, shapes, dtypes and literals are equal, and the same operands and results are kept in memory. A literal's
value counts: zeros are parts of a sum, and a negative factor turns maxima into minima.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from meshdsl.ir.graph import Graph, Literal, Op, Value
from meshdsl.ir.index import Flags, GraphIndex, graph_index
from meshdsl.ir.rewrite import values
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, P, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.costs.op_cost import OpWork, materialized, operands_and_results, work_of
from meshdsl.rules import asked_rows_of, rows_of
from meshdsl.util.arrays import Ids, first_of, index_array, intern_ids, object_id, row_ids, unique_sorted

# ---- Node ------------------------------------------------------------------------------------------------------------
# What a planning problem is made of: nodes, their tensors, and how these are wired.


Rows = tuple[Signature, ...]
Shapes = tuple[tuple[tuple[int, ...], int], ...]  # shape and itemsize per port
NO_WORK, FREE = OpWork(0.0, (), 4), Layout()


class Port(NamedTuple):
    """One tensor of a node: its value, whether the node defines it, and who reads it (op id, operand)."""

    value: Value
    defines: bool
    use: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class OpClass:
    """What nodes that stand for equal operations have in common: one object, so that what follows from it is known.

    Args:
      rows: the table on one axis; a row lists one placement per port.
    """

    rows: Rows
    shapes: Shapes
    work: OpWork = NO_WORK


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
      requested: rows that only some axes may take, those where a layout was stated that asks for them.
      linked: its tensors, and ``name`` what it is called, where it stands for no operation.
    """

    op_class: OpClass
    op: Op | None = None
    trips: int = 1
    pin: Layout = FREE
    split: tuple[tuple[int, tuple[str, ...]], ...] = ()
    requested: tuple[tuple[Signature, tuple[str, ...]], ...] = ()
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
        return self.op_class.rows

    @property
    def label(self) -> str:
        """What errors call it."""
        return self.name if self.op is None else f"{self.op.called} at {self.op.source}"

    def allows(self, row: Signature, axis: str) -> bool:
        """Whether an axis may take a row of the table."""
        return all(axis in axes for asked, axes in self.requested if asked == row)

    def placements(self, row: int) -> tuple[Placement, ...]:
        """Placement of every port in one row."""
        return (*self.rows[row].inputs, *self.rows[row].outputs)


def tied_node(ports: tuple[Port, ...], pin: Layout, name: str, partial: bool = False, trips: int = 1) -> Node:
    """A node all of whose ports have one layout."""
    kind = _alike(shapes_of(port.value for port in ports), partial)
    return Node(kind, trips=trips, pin=pin, linked=ports, name=name)


def link_node(ports: tuple[Port, ...], rows: Rows, name: str, trips: int) -> Node:
    """A node for no operation, with a table of its own."""
    return Node(OpClass(rows, shapes_of(port.value for port in ports)), trips=trips, linked=ports, name=name)


@cache
def _alike(shapes: Shapes, partial: bool) -> OpClass:
    return OpClass(_alike_rows(len(shapes), len(shapes[0][0]), partial), shapes)


@cache
def _alike_rows(ports: int, rank: int, partial: bool) -> Rows:
    kinds: list[Placement] = [P, P("max"), P("min")] if partial else []
    return tuple(Signature((), (placed,) * ports) for placed in (B, *map(Split, range(rank)), *kinds))


# ---- Kinds -----------------------------------------------------------------------------------------------------------


_LITERAL, _FUSED, _KEPT = range(3)
_AHEAD = 2  # numbers of an operation that come before those of its operands


class OpClasses:
    """The kinds of a program's operations, their literals left out.

    Args:
      kept: the values that are kept in memory, by number; None for those that are written.
    """

    def __init__(self, graph: Graph, kept: Flags | None = None) -> None:
        self._numbers, self._kept = graph_index(graph), materialized(graph) if kept is None else kept
        self._known: dict[int, OpClass] = {}
        self._rows: dict[bytes, Rows] = {}
        self._more: dict[tuple[OpClass, Rows], OpClass] = {}

    def number_of(self, op: Op) -> int:
        """A number, the same for operations of one kind; one with parameters that cannot be compared is alone."""
        return self._of[op.id]

    def of(self, op: Op) -> OpClass:
        """The kind of one operation."""
        number = self._of[op.id]
        if number not in self._known:
            self._known[number] = self._made(op)
        return self._known[number]

    def with_requested_rows(self, op: Op) -> tuple[OpClass, Rows]:
        """The kind of an operation with the rows that a layout may ask for, and those rows."""
        kind, real = self.of(op), _real(op)
        more = tuple(_only(row, real) for row in asked_rows_of(op))
        return self._more.setdefault((kind, more), replace(kind, rows=(*kind.rows, *more))), more

    def work(self, op: Op) -> OpWork:
        """What an operation does."""
        found = [v.id for v in operands_and_results(op) if isinstance(v, Value)]
        kept = self._kept[self._numbers.numbers_of(found)].tolist()
        return work_of(op, {v for v, is_kept in zip(found, kept, strict=True) if is_kept})

    @cached_property
    def _said(self) -> "_Said":
        return _Said(self._numbers)

    @cached_property
    def _of(self) -> list[int]:
        """By op id."""
        numbers = intern_ids(self._said.of_all(self._kept))
        found: list[int] = numbers[self._numbers.position].tolist()
        return found

    def _made(self, op: Op) -> OpClass:
        """A new kind, its rows being those of others that differ only in what is kept."""
        real, key = _real(op), self._said.plainly[int(self._numbers.position[op.id])]
        rows = self._rows.get(key) or self._rows.setdefault(key, tuple(_only(row, real) for row in rows_of(op)))
        return OpClass(rows, shapes_of((*values(op.inputs), *op.outputs)), _without_literals(self.work(op), real))


class _Said:
    """What kinds depend on: per position, as bytes, a number for name and parameters, and how many operands there are.

    After that comes a number for each operand and result: for its shape and dtype, and the value of a literal.
    """

    def __init__(self, numbers: GraphIndex) -> None:
        self._numbers, literals = numbers, numbers.literals
        at, operands = index_array(at for at, *_ in literals), index_array(operand for _, operand, _ in literals)
        counts = np.bincount(numbers.use_position, minlength=len(numbers.ops)) + np.bincount(
            at, minlength=len(numbers.ops)
        )
        sizes = _AHEAD + counts + np.diff(numbers.first_result)
        self._ends = np.cumsum(sizes)
        begins = self._ends - sizes
        self._read = begins[numbers.use_position] + _AHEAD + numbers.use_operand
        self._made = (begins + _AHEAD + counts - numbers.first_result[:-1])[numbers.producer] + np.arange(
            len(numbers.values)
        )
        self._numbered = np.empty(sizes.sum(), dtype=np.intp)
        self._numbered[begins], self._numbered[begins + 1] = _forms(numbers), counts
        said = intern_ids(_literal(x) for *_, x in literals)
        self._numbered[begins[at] + _AHEAD + operands] = said * 3 + _LITERAL

    def of_all(self, kept: Flags) -> Iterator[bytes]:
        """Per position, which values are kept included."""
        numbers = self._numbers
        said = (numbers.shape * (numbers.dtype.max(initial=0) + 1) + numbers.dtype) * 3 + np.where(kept, _KEPT, _FUSED)
        self._numbered[self._read], self._numbered[self._made] = said[numbers.use_value], said
        raw, width = self._numbered.tobytes(), self._numbered.itemsize
        ends = (self._ends * width).tolist()
        return (raw[begin:end] for begin, end in zip((0, *ends), ends, strict=False))

    @cached_property
    def plainly(self) -> list[bytes]:
        """Per position, whatever is kept."""
        return list(self.of_all(np.zeros(len(self._numbers.values), dtype=np.bool_)))


def _forms(numbers: GraphIndex) -> Ids:
    """Per position, a number for name and parameters; what cannot be compared is alone."""
    known: dict[Hashable, int] = {}
    found = []
    for at, op in enumerate(numbers.ops):
        try:
            asked = op and ((op.name, *op.params.items()) if op.params else op.name)
            found.append(known.setdefault(asked, len(known)))
        except TypeError:
            found.append(-1 - at)
    return index_array(found)


def _without_literals(work: OpWork, real: Sequence[int]) -> OpWork:
    """What an operation does, of those operands and results that are no literals."""
    sides = tuple(replace(side, tensor=real.index(side.tensor)) for side in work.sides if side.tensor in real)
    return replace(work, accesses=tuple(work.accesses[i] for i in real), sides=sides)


def _real(op: Op) -> list[int]:
    """The operands and results that are no literals, by position."""
    return [i for i, v in enumerate(operands_and_results(op)) if isinstance(v, Value)]


def _literal(x: Literal) -> Hashable:
    """What there is to say of it."""
    said = x.shape, x.dtype, _bits(x.value)
    try:
        hash(said)
    except TypeError:
        return object_id(x)
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


# ---- Links -----------------------------------------------------------------------------------------------------------
# The nodes that tie the body of a loop or a branch to what lies outside it (see ``problem``).


def _link(op: Op, uses: Iterable[tuple[Op, int]], defines: Iterable[Value], what: str, trips: int) -> Node | None:
    """A node that passes one layout from the operands it reads to the values it defines."""
    read = [(o.inputs[i], (o.id, i)) for o, i in uses]
    ports = (*(Port(v, False, at) for v, at in read if isinstance(v, Value)), *(Port(v, True) for v in defines))
    return tied_node(ports, FREE, f"{what} of {op.name} at {op.source}", True, trips) if ports else None


def _scan_links(op: Op, trips: int) -> Iterator[Node]:
    (body,) = op.bodies
    consts, carry = op.params["num_consts"], op.params["num_carry"]
    last = body.ops[-1]
    for i, inner in enumerate(body.inputs):
        if i < consts:
            yield from _some(_link(op, [(op, i)], [inner], "const", trips))
        elif i < consts + carry:
            j = i - consts
            yield from _some(_link(op, [(op, i), (last, j)], [inner, op.outputs[j]], "carry", trips))
        else:
            yield _stacked(op, Port(inner, True), _outer_port(op, i), trips)
    for j in range(carry, len(op.outputs)):
        returned = last.inputs[j]
        inner_port = Port(returned, False, (last.id, j)) if isinstance(returned, Value) else None
        yield _stacked(op, inner_port, Port(op.outputs[j], True), trips)


def _outer_port(op: Op, i: int) -> Port | None:
    value = op.inputs[i]
    return Port(value, False, (op.id, i)) if isinstance(value, Value) else None


def _stacked(op: Op, inner: Port | None, outer: Port | None, trips: int) -> Node:
    """A slice inside the loop and its stack outside: the same layout, one dim further on."""
    present = [port for port in (outer, inner) if port is not None]
    rank = len(inner.value.shape) if inner else len(outer.value.shape) - 1  # type: ignore[union-attr]
    rows = _stacks(rank, outer is not None, inner is not None)
    return link_node(tuple(present), rows, f"slices of {op.name} at {op.source}", trips)


@cache
def _stacks(rank: int, outer: bool, inner: bool) -> tuple[Signature, ...]:
    pairs: list[tuple[Placement, Placement]] = [(Split(i + 1), Split(i)) for i in range(rank)]
    pairs += [(placed, placed) for placed in (B, P, P("max"), P("min"))]
    return tuple(Signature((), (*[o] * outer, *[i] * inner)) for o, i in pairs)


def _while_links(op: Op, trips: int) -> Iterator[Node]:
    cond, body = op.bodies
    nc, nb = op.params["cond_nconsts"], op.params["body_nconsts"]
    last = body.ops[-1]
    for i in range(nc):
        yield from _some(_link(op, [(op, i)], [cond.inputs[i]], "const", trips))
    for i in range(nb):
        yield from _some(_link(op, [(op, nc + i)], [body.inputs[i]], "const", trips))
    for j, outer in enumerate(op.outputs):
        uses = [(op, nc + nb + j), (last, j)]
        yield from _some(_link(op, uses, [cond.inputs[nc + j], body.inputs[nb + j], outer], "carry", trips))
    yield from _predicate(cond.ops[-1], trips)


def _cond_links(op: Op, trips: int) -> Iterator[Node]:
    yield from _predicate(op, trips)
    for i in range(1, len(op.inputs)):
        yield from _some(_link(op, [(op, i)], [body.inputs[i - 1] for body in op.bodies], "operand", trips))
    for j, outer in enumerate(op.outputs):
        yield from _some(_link(op, [(body.ops[-1], j) for body in op.bodies], [outer], "result", trips))


def _predicate(op: Op, trips: int) -> Iterator[Node]:
    """What decides a branch is the same everywhere."""
    value = op.inputs[0]
    if isinstance(value, Value):
        yield link_node((Port(value, False, (op.id, 0)),), (Signature((), (B,)),), "predicate", trips)


def _some(node: Node | None) -> Iterator[Node]:
    if node is not None:
        yield node


LINKS = {"scan": _scan_links, "while": _while_links, "cond": _cond_links}


# ---- Twins -----------------------------------------------------------------------------------------------------------
# Nodes that are twins: of equal kind, run as often, under equal statements.
#
# What is true of one is true of all of them, so it is worked out for the first and known for the others.


T = TypeVar("T")


class NodeClasses:
    """``first``: per node, the first whose twin it is; ``kinds``: a number, the same whatever is stated.

    Args:
      like: of the same nodes under other statements.
    """

    def __init__(self, nodes: Sequence[Node], like: "NodeClasses | None" = None) -> None:
        # placements, not pins: those are equal whatever the order in which axes are stated
        stated = intern_ids(
            [
                (node.pin.placements, node.split, node.requested)
                if node.pin.placements or node.split or node.requested
                else ()
                for node in nodes
            ]
        )
        self.structure: Ids = like.structure if like else _kinds(nodes)
        self.representative = first_of(row_ids((self.structure, stated)))
        self._firsts: list[int] = self.representative.tolist()
        self._once: list[int] = unique_sorted(self.representative).tolist()

    def map(self, make: Callable[[int], T]) -> list[T]:
        """What ``make`` says of every node, having been asked about one of each that are twins."""
        known = {n: make(n) for n in self._once}
        return [known[n] for n in self._firsts]

    def intern(self, said: Callable[[int], Hashable]) -> Ids:
        """Per node, a number for what is said of it and of its twins alike, the same for what is equal."""
        found = np.empty_like(self.representative)
        found[self._once] = intern_ids(map(said, self._once))
        return np.asarray(found[self.representative])

    def representatives_in(self, rows: Ids) -> Ids:
        """Per node, the first that is its twin and in the same state.

        Args:
          rows: per node and mesh axis, its state.
        """
        asked = self.representative
        for column in rows.T:
            asked = asked * (rows.max() + 1) + column
        _, once, places = np.unique(asked, return_index=True, return_inverse=True)
        return np.asarray(once[places])


def _kinds(nodes: Sequence[Node]) -> Ids:
    """Per node, a number for its kind and how often it runs."""
    return row_ids(
        (intern_ids([object_id(node.op_class) for node in nodes]), intern_ids([node.trips for node in nodes]))
    )


def map_classes(firsts: Ids, make: Callable[[int], T]) -> list[T]:
    """What ``make`` says of every node, having been asked about the first of each that are alike."""
    known = {n: make(n) for n in unique_sorted(firsts).tolist()}
    return [known[n] for n in firsts.tolist()]
