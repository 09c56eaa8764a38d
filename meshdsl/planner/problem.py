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

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from meshdsl.errors import PinError, faults
from meshdsl.ir import Graph, Program, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.planner.arrays import occurring, stretches
from meshdsl.planner.kinds import Kinds
from meshdsl.planner.links import LINKS
from meshdsl.planner.node import Node, Port, Problem, same_layout
from meshdsl.planner.numbering import Flags, Numbering, numbering_of
from meshdsl.planner.reach import drop_unreachable_partials
from meshdsl.planner.solution import Pins
from meshdsl.planner.stacks import Stack, split_stacks
from meshdsl.planner.wiring import Wiring
from meshdsl.trace.casts import asked_casts
from meshdsl.trace.clone import CHEAP


def make_problem(program: Program, mesh: Mesh, pins: Pins) -> Problem:
    """The planning problem of a program, with rows that cannot occur left out."""
    numbers, kinds = numbering_of(program.graph), Kinds(program.graph)
    nodes = [*_boundary(program, pins), *_graph_nodes(program.graph, kinds)]
    problem = Problem(program, mesh, pins, nodes, kinds, Wiring(nodes, numbers), _made_of_nothing(numbers))
    for stack in split_stacks(program, pins, mesh):
        _keep_split(problem, stack)
    drop_unreachable_partials(problem)
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


def _keep_split(problem: Problem, stack: Stack) -> None:
    """No layout puts all of a stack on a device; if a reader has none that splits it, its scan alone keeps it split."""
    ports = [end for v in stack.values for end in problem.wiring.ends(v)]
    whole = all(_splits(problem.nodes[n], p, stack.axes, problem.mesh) for n, p in ports)
    for n, p in ports:
        node = problem.nodes[n]
        if whole or node.ports[p].reader == (stack.op.id, stack.index):
            node.split = (*node.split, (p, stack.axes))
    if whole:
        problem.apart.update(dict.fromkeys(stack.values, stack.axes))


def _splits(node: Node, port: int, axes: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether the axes can split a port of a node."""
    shape, size = node.ports[port].value.shape, prod(map(mesh.axis, axes))
    dims = {at.dim for row in node.rows if isinstance(at := row.outputs[port], Split) and row.size % size == 0}
    stated = all(isinstance(node.pin.on(axis), Split) for axis in axes if axis in node.pin.axes)
    return stated and any(shape[int(dim)] % size == 0 for dim in dims)


def _boundary(program: Program, pins: Pins) -> Iterator[Node]:
    """One node per input, which also reads the output that replaces it; one per other output."""
    last = program.graph.ops[-1]
    replaced = {i: j for j, i in enumerate(pins.follows)}
    for i, value in enumerate(program.graph.inputs):
        j = replaced.get(i)
        output = None if j is None else last.inputs[j]
        uses = (Port(output, False, (last.id, j)),) if isinstance(output, Value) else ()  # type: ignore[arg-type]
        yield same_layout((Port(value, True), *uses), pins.inputs[i], f"input {program.inputs[i].path}")
    for j, value in _alone(program, pins):
        port = Port(value, False, (last.id, j))
        yield same_layout((port,), pins.outputs[j], f"output {program.outputs[j].path}")


def _alone(program: Program, pins: Pins) -> Iterator[tuple[int, Value]]:
    """The results that replace no argument, with their positions."""
    for j, value in enumerate(program.graph.returned):
        if isinstance(value, Value) and pins.follows[j] is None:
            yield j, value


def _graph_nodes(graph: Graph, kinds: Kinds) -> Iterator[Node]:
    asked = asked_casts(graph)
    for op in graph.ops:
        if op.bodies:
            yield from LINKS[op.name](op, graph.trips)
            for body in op.bodies:
                yield from _graph_nodes(body, kinds)
        elif op.name == "constrain":
            ports = (Port(op.inputs[0], False, (op.id, 0)), Port(op.outputs[0], True))  # type: ignore[arg-type]
            yield same_layout(ports, op.params["layout"], f"constrain at {op.source}", True, graph.trips)
        elif op.id in asked:
            kind, rows = kinds.asking(op)
            yield Node(kind, op, graph.trips, asked=tuple((row, asked[op.id]) for row in rows))
        elif op.name != "return":
            yield Node(kinds.of(op), op, graph.trips)


def _made_of_nothing(numbers: Numbering) -> Flags:
    """The values that cheap operations make of nothing, or of such values."""
    cheap = numbers.named(CHEAP)
    left = np.where(cheap, np.diff(numbers.first), -1)  # per position, so many operands that are not known to be such
    found = np.zeros(len(numbers.values), dtype=np.bool_)
    new = np.flatnonzero(left == 0)
    while new.size:
        new = new[[not op.effects for at in new.tolist() if (op := numbers.ops[at])]]
        made = stretches(numbers.makes[new], numbers.makes[new + 1] - numbers.makes[new])
        found[made] = True
        readers = numbers.at[numbers.readers(made)]
        np.subtract.at(left, readers, 1)
        new = occurring(readers[left[readers] == 0])
    return found


def _require_rows(problem: Problem) -> None:
    """Every pinned axis of every node must leave it at least one row."""
    bad = []
    for node in problem.nodes:
        for axis, placed in node.pin.placements:
            if axis in problem.mesh.names and not any(placed is row.outputs[0] for row in node.rows):
                bad.append(f"{node.what}: {axis}={placed} is pinned, but no signature has it")
    if bad:
        raise PinError(
            faults("pins that cannot be met:", bad, "leave the axis out of the pin, or state another layout")
        )
