"""From a program and its pins to a planning problem: one variable per operation, whose states are its signatures.

A *node* is an operation, an input, an output or a link of a loop; a *port* is one of its tensors. Every value has one
port that defines it and any number that use it. On each mesh axis a node takes one row of its table; the placements at
both ends of a value decide which reshard steps lie between. A constant that is cheap to compute is never communicated:
every device computes its own.

Loops need no special treatment by the solver. A const of a loop body is a node that uses the outer value once and
defines the inner one: a reshard before it happens once, one after it in every iteration. A carry is one node that uses
the initial value and the body's result, and defines the body's input and the loop's result, all in one layout. It may
be partial: then it is reduced once, after the loop.

A sum is never moved across a cast that rounds, unless the step constrains the cast's result to a partial sum: that cast
has one more row, which it may take on the axes of the constraint.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from meshdsl.errors import PinError, faults
from meshdsl.ir.graph import Graph, Op, TracedProgram, Value
from meshdsl.ir.host import TRANSFERS, hosted_values
from meshdsl.ir.index import Flags, GraphIndex, graph_index, ops_named
from meshdsl.ir.manual import manual_values
from meshdsl.ir.solution import Pins
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, Partial, Split
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.costs.fixed_point import weight_of
from meshdsl.planner.costs.traffic import traffic_of
from meshdsl.planner.problem.low_bits import ExactUse, low_bit_formats
from meshdsl.planner.problem.ports import Wiring
from meshdsl.planner.problem.transfers import boundary_transfers, residual_nodes, transfer_work
from meshdsl.planner.problem.variables import (
    FREE,
    Node,
    OpClass,
    OpClasses,
    Port,
    Rows,
    keep_whole,
    loop_links,
    tied_node,
)
from meshdsl.rules.shard_map import manual_axes
from meshdsl.trace.passes.duplicate import CHEAP, partial_casts
from meshdsl.util.arrays import object_id, ranges, unique_sorted

# ---- Problem ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Problem:
    """The nodes of a program under pins, and their wiring.

    Args:
      op_classes: of the program's operations.
      wiring: of the nodes.
      unsent: mask of the values that are never communicated: constants, which every device computes for itself.
      always_split: by value id, mesh axes that split the value in every layout, along any dim.
      manual: by value id, mesh axes over which it is manual: replicated in every layout, as the planner sees it.
      formats: by value id, formats of fewer bits in which it may be sent.
      exact: uses of such values which are sent in full.
    """

    program: TracedProgram
    mesh: Mesh
    pins: Pins
    nodes: list[Node]
    op_classes: "OpClasses"
    wiring: "Wiring"
    unsent: Flags
    always_split: dict[int, tuple[str, ...]] = field(default_factory=dict)
    manual: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    formats: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    exact: Sequence[ExactUse] = ()

    @cached_property
    def index(self) -> GraphIndex:
        """Positions and numbers of the program."""
        return graph_index(self.program.graph)


# ---- Where a value can be partial ------------------------------------------------------------------------------------
# A forward dataflow analysis (Kildall 1973) from "nothing is partial" to the least fixed point, over a worklist of
# nodes in program order; loops put their first nodes on it again. Transfer functions are memoised per operation class.


_Ways = int  # reductions in which a tensor may be partial, a bit each
_Given = tuple[tuple[int, _Ways], ...]  # by port
_DEFINED = -1  # in place of the ways of a port that uses nothing
_BITS = {reduction: 1 << i for i, reduction in enumerate(REDUCTIONS)}


def remove_unreachable_partials(problem: Problem) -> None:
    """Removes rows with a partial placement that no producer can supply."""
    nodes, flow = problem.nodes, _Dataflow(problem.nodes, problem.wiring)
    n = flow.due.find(1)
    while n >= 0:
        flow.visit(n)
        later = flow.due.find(1, n + 1)
        n = later if later >= 0 else flow.due.find(1)
    for node, op_class in zip(nodes, flow.remaining, strict=True):
        node.op_class = op_class


class _Dataflow:
    """State of the analysis.

    Attributes:
      remaining: per node, the operation class with the rows that can occur.
      due: per node, 1 if it is on the worklist.
    """

    def __init__(self, nodes: Sequence[Node], wiring: Wiring) -> None:
        self._nodes, self._transfer = nodes, _Transfer()
        uses = wiring.port_producer != np.arange(wiring.port_producer.size)
        self._ports = list(pairwise((*wiring.first_port.tolist(), uses.size)))
        self._possible = [0] * len(wiring.producer) + [_DEFINED]  # by value; the last entry is for defining ports
        self._read = np.where(uses, wiring.value_of, len(wiring.producer)).tolist()
        self._value = wiring.value_of.tolist()
        self._begins = np.searchsorted(wiring.use_producers, wiring.producer).tolist()
        self._ends = np.searchsorted(wiring.use_producers, wiring.producer, side="right").tolist()
        self._consumers = wiring.node_of[wiring.uses].tolist()
        self.due = bytearray(node.op is None for node in nodes)
        first = {node.op_class: n for n, node in enumerate(nodes) if node.op}
        known = {op_class: self._apply(n) for op_class, n in first.items()}
        nothing = {node.op_class: (node.op_class, ()) for node in nodes if node.op is None}
        found = [known.get(node.op_class) or nothing[node.op_class] for node in nodes]
        self.remaining = [op_class for op_class, _ in found]
        for n, (_, given) in enumerate(found):
            if given and nodes[n].op:
                self._record(n, given)

    def visit(self, n: int) -> None:
        """Applies the transfer function of a node."""
        self.due[n] = 0
        self.remaining[n], given = self._apply(n)
        self._record(n, given)

    def _apply(self, n: int) -> "tuple[OpClass, _Given]":
        return self._transfer.of(self._nodes[n], [self._possible[v] for v in self._read[slice(*self._ports[n])]])

    def _record(self, n: int, given: _Given) -> None:
        """Records in which ways the results of a node may be partial, and puts their consumers on the worklist."""
        begin, _ = self._ports[n]
        for p, ways in given:
            value = self._value[begin + p]
            if self._possible[value] != ways:
                self._possible[value] = ways
                for consumer in self._consumers[self._begins[value] : self._ends[value]]:
                    self.due[consumer] = 1


class _Transfer:
    """Transfer functions: from the ways in which operands can be partial to remaining rows and the ways of results."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[OpClass, _Given]] = {}
        self._rows: dict[tuple[int, tuple[int, ...]], Rows] = {}
        self._classes: dict[tuple[OpClass, tuple[int, ...]], OpClass] = {}

    def of(self, node: Node, read: Sequence[_Ways]) -> tuple[OpClass, _Given]:
        """Applies that of one node. A pinned partial layout needs no partial operand: it is taken at its word."""
        pinned = node.pin is not FREE and bool(node.pin.partial())
        key = (node.op_class, pinned, *read)
        return self._known.get(key) or self._known.setdefault(key, self._compute(node.op_class, pinned, read))

    def _compute(self, op_class: OpClass, pinned: bool, read: Sequence[_Ways]) -> tuple[OpClass, _Given]:
        given: dict[int, _Ways] = {}
        removed = []
        for i, row in enumerate(op_class.rows):
            ends = list(_partial(row))
            needs = [read[p] & way for p, way in ends if read[p] != _DEFINED]
            if pinned or not needs or any(needs):
                given.update({p: given.get(p, 0) | way for p, way in ends if read[p] == _DEFINED})
            else:
                removed.append(i)
        return self._without(op_class, tuple(removed)), tuple(given.items())

    def _without(self, op_class: OpClass, removed: tuple[int, ...]) -> OpClass:
        """Returns the class without some rows: one object for equal arguments, and classes that share rows still do."""
        if not removed:
            return op_class
        rows_left = tuple(row for i, row in enumerate(op_class.rows) if i not in removed)
        rows = self._rows.setdefault((object_id(op_class.rows), removed), rows_left)
        return self._classes.setdefault((op_class, removed), OpClass(rows, op_class.shapes, op_class.work))


def _partial(row: Signature) -> Iterator[tuple[int, _Ways]]:
    """Yields the ports that are partial in a row, and the reduction."""
    return ((p, _BITS[at.reduction]) for p, at in enumerate(row.outputs) if isinstance(at, Partial))


# ---- Stacks of layers that must stay sharded -------------------------------------------------------------------------
# The user sharded a stack of layers by layer, and a loop reads it layer by layer:
#
#     params/layers  float32[layers, d, d]   pinned  x=S(0)
#     scan over params/layers: every device needs every layer, one per iteration
#
# Gathering the whole stack before the loop is one collective, so it would often be the fastest plan, but sharding by
# layer means that no device is to hold all of it. So the loop reads it split over the same axes along another dim: the
# stack is exchanged once, all-to-all, and each iteration gathers, or sums over, one layer. It is not whole during the
# reshard either, nor for other consumers that have rows which split it. Stacks of vectors are small, and free.


_MATRIX_RANK = 2  # dims of a layer from which on its stack must stay split


@dataclass(frozen=True)
class SplitStack:
    """A stack that must stay split.

    Args:
      path: of the input.
      axes: mesh axes that split its dim 0, by its pin.
      op: the scan that reads it, as operand ``index``.
      values: ids of the input and its casts on the way there.
    """

    path: str
    axes: tuple[str, ...]
    op: Op
    index: int
    values: tuple[int, ...]

    def stays_split(self, trees: Mapping[int, Sequence[ReshardStep]]) -> bool:
        """Whether no reshard step, not even an intermediate one, makes it whole on a device."""
        steps = (step for value in self.values for step in trees.get(value, ()))
        return all(isinstance(step.after.on(axis), Split) for step in steps for axis in self.axes)

    def __str__(self) -> str:
        over = ",".join(self.axes)
        return f"{self.path} stays split by layer over {over}: the scan at {self.op.source} never gathers all of it"


_PinnedStacks = Mapping[int, tuple[str, tuple[str, ...]]]  # by value id: path and axes


def split_stacks(program: TracedProgram, pins: Pins, mesh: Mesh) -> list[SplitStack]:
    """Returns the stacks that must stay split over their axes, along any dim."""
    if not ops_named(program.graph, "scan"):
        return []
    leaves = zip(program.inputs, program.graph.inputs, pins.inputs, strict=True)
    split = ((leaf, value, tuple(a for a in pin.splitting(0) if mesh.axis(a) > 1)) for leaf, value, pin in leaves)
    pinned = {value.id: (leaf.path, axes) for leaf, value, axes in split if axes}
    return list(_stacks_in(program.graph, pinned, mesh)) if pinned else []


def _stacks_in(graph: Graph, pinned: _PinnedStacks, mesh: Mesh) -> Iterator[SplitStack]:
    if not any(op.name == "scan" for op in graph.ops):
        return
    known = dict(pinned)
    for op in graph.ops:
        found = [known[x.id] for x in op.inputs if isinstance(x, Value) and x.id in known]
        known.update({v.id: found[0] for v in op.outputs if found and _is_elementwise(op, v)})
        if op.name == "scan":
            yield from _stacks_of_scan(op, known, mesh)


def _is_elementwise(op: Op, made: Value) -> bool:
    """Whether an operation leaves a stack a stack: a cast or a scaling."""
    return not op.bodies and [x.shape for x in op.inputs if isinstance(x, Value)] == [made.shape]


def _stacks_of_scan(op: Op, known: _PinnedStacks, mesh: Mesh) -> Iterator[SplitStack]:
    closed, (body,) = op.params["num_consts"] + op.params["num_carry"], op.bodies
    given = {i: known[x.id] for i, x in enumerate(op.inputs) if isinstance(x, Value) and x.id in known}
    for i, (path, axes) in given.items():
        layer = body.inputs[i].shape
        if i >= closed and len(layer) >= _MATRIX_RANK and any(n % prod(map(mesh.axis, axes)) == 0 for n in layer):
            yield SplitStack(path, axes, op, i, tuple(v for v, stack in known.items() if stack == (path, axes)))
    yield from _stacks_in(body, {body.inputs[i].id: stack for i, stack in given.items() if i < closed}, mesh)


# ---- Building a problem ----------------------------------------------------------------------------------------------


def make_problem(program: TracedProgram, mesh: Mesh, pins: Pins) -> Problem:
    """Returns the planning problem of a program.

    Raises:
      PinError: if a pin leaves a node without rows.
    """
    index, classes = (
        graph_index(program.graph),
        OpClasses(program.graph, traffic_of(program.graph, mesh.topology.fusion)),
    )
    hosted = hosted_values(program.graph)
    nodes = [*_boundary_nodes(program, pins), *_graph_nodes(program.graph, classes, mesh, hosted)]
    nodes += residual_nodes(program.graph)
    manual = manual_values(program.graph)
    formats, exact = low_bit_formats(program, pins)
    wiring, constants = Wiring(nodes, index), _constants(index)
    problem = Problem(program, mesh, pins, nodes, classes, wiring, constants, {}, manual, formats, exact)
    for node in nodes if manual else ():
        if node.op is not None:
            continue
        axes = dict.fromkeys(axis for port in node.linked for axis in manual.get(port.value.id, ()))
        keep_whole(node, [axis for axis in axes if mesh.axis(axis) > 1])
    for stack in split_stacks(program, pins, mesh):
        _keep_split(problem, stack)
    remove_unreachable_partials(problem)
    _require_rows(problem)
    return problem


def repin(problem: Problem, pins: Pins) -> Problem | None:
    """Returns the same problem under other pins, in which unconcerned nodes are the same objects.

    None if the pins change the structure: which outputs follow inputs, or which stacks must stay split.
    """
    before, program = problem.pins, problem.program
    if before.follows != pins.follows or any(split_stacks(program, p, problem.mesh) for p in (before, pins)):
        return None
    boundary = [*pins.inputs, *(pins.outputs[j] for j, _ in _separate_outputs(program, pins))]
    pairs = zip(problem.nodes, boundary, strict=False)
    ends = [node if node.pin.placements == pin.placements else replace(node, pin=pin) for node, pin in pairs]
    changed = replace(problem, pins=pins, nodes=[*ends, *problem.nodes[len(ends) :]])
    _require_rows(changed)
    return changed


def _keep_split(problem: Problem, stack: SplitStack) -> None:
    """Restricts the domains of a stack: split for all consumers if all have such rows, else for its scan alone."""
    ports = [end for v in stack.values for end in problem.wiring.ends_of(v)]
    everywhere = all(_can_split(problem.nodes[n], p, stack.axes, problem.mesh) for n, p in ports)
    for n, p in ports:
        node = problem.nodes[n]
        if everywhere or node.ports[p].use == (stack.op.id, stack.index):
            node.split = (*node.split, (p, stack.axes))
    if everywhere:
        problem.always_split.update(dict.fromkeys(stack.values, stack.axes))


def _can_split(node: Node, port: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether mesh axes can split a port of a node."""
    shape, size = node.ports[port].value.shape, prod(map(mesh.axis, axes))
    rows = [row for row in node.rows if row.size % size == 0 and not row.majors]
    dims = {at.dim for row in rows if isinstance(at := row.outputs[port], Split)}
    pinned = all(isinstance(node.pin.on(axis), Split) for axis in axes if axis in node.pin.axes)
    return pinned and any(shape[int(dim)] % size == 0 for dim in dims)


def _boundary_nodes(program: TracedProgram, pins: Pins) -> Iterator[Node]:
    """Yields a node per input, which also uses the output that replaces it, then one per other output."""
    last, loads, stores = program.graph.ops[-1], *boundary_transfers(program.graph)
    replaced = {i: j for j, i in enumerate(pins.follows)}

    def returned(j: int | None) -> tuple[Port, ...]:
        output = None if j is None else last.inputs[j]
        if not isinstance(output, Value) or j is None:
            return ()
        return (*stores.get(output.id, ()), Port(output, False, (last.id, j)))

    for i, value in enumerate(program.graph.inputs):
        ports = (Port(value, True), *loads.get(value.id, ()), *returned(replaced.get(i)))
        name = f"input {program.inputs[i].path}"
        yield tied_node(ports, pins.inputs[i], name, work=transfer_work(ports, loads, stores))
    for j, _ in _separate_outputs(program, pins):
        ports, name = returned(j), f"output {program.outputs[j].path}"
        yield tied_node(ports, pins.outputs[j], name, work=transfer_work(ports, loads, stores))


def _separate_outputs(program: TracedProgram, pins: Pins) -> Iterator[tuple[int, Value]]:
    """Yields the results that replace no argument, with their positions."""
    for j, value in enumerate(program.graph.returned):
        if isinstance(value, Value) and pins.follows[j] is None:
            yield j, value


def _graph_nodes(graph: Graph, classes: OpClasses, mesh: Mesh, hosted: Collection[int]) -> Iterator[Node]:
    requested, weight = partial_casts(graph), weight_of(graph.trips)
    for op in graph.ops:
        if op.bodies:
            yield from loop_links(op, weight, hosted)
            for body in op.bodies:
                yield from _graph_nodes(body, classes, mesh, hosted)
        elif op.name == "constrain":
            ports = (Port(op.inputs[0], False, (op.id, 0)), Port(op.outputs[0], True))  # type: ignore[arg-type]
            node = tied_node(ports, op.params["layout"], f"{op.called} at {op.source}", True, weight)
            yield replace(node, requested=_closed(op)) if op.params.get("closed") else node
        elif manual_axes(op) and op.name != "return":
            yield classes.manual_node(op, weight, mesh)
        elif op.id in requested:
            op_class, rows = classes.with_requested_rows(op)
            yield Node(op_class, op, weight, requested=tuple((row, requested[op.id]) for row in rows))
        elif op.name not in ("return", *TRANSFERS):
            yield Node(classes.of(op), op, weight)


def _closed(op: Op) -> tuple[tuple[Signature, tuple[str, ...]], ...]:
    """The rows that split dims of a constraint which no other axes may split, with the axes that do."""
    layout: Layout = op.params["layout"]
    return tuple((Signature((), (Split(d),) * 2), layout.splitting(d)) for d in op.params["closed"])


def _constants(index: GraphIndex) -> Flags:
    """Returns the mask of the values that cheap operations compute from nothing, or from such values."""
    cheap = index.positions_named(CHEAP)
    left = np.where(
        cheap, np.diff(index.first_use), -1
    )  # per position, operands not known to be constant; -1: not cheap
    found = np.zeros(len(index.values), dtype=np.bool_)
    new = np.flatnonzero(left == 0)
    while new.size:
        new = new[[not op.effects for at in new.tolist() if (op := index.ops[at])]]
        made = ranges(index.first_result[new], index.first_result[new + 1] - index.first_result[new])
        found[made] = True
        consumers = index.use_position[index.uses_of(made)]
        np.subtract.at(left, consumers, 1)
        new = unique_sorted(consumers[left[consumers] == 0])
    return found


def _require_rows(problem: Problem) -> None:
    """Raises PinError unless every pinned axis of every node leaves it at least one row."""
    bad = []
    for node in problem.nodes:
        for axis, placed in node.pin.placements:
            if axis in problem.mesh.names and not any(placed is row.outputs[0] for row in node.rows):
                bad.append(f"{node.label}: {axis}={placed} is pinned, but no signature has it")
    if bad:
        raise PinError(faults("these pins cannot be met:", bad, "leave the axis out of the pin, or pin another layout"))
