"""The variables of the planning problem: nodes, their ports and rows, and which of them are equal.

A model of a hundred equal layers has the operations of one, a hundred times over. Operations are of one class if name,
parameters, shapes, dtypes and literals are equal and the same operands and results are materialized; the class is one
object, so that rows, work and everything derived from them are computed once. A literal's value counts: zeros are parts
of a sum, and a negative factor turns maxima into minima.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from meshdsl.ir.graph import Graph, Literal, Op, Value
from meshdsl.ir.index import Flags, GraphIndex, graph_index
from meshdsl.ir.loops import ABSENT, PortRole, loop_ports
from meshdsl.ir.rewrite import values
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.costs.fusion import operands_and_results
from meshdsl.planner.costs.op_cost import OpWork, Shapes, work_of
from meshdsl.planner.costs.traffic import Traffic
from meshdsl.rules import rows_if_pinned_partial, rows_of
from meshdsl.rules.shard_map import manual_axes, manual_row
from meshdsl.util.arrays import Ids, first_of, index_array, intern_ids, is_hashable, object_id, row_ids, unique_sorted

# ---- Nodes -----------------------------------------------------------------------------------------------------------


Rows = tuple[Signature, ...]
NO_WORK, FREE = OpWork(0.0, ()), Layout()


class Port(NamedTuple):
    """One tensor of a node: its value, whether the node defines it, and the use that it is (op id, operand)."""

    value: Value
    defines: bool
    use: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class OpClass:
    """The common properties of nodes of equal operations; one object, by which derived arrays are memoised.

    Args:
      rows: the table on one mesh axis; a row lists one placement per port.
      shapes: shape and itemsize per port.
      work: at global shapes.
    """

    rows: Rows
    shapes: Shapes
    work: OpWork = NO_WORK


def shapes_of(values: Iterable[Value]) -> Shapes:
    """Returns shapes and itemsizes of tensors."""
    return tuple((v.shape, v.itemsize) for v in values)


@dataclass(eq=False, slots=True)
class Node:
    """A variable of the problem.

    Args:
      op_class: rows, shapes and work.
      op: the operation it stands for, if any.
      weight: by what its cost counts: its iterations per step.
      pin: the specified layout; axes it does not name are free.
      split: ports that some axes must split, along any dim.
      requested: rows that only some axes may take: those on which a constraint requests them.
      manual: the only row of every manual axis, those of the user's shard_maps around it; axes that split a dim at the
        boundary of one come first, major first.
      linked: its ports, if it stands for no operation.
      name: its name in errors then.
    """

    op_class: OpClass
    op: Op | None = None
    weight: float = 1
    pin: Layout = FREE
    split: tuple[tuple[int, tuple[str, ...]], ...] = ()
    requested: tuple[tuple[Signature, tuple[str, ...]], ...] = ()
    manual: tuple[tuple[str, Signature], ...] = ()
    linked: tuple[Port, ...] = ()
    name: str = ""

    @property
    def ports(self) -> tuple[Port, ...]:
        """Its tensors: the operands that are values, then the results."""
        if self.op is None:
            return self.linked
        uses = [Port(v, False, (self.op.id, i)) for i, v in enumerate(self.op.inputs) if isinstance(v, Value)]
        return (*uses, *[Port(v, True) for v in self.op.outputs])

    @property
    def rows(self) -> Rows:
        """Its table on one mesh axis."""
        return self.op_class.rows

    @property
    def label(self) -> str:
        """Its name in errors."""
        return self.name if self.op is None else f"{self.op.called} at {self.op.source}"

    def allows(self, row: Signature, axis: str) -> bool:
        """Whether a mesh axis may take a row of the table."""
        requested = all(axis in axes for requested, axes in self.requested if requested == row)
        return requested and all(row == only for name, only in self.manual if name == axis)

    def placements(self, row: int) -> tuple[Placement, ...]:
        """Returns the placement of every port in one row."""
        return (*self.rows[row].inputs, *self.rows[row].outputs)


def tied_node(
    ports: tuple[Port, ...], pin: Layout, name: str, partial: bool = False, weight: float = 1, work: OpWork = NO_WORK
) -> Node:
    """Returns a node all of whose ports have one layout; ``partial``, which may be partial."""
    op_class = _tied_class(shapes_of(port.value for port in ports), partial, work)
    return Node(op_class, weight=weight, pin=pin, linked=ports, name=name)


def link_node(ports: tuple[Port, ...], rows: Rows, name: str, weight: float, work: OpWork = NO_WORK) -> Node:
    """Returns a node for no operation, with a table of its own."""
    return Node(OpClass(rows, shapes_of(port.value for port in ports), work), weight=weight, linked=ports, name=name)


@cache
def _tied_class(shapes: Shapes, partial: bool, work: OpWork) -> OpClass:
    return OpClass(_tied_rows(len(shapes), len(shapes[0][0]), partial), shapes, work)


@cache
def _tied_rows(ports: int, rank: int, partial: bool) -> Rows:
    partials: list[Placement] = [P, P("max"), P("min")] if partial else []
    return tuple(Signature((), (placed,) * ports) for placed in (B, *map(Split, range(rank)), *partials))


# ---- Classes of operations -------------------------------------------------------------------------------------------


_LITERAL, _FUSED, _MATERIALIZED = range(3)
_KEY_HEADER = 3  # numbers of a key before those of operands and results: form, number of operands, what it moves


class OpClasses:
    """The classes of a program's operations; ports are the operands and results that are no literals.

    Args:
      graph: the program.
      traffic: what they move.
    """

    def __init__(self, graph: Graph, traffic: Traffic) -> None:
        self._index, self._traffic = graph_index(graph), traffic
        self._known: dict[int, OpClass] = {}
        self._rows: dict[bytes, Rows] = {}
        self._more: dict[tuple[OpClass, Rows], OpClass] = {}

    def number_of(self, op: Op) -> int:
        """Returns a number, equal for operations of one class; parameters that cannot be hashed equal no others."""
        return self._of[op.id]

    def of(self, op: Op) -> OpClass:
        """Returns the class of an operation."""
        number = self._of[op.id]
        if number not in self._known:
            self._known[number] = self._made(op)
        return self._known[number]

    def with_requested_rows(self, op: Op) -> tuple[OpClass, Rows]:
        """Returns the class of an operation with the rows that a constraint may request, and these rows."""
        real = _ports_of(op)
        more = tuple(_only(row, real) for row in rows_if_pinned_partial(op))
        return self._with_rows(op, more), more

    def manual_node(self, op: Op, weight: float, mesh: Mesh) -> Node:
        """Returns the node of an operation with manual axes: it has further rows, which only these may take."""
        real = _ports_of(op)
        rows = {axis: _only(manual_row(op, axis), real) for axis in manual_axes(op) if mesh.axis(axis) > 1}
        more = tuple(row for row in dict.fromkeys(rows.values()) if row not in self.of(op).rows)
        requested = tuple((row, tuple(axis for axis, only in rows.items() if only == row)) for row in more)
        requested += tuple((row, ()) for row in self.of(op).rows if row.majors)  # manual axes come first, in any order
        return Node(self._with_rows(op, more), op, weight, requested=requested, manual=tuple(rows.items()))

    def _with_rows(self, op: Op, more: Rows) -> OpClass:
        kind = self.of(op)
        return self._more.setdefault((kind, more), replace(kind, rows=(*kind.rows, *more))) if more else kind

    def work(self, op: Op) -> OpWork:
        """Returns the work of an operation."""
        return work_of(op, self._traffic.of(op))

    @cached_property
    def _keys(self) -> "_ClassKeys":
        return _ClassKeys(self._index)

    @cached_property
    def _of(self) -> list[int]:
        """By op id."""
        numbers = intern_ids(self._keys.all(self._traffic.in_memory, self._traffic.numbers))
        found: list[int] = numbers[self._index.position].tolist()
        return found

    def _made(self, op: Op) -> OpClass:
        """Returns a new class; classes that differ only in what is materialized share their rows."""
        real, key = _ports_of(op), self._keys.without_memory[int(self._index.position[op.id])]
        rows = self._rows.get(key) or self._rows.setdefault(key, tuple(_only(row, real) for row in rows_of(op)))
        return OpClass(rows, shapes_of((*values(op.inputs), *op.outputs)), _without_literals(self.work(op), real))


class _ClassKeys:
    """Keys of operations, per position, as bytes: equal keys mean equal classes.

    A key is a number for name and parameters, the number of operands, a number for what is moved, and one for each
    operand and result: for shape, dtype and whether it is in memory, or for the value of a literal.
    """

    def __init__(self, index: GraphIndex) -> None:
        self._index, literals = index, index.literals
        at, operands = index_array(at for at, *_ in literals), index_array(operand for _, operand, _ in literals)
        counts = np.bincount(index.use_position, minlength=len(index.ops)) + np.bincount(at, minlength=len(index.ops))
        sizes = _KEY_HEADER + counts + np.diff(index.first_result)
        self._ends = np.cumsum(sizes)
        begins = self._ends - sizes
        self._read = begins[index.use_position] + _KEY_HEADER + index.use_operand
        first_result = begins + _KEY_HEADER + counts - index.first_result[:-1]
        self._made = first_result[index.producer] + np.arange(len(index.values))
        self._flat = np.empty(sizes.sum(), dtype=np.intp)
        self._begins = begins
        self._flat[begins], self._flat[begins + 1] = _forms(index), counts
        ids = intern_ids(_literal_key(x) for *_, x in literals)
        self._flat[begins[at] + _KEY_HEADER + operands] = ids * 3 + _LITERAL

    def all(self, in_memory: Flags, moved: Ids | int) -> Iterator[bytes]:
        """Yields the key of each position."""
        index = self._index
        ids = (index.shape * (index.dtype.max(initial=0) + 1) + index.dtype) * 3
        ids += np.where(in_memory, _MATERIALIZED, _FUSED)
        self._flat[self._read], self._flat[self._made] = ids[index.use_value], ids
        self._flat[self._begins + 2] = moved
        raw, width = self._flat.tobytes(), self._flat.itemsize
        ends = (self._ends * width).tolist()
        return (raw[begin:end] for begin, end in zip((0, *ends), ends, strict=False))

    @cached_property
    def without_memory(self) -> list[bytes]:
        """[positions], the key as if nothing were materialized."""
        return list(self.all(np.zeros(len(self._index.values), dtype=np.bool_), 0))


def _forms(index: GraphIndex) -> Ids:
    """Returns, per position, a number for name and parameters; one of its own if these cannot be hashed."""
    known: dict[Hashable, int] = {}
    found = []
    for at, op in enumerate(index.ops):
        try:
            form = op and ((op.name, *op.params.items()) if op.params else op.name)
            found.append(known.setdefault(form, len(known)))
        except TypeError:
            found.append(-1 - at)
    return index_array(found)


def _without_literals(work: OpWork, real: Sequence[int]) -> OpWork:
    """Returns the work with the accesses and sides of operands and results that are no literals."""
    sides = tuple(replace(side, tensor=real.index(side.tensor)) for side in work.sides if side.tensor in real)
    accesses, copied = (tuple(counts[i] for i in real) if counts else () for counts in (work.accesses, work.copied))
    return replace(work, accesses=accesses, copied=copied, sides=sides)


def _ports_of(op: Op) -> list[int]:
    """Returns the positions of the operands and results that are no literals."""
    return [i for i, v in enumerate(operands_and_results(op)) if isinstance(v, Value)]


def _literal_key(x: Literal) -> Hashable:
    """Returns what distinguishes a literal: shape, dtype and bits; or its identity, if these cannot be hashed."""
    key = x.shape, x.dtype, _bits(x.value)
    return key if is_hashable(key) else object_id(x)


def _bits(value: Any) -> Any:
    """Returns a literal's value as one that can be hashed, which an array cannot."""
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes() if hasattr(value, "dtype") else value


def _only(row: Signature, real: Sequence[int]) -> Signature:
    placed = (*row.inputs, *row.outputs)
    inside = tuple(replace(e, port=real.index(e.port)) for e in row.collectives)
    majors = tuple(row.majors[i] for i in real) if row.majors else ()
    return Signature((), tuple(placed[i] for i in real), row.size, inside, majors)


# ---- Manual axes -----------------------------------------------------------------------------------------------------


def keep_whole(node: Node, axes: Sequence[str]) -> None:
    """Restricts a node that stands for no operation to replicated tensors on some axes."""
    whole = Signature((), (B,) * len(node.linked))
    node.manual = tuple((axis, whole) for axis in axes)


# ---- Links of loops --------------------------------------------------------------------------------------------------
# The nodes that tie the bodies of a loop or conditional to its surroundings (see ``build``).


def loop_links(op: Op, weight: float, hosted: Collection[int] = ()) -> Iterator[Node]:
    """Yields a node per port of a loop or conditional: all tensors of the port have one layout.

    Ports of the values in ``hosted`` belong to the nodes of their transfers (``transfers``).

    A stack outside has one more dim in front than its slice inside, which is not split along it. A predicate is
    replicated, so that all devices take the same branch.
    """
    for port in loop_ports(op):
        ends = [(op.bodies[body].ops[-1], i) for body, i in port.outputs]
        if port.operand != ABSENT:
            ends.insert(0, (op, port.operand))
        uses = [Port(v, False, (o.id, i)) for o, i in ends if isinstance(v := o.inputs[i], Value)]
        defines = [Port(op.bodies[body].inputs[i], True) for body, i in port.inputs]
        if port.result != ABSENT:
            defines.append(Port(op.outputs[port.result], True))
        if any(end.value.id in hosted for end in (*uses, *defines)):
            continue
        if port.role is PortRole.PREDICATE:
            if uses:
                yield link_node(tuple(uses), (Signature((), (B,)),), "predicate", weight)
        elif port.stacked:
            outer, inner = (uses, defines) if port.role is PortRole.SLICE else (defines, uses)
            rank = len(inner[0].value.shape) if inner else len(outer[0].value.shape) - 1
            rows = _stack_rows(rank, bool(outer), bool(inner))
            yield link_node((*outer, *inner), rows, f"slices of {op.name} at {op.source}", weight)
        elif uses or defines:
            yield tied_node((*uses, *defines), FREE, f"{port.role.value} of {op.name} at {op.source}", True, weight)


@cache
def _stack_rows(rank: int, outer: bool, inner: bool) -> Rows:
    """Returns the rows of a stack and its slices of ``rank`` dims, as far as each is a value."""
    pairs: list[tuple[Placement, Placement]] = [(Split(i + 1), Split(i)) for i in range(rank)]
    pairs += [(placed, placed) for placed in (B, P, P("max"), P("min"))]
    return tuple(Signature((), (*[o] * outer, *[i] * inner)) for o, i in pairs)


# ---- Classes of nodes ------------------------------------------------------------------------------------------------


T = TypeVar("T")


class NodeClasses:
    """Equivalence classes of nodes: of one operation class, with equal iterations and equal pins.

    Whatever depends on these alone is computed for the first node of a class, and known for the others.

    Args:
      nodes: of a problem.
      like: the classes of the same nodes under other pins.

    Attributes:
      representative: [nodes], the first node of the class.
      structure: [nodes], a number for operation class and iterations, whatever the pins.
    """

    def __init__(self, nodes: Sequence[Node], like: "NodeClasses | None" = None) -> None:
        # placements, not pins: pins are equal whatever the order in which they name the axes
        pins = intern_ids(
            [
                (node.pin.placements, node.split, node.requested, node.manual)
                if node.pin.placements or node.split or node.requested or node.manual
                else ()
                for node in nodes
            ]
        )
        self.structure: Ids = like.structure if like else _structure(nodes)
        self.representative = first_of(row_ids((self.structure, pins)))
        self._firsts: list[int] = self.representative.tolist()
        self._once: list[int] = unique_sorted(self.representative).tolist()

    def map(self, make: Callable[[int], T]) -> list[T]:
        """Returns ``make(n)`` for every node, called once per class."""
        known = {n: make(n) for n in self._once}
        return [known[n] for n in self._firsts]

    def intern(self, property_of: Callable[[int], Hashable]) -> Ids:
        """Returns, per node, a number for a property, equal for equal ones; it is computed once per class."""
        found = np.empty_like(self.representative)
        found[self._once] = intern_ids(map(property_of, self._once))
        return np.asarray(found[self.representative])

    def representatives_in(self, rows: Ids) -> Ids:
        """Returns, per node, the first of its class in the same state.

        Args:
          rows: [nodes, mesh axes], the states.
        """
        key = self.representative
        for column in rows.T:
            key = key * (rows.max() + 1) + column
        _, once, places = np.unique(key, return_index=True, return_inverse=True)
        return np.asarray(once[places])


def _structure(nodes: Sequence[Node]) -> Ids:
    """Returns, per node, a number for its operation class and iterations."""
    return row_ids(
        (intern_ids([object_id(node.op_class) for node in nodes]), intern_ids([node.weight for node in nodes]))
    )


def map_classes(firsts: Ids, make: Callable[[int], T]) -> list[T]:
    """Returns ``make(n)`` for every node, called once per class, given the first node of each node's class."""
    known = {n: make(n) for n in unique_sorted(firsts).tolist()}
    return [known[n] for n in firsts.tolist()]
