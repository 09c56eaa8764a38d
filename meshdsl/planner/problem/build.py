"""The planning problem: one variable per operation, whose states are its signatures.

    minimise   sum over nodes of trips * seconds(node at its rows)
             + sum over values of trips * seconds(cheapest moves from the value's own layout
                                                  to every layout its readers ask for)
    subject to pins, divisibility, and the memory limit at every program point

A *node* is an operation, an input, an output or a link of a loop; a *port* is one of its
tensors. Every value has one port that defines it and any number that use it. On each mesh
axis a node takes one row of its table; what the rows say at the two ends of a value decides
which moves lie between. A constant that is cheap to make is never sent: every device makes its own.

Loops need no special treatment by the solver. A const of a loop body is a node that reads the
outer value once and defines the inner one: reshard before it and it happens once, after it and
it happens on every trip. A carry is one node that reads the initial value and the body's
result, and defines the body's input and the loop's result, all in one layout, which may be
partial: then it is reduced once, after the loop.

A sum is never moved across a cast that rounds, unless the step states that the cast's result is
a partial sum: that cast has a row more, which it may take on the axes of the statement.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from meshdsl.errors import PinError, faults
from meshdsl.ir.graph import Graph, Op, TracedProgram, Value
from meshdsl.ir.index import Flags, GraphIndex, graph_index, ops_named
from meshdsl.ir.solution import Pins
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, Partial, Split
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.problem.ports import Wiring
from meshdsl.planner.problem.variables import FREE, LINKS, Node, OpClass, OpClasses, Port, Rows, tied_node
from meshdsl.trace.passes.duplicate import CHEAP, partial_casts
from meshdsl.util.arrays import object_id, ranges, unique_sorted

# ---- Node ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Problem:
    """Nodes, and who makes and reads every value.

    Args:
      op_classes: of the program's operations.
      wiring: of the nodes.
      unsent: values that are never sent, by number: constants, which every device makes for itself.
      always_split: per value id, axes that split it always, along whichever dim.
    """

    program: TracedProgram
    mesh: Mesh
    pins: Pins
    nodes: list[Node]
    op_classes: "OpClasses"
    wiring: "Wiring"
    unsent: Flags
    always_split: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def index(self) -> GraphIndex:
        """Of the program."""
        return graph_index(self.program.graph)


# ---- Reach -----------------------------------------------------------------------------------------------------------
# Where a value can be partial at all.
#
# The nodes are gone through in their order, and again where a loop hands back what was not known yet, until nothing
# more can be partial. What a node makes of what it reads is worked out once for all of a kind.


_Ways = int  # in which a tensor may be partial, a bit each
_Given = tuple[tuple[int, _Ways], ...]  # by port
_DEFINED = -1  # of a port that reads nothing
_BITS = {reduction: 1 << i for i, reduction in enumerate(REDUCTIONS)}


def remove_unreachable_partials(problem: Problem) -> None:
    """Keep a partial placement only where a partial value can come from upstream."""
    nodes, reach = problem.nodes, _Dataflow(problem.nodes, problem.wiring)
    n = reach.due.find(1)
    while n >= 0:
        reach.visit(n)
        later = reach.due.find(1, n + 1)
        n = later if later >= 0 else reach.due.find(1)
    for node, kind in zip(nodes, reach.left, strict=True):
        node.op_class = kind


class _Dataflow:
    """What the kinds of nodes are ``left`` with as far as values can be partial, and which nodes are to be looked at.

    In the beginning no value can be; operations of a kind are left alike then, and those that make one partial at once
    are looked at again.
    """

    def __init__(self, nodes: Sequence[Node], wiring: Wiring) -> None:
        self._nodes, self._passing, reads = (
            nodes,
            _Transfer(),
            wiring.port_producer != np.arange(wiring.port_producer.size),
        )
        self._ports = list(pairwise((*wiring.first_port.tolist(), reads.size)))
        self._possible = [0] * len(wiring.producer) + [
            _DEFINED
        ]  # by value; what nodes define is read at the last place
        self._read, self._made = (
            np.where(reads, wiring.value_of, len(wiring.producer)).tolist(),
            wiring.value_of.tolist(),
        )
        self._begins = np.searchsorted(wiring.use_producers, wiring.producer).tolist()
        self._ends = np.searchsorted(wiring.use_producers, wiring.producer, side="right").tolist()
        self._readers = wiring.node_of[wiring.uses].tolist()
        self.due = bytearray(node.op is None for node in nodes)
        first = {node.op_class: n for n, node in enumerate(nodes) if node.op}
        known = {kind: self._passed(n) for kind, n in first.items()}
        nothing = {node.op_class: (node.op_class, ()) for node in nodes if node.op is None}
        found = [known.get(node.op_class) or nothing[node.op_class] for node in nodes]
        self.left = [kind for kind, _ in found]
        for n, (_, given) in enumerate(found):
            if given and nodes[n].op:
                self._give(n, given)

    def visit(self, n: int) -> None:
        """Look at a node."""
        self.due[n] = 0
        self.left[n], given = self._passed(n)
        self._give(n, given)

    def _passed(self, n: int) -> "tuple[OpClass, _Given]":
        return self._passing.of(self._nodes[n], [self._possible[v] for v in self._read[slice(*self._ports[n])]])

    def _give(self, n: int, given: _Given) -> None:
        """Note in which ways the values that a node makes may be partial, and who reads them."""
        begin, _ = self._ports[n]
        for p, ways in given:
            value = self._made[begin + p]
            if self._possible[value] != ways:
                self._possible[value] = ways
                for reader in self._readers[self._begins[value] : self._ends[value]]:
                    self.due[reader] = 1


class _Transfer:
    """What nodes are left with, and what they make partial, by the ways in which what they read can be partial."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[OpClass, _Given]] = {}
        self._rows: dict[tuple[int, tuple[int, ...]], Rows] = {}
        self._kinds: dict[tuple[OpClass, tuple[int, ...]], OpClass] = {}

    def of(self, node: Node, read: Sequence[_Ways]) -> tuple[OpClass, _Given]:
        """Of one node; a stated layout is taken at its word, and needs nothing."""
        stated = node.pin is not FREE and bool(node.pin.partial())
        key = (node.op_class, stated, *read)
        return self._known.get(key) or self._known.setdefault(key, self._worked_out(node.op_class, stated, read))

    def _worked_out(self, kind: OpClass, stated: bool, read: Sequence[_Ways]) -> tuple[OpClass, _Given]:
        given: dict[int, _Ways] = {}
        lost = []
        for i, row in enumerate(kind.rows):
            ends = list(_partial(row))
            needs = [read[p] & way for p, way in ends if read[p] != _DEFINED]
            if stated or not needs or any(needs):
                given.update({p: given.get(p, 0) | way for p, way in ends if read[p] == _DEFINED})
            else:
                lost.append(i)
        return self._without(kind, tuple(lost)), tuple(given.items())

    def _without(self, kind: OpClass, lost: tuple[int, ...]) -> OpClass:
        """The kind without some rows; equal questions get the same object, and kinds that share rows still do."""
        if not lost:
            return kind
        left = tuple(row for i, row in enumerate(kind.rows) if i not in lost)
        rows = self._rows.setdefault((object_id(kind.rows), lost), left)
        return self._kinds.setdefault((kind, lost), OpClass(rows, kind.shapes, kind.work))


def _partial(row: Signature) -> Iterator[tuple[int, _Ways]]:
    """The ports that are partial in a row, and how."""
    return ((p, _BITS[at.reduction]) for p, at in enumerate(row.outputs) if isinstance(at, Partial))


# ---- Stacks ----------------------------------------------------------------------------------------------------------
# Stacks of layers that the user laid out split by layer, and a loop reads layer by layer.
#
#     params/layers  float32[layers, d, d]   pinned  x=S(0)
#     scan over params/layers: every device needs every layer, one per trip
#
# To gather the whole stack before the loop is one collective, so it would often be the fastest plan,
# but who splits a stack by layer says that no device is to hold all of it. So the loop reads it
# split over the same axes along another dim: the stack is exchanged once, all-to-all, and each trip
# gathers, or sums over, one layer. Nor is it whole on its way there, or where others read it, if they have
# rows that split it. Stacks of vectors are small, and free.


_MATRIX = 2  # dims of a layer from which on it counts


@dataclass(frozen=True)
class SplitStack:
    """The input at ``path``, stated to lie split over ``axes`` along dim 0, as operand ``index`` of the scan ``op``.

    Args:
      values: ids of what it is on its way there, cast say.
    """

    path: str
    axes: tuple[str, ...]
    op: Op
    index: int
    values: tuple[int, ...]

    def stays_split(self, trees: Mapping[int, Sequence[ReshardStep]]) -> bool:
        """Whether no move, not even one on the way to another layout, puts all of it on a device."""
        moves = (move for value in self.values for move in trees.get(value, ()))
        return all(isinstance(move.after.on(axis), Split) for move in moves for axis in self.axes)

    def __str__(self) -> str:
        over = ",".join(self.axes)
        return f"{self.path} lies split by layer over {over}: the scan at {self.op.source} never gathers all of it"


_Stated = Mapping[int, tuple[str, tuple[str, ...]]]  # by value id: path and axes


def split_stacks(program: TracedProgram, pins: Pins, mesh: Mesh) -> list[SplitStack]:
    """The stacks that have to stay split over their axes along any dim."""
    if not ops_named(program.graph, "scan"):
        return []
    leaves = zip(program.inputs, program.graph.inputs, pins.inputs, strict=True)
    split = ((leaf, value, tuple(a for a in pin.splitting(0) if mesh.axis(a) > 1)) for leaf, value, pin in leaves)
    stated = {value.id: (leaf.path, axes) for leaf, value, axes in split if axes}
    return list(_read(program.graph, stated, mesh)) if stated else []


def _read(graph: Graph, stated: _Stated, mesh: Mesh) -> Iterator[SplitStack]:
    if not any(op.name == "scan" for op in graph.ops):
        return
    known = dict(stated)
    for op in graph.ops:
        found = [known[x.id] for x in op.inputs if isinstance(x, Value) and x.id in known]
        known.update({v.id: found[0] for v in op.outputs if found and _passes(op, v)})
        if op.name == "scan":
            yield from _of_scan(op, known, mesh)


def _passes(op: Op, made: Value) -> bool:
    """Whether a stack stays one: it is cast or scaled."""
    return not op.bodies and [x.shape for x in op.inputs if isinstance(x, Value)] == [made.shape]


def _of_scan(op: Op, known: _Stated, mesh: Mesh) -> Iterator[SplitStack]:
    closed, (body,) = op.params["num_consts"] + op.params["num_carry"], op.bodies
    given = {i: known[x.id] for i, x in enumerate(op.inputs) if isinstance(x, Value) and x.id in known}
    for i, (path, axes) in given.items():
        layer = body.inputs[i].shape
        if i >= closed and len(layer) >= _MATRIX and any(n % prod(map(mesh.axis, axes)) == 0 for n in layer):
            yield SplitStack(path, axes, op, i, tuple(v for v, stack in known.items() if stack == (path, axes)))
    yield from _read(body, {body.inputs[i].id: stack for i, stack in given.items() if i < closed}, mesh)


# ---- Problem ---------------------------------------------------------------------------------------------------------


def make_problem(program: TracedProgram, mesh: Mesh, pins: Pins) -> Problem:
    """The planning problem of a program, with rows that cannot occur left out."""
    numbers, kinds = graph_index(program.graph), OpClasses(program.graph)
    nodes = [*_boundary(program, pins), *_graph_nodes(program.graph, kinds)]
    problem = Problem(program, mesh, pins, nodes, kinds, Wiring(nodes, numbers), _made_of_nothing(numbers))
    for stack in split_stacks(program, pins, mesh):
        _keep_split(problem, stack)
    remove_unreachable_partials(problem)
    _require_rows(problem)
    return problem


def repin(problem: Problem, pins: Pins) -> Problem | None:
    """The same problem under other pins, nodes that they do not concern being the same objects; None if all differ."""
    before, program = problem.pins, problem.program
    if before.follows != pins.follows or any(split_stacks(program, p, problem.mesh) for p in (before, pins)):
        return None
    stated = [*pins.inputs, *(pins.outputs[j] for j, _ in _alone(program, pins))]
    pairs = zip(problem.nodes, stated, strict=False)
    ends = [node if node.pin.placements == pin.placements else replace(node, pin=pin) for node, pin in pairs]
    changed = replace(problem, pins=pins, nodes=[*ends, *problem.nodes[len(ends) :]])
    _require_rows(changed)
    return changed


def _keep_split(problem: Problem, stack: SplitStack) -> None:
    """No layout puts all of a stack on a device; if a reader has none that splits it, its scan alone keeps it split."""
    ports = [end for v in stack.values for end in problem.wiring.ends_of(v)]
    whole = all(_splits(problem.nodes[n], p, stack.axes, problem.mesh) for n, p in ports)
    for n, p in ports:
        node = problem.nodes[n]
        if whole or node.ports[p].use == (stack.op.id, stack.index):
            node.split = (*node.split, (p, stack.axes))
    if whole:
        problem.always_split.update(dict.fromkeys(stack.values, stack.axes))


def _splits(node: Node, port: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether the axes can split a port of a node."""
    shape, size = node.ports[port].value.shape, prod(map(mesh.axis, axes))
    dims = {at.dim for row in node.rows if isinstance(at := row.outputs[port], Split) and row.size % size == 0}
    stated = all(isinstance(node.pin.on(axis), Split) for axis in axes if axis in node.pin.axes)
    return stated and any(shape[int(dim)] % size == 0 for dim in dims)


def _boundary(program: TracedProgram, pins: Pins) -> Iterator[Node]:
    """One node per input, which also reads the output that replaces it; one per other output."""
    last = program.graph.ops[-1]
    replaced = {i: j for j, i in enumerate(pins.follows)}
    for i, value in enumerate(program.graph.inputs):
        j = replaced.get(i)
        output = None if j is None else last.inputs[j]
        uses = (Port(output, False, (last.id, j)),) if isinstance(output, Value) else ()  # type: ignore[arg-type]
        yield tied_node((Port(value, True), *uses), pins.inputs[i], f"input {program.inputs[i].path}")
    for j, value in _alone(program, pins):
        port = Port(value, False, (last.id, j))
        yield tied_node((port,), pins.outputs[j], f"output {program.outputs[j].path}")


def _alone(program: TracedProgram, pins: Pins) -> Iterator[tuple[int, Value]]:
    """The results that replace no argument, with their positions."""
    for j, value in enumerate(program.graph.returned):
        if isinstance(value, Value) and pins.follows[j] is None:
            yield j, value


def _graph_nodes(graph: Graph, kinds: OpClasses) -> Iterator[Node]:
    asked = partial_casts(graph)
    for op in graph.ops:
        if op.bodies:
            yield from LINKS[op.name](op, graph.trips)
            for body in op.bodies:
                yield from _graph_nodes(body, kinds)
        elif op.name == "constrain":
            ports = (Port(op.inputs[0], False, (op.id, 0)), Port(op.outputs[0], True))  # type: ignore[arg-type]
            yield tied_node(ports, op.params["layout"], f"constrain at {op.source}", True, graph.trips)
        elif op.id in asked:
            kind, rows = kinds.with_requested_rows(op)
            yield Node(kind, op, graph.trips, requested=tuple((row, asked[op.id]) for row in rows))
        elif op.name != "return":
            yield Node(kinds.of(op), op, graph.trips)


def _made_of_nothing(numbers: GraphIndex) -> Flags:
    """The values that cheap operations make of nothing, or of such values."""
    cheap = numbers.positions_named(CHEAP)
    left = np.where(
        cheap, np.diff(numbers.first_use), -1
    )  # per position, so many operands that are not known to be such
    found = np.zeros(len(numbers.values), dtype=np.bool_)
    new = np.flatnonzero(left == 0)
    while new.size:
        new = new[[not op.effects for at in new.tolist() if (op := numbers.ops[at])]]
        made = ranges(numbers.first_result[new], numbers.first_result[new + 1] - numbers.first_result[new])
        found[made] = True
        readers = numbers.use_position[numbers.uses_of(made)]
        np.subtract.at(left, readers, 1)
        new = unique_sorted(readers[left[readers] == 0])
    return found


def _require_rows(problem: Problem) -> None:
    """Every pinned axis of every node must leave it at least one row."""
    bad = []
    for node in problem.nodes:
        for axis, placed in node.pin.placements:
            if axis in problem.mesh.names and not any(placed is row.outputs[0] for row in node.rows):
                bad.append(f"{node.label}: {axis}={placed} is pinned, but no signature has it")
    if bad:
        raise PinError(
            faults("pins that cannot be met:", bad, "leave the axis out of the pin, or state another layout")
        )
