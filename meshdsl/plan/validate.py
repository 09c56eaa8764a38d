"""Whether what a plan says of its program can be run: by the rules, loops and moves of this meshdsl.

A plan that was made by another version may rely on a signature that is no longer listed, as it
was found to be wrong, or be priced otherwise. So before a given plan runs,

* every operation has one signature of its rule on every axis, and what its operands and results
  lie as is what the signature says; the two sides of a loop's carry, of a constant, of an output
  that replaces an input agree;
* every layout divides its tensor, and every layout that somebody reads is the value's own, or made
  by moves of the table of moves at their present prices;
* the collectives that the plan lists are those that follow, and it fits the memory with what is donated now.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import combinations

from meshdsl.errors import PlanFileError, faults, shortened
from meshdsl.ir.graph import Leaf, TracedProgram, Value, walk
from meshdsl.ir.solution import Pins, Solution
from meshdsl.ir.text import fingerprint
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Placement, Split
from meshdsl.layouts.reshard import ReshardEdge, fits, reshard_edges
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.layouts.topology import Topology
from meshdsl.plan.build import collectives_of
from meshdsl.plan.types import Array, Collective, PlanData
from meshdsl.planner.liveness.peak import Liveness
from meshdsl.planner.liveness.timeline import copy_timeline
from meshdsl.planner.problem.build import Problem, make_problem
from meshdsl.planner.problem.variables import Node, Port
from meshdsl.util.text import bytes_text

# ---- Sound -----------------------------------------------------------------------------------------------------------


def check_runnable(
    plan: PlanData, program: TracedProgram, donated: frozenset[int] = frozenset(), memory: float | None = None
) -> None:
    """Raise PlanFileError, listing what does not hold, unless ``plan`` can run as a plan of ``program``.

    Args:
      donated: indices of inputs whose memory the step may reuse, perhaps others than when it was planned.
      memory: limit in bytes per device; None takes the topology's.
    """
    pins = _pins(plan)
    problem = make_problem(program, plan.mesh, pins)
    rows = list(_signatures(problem, plan.solution)) or list(_moves(problem, plan.solution))
    if not rows:
        rows += _collectives(plan.collectives, collectives_of(program, plan.solution))
        rows += _memory(plan, program, donated, plan.topology.memory if memory is None else memory)
    if rows:
        title = f"the plan of {plan.name} does not hold for {program.name}, as meshdsl knows its operations now:"
        raise PlanFileError(faults(title, shortened(rows), "plan again without plan=, and save that"))


def _pins(plan: PlanData) -> Pins:
    """No layouts, only which output replaces which input: the plan says all else."""
    places = {array.path: i for i, array in enumerate(plan.inputs)}
    follows = tuple(places[array.follows] if array.follows else None for array in plan.outputs)
    return Pins((Layout(),) * len(plan.inputs), (Layout(),) * len(plan.outputs), follows)


def _signatures(problem: Problem, solution: Solution) -> Iterator[str]:
    tables: dict[int, set[Signature]] = {}
    for node in problem.nodes:
        layouts = [_layout(port, solution) for port in node.ports]
        known = [layout for layout in layouts if layout is not None]
        if len(known) < len(layouts):
            yield f"{node.what}: the plan has no layout for one of its tensors"
            continue
        if id(node.rows) not in tables:
            tables[id(node.rows)] = {_plain(row, row.outputs) for row in node.rows}
        yield from (f"{node.what}: {text}" for text in _node(node, known, tables[id(node.rows)], solution))


def _layout(port: Port, solution: Solution) -> Layout | None:
    if port.defines or port.reader is None:
        return solution.layouts.get(port.value.id)
    return solution.uses.get(port.reader)


def _node(node: Node, layouts: list[Layout], table: set[Signature], solution: Solution) -> Iterator[str]:
    wrong = [text for i in range(len(solution.mesh.names)) for text in _axis(node, i, layouts, table, solution)]
    yield from wrong
    for port, layout in zip(node.ports, layouts, strict=True):
        if not wrong and not fits(layout, port.value.shape, solution.mesh):
            yield f"{layout} does not divide a tensor of shape {list(port.value.shape)}"
    orders = {pair for layout in layouts for pair in _orders(layout)}
    swapped = [(a, b) for a, b in orders if a < b and (b, a) in orders]
    yield from (f"its tensors are split by {a} and {b} in different orders" for a, b in swapped)


def _axis(node: Node, i: int, layouts: list[Layout], table: set[Signature], solution: Solution) -> Iterator[str]:
    axis = solution.mesh.names[i]
    placed = tuple(layout.on(axis) for layout in layouts)
    row = _row(node, i, placed, solution)
    if row is None or row not in table or not node.takes(row, axis):
        ends = zip(node.ports, placed, strict=True)
        text = ", ".join(f"{'to' if port.defines else 'from'} {p}" for port, p in ends)
        yield f"no signature on {axis} leads {text}"


def _row(node: Node, axis: int, placed: tuple[Placement, ...], solution: Solution) -> Signature | None:
    """The row that the node takes on an axis, None if that is not how its tensors lie."""
    if node.op is None:
        return Signature((), placed)
    rows, tensors = solution.rows.get(node.op.id, ()), (*node.op.inputs, *node.op.outputs)
    if axis >= len(rows) or len((*rows[axis].inputs, *rows[axis].outputs)) != len(tensors):
        return None
    both = zip((*rows[axis].inputs, *rows[axis].outputs), tensors, strict=True)
    said = tuple(p for p, x in both if isinstance(x, Value))
    return _plain(rows[axis], said) if said == placed else None


def _plain(row: Signature, placed: tuple[Placement, ...]) -> Signature:
    """A row to compare: all placements in one, exchanges without their ports."""
    return Signature((), placed, row.size, tuple(replace(e, port=0) for e in row.collectives))


def _orders(layout: Layout) -> Iterator[tuple[str, str]]:
    """Pairs of axes that split one dim, major first."""
    splits = [(axis, p) for axis, p in layout.placements if isinstance(p, Split)]
    return ((a, b) for (a, p), (b, q) in combinations(splits, 2) if p is q)


def _moves(problem: Problem, solution: Solution) -> Iterator[str]:
    """Moves are those of the table, and lead to every layout that somebody reads."""
    for tensor in problem.numbers.values:
        value, made = tensor.id, {solution.layouts[tensor.id]}
        for move in solution.trees.get(value, ()):
            possible = _arcs(move.before, len(tensor.shape), solution.mesh)
            if move.before not in made or all(arc.of(tensor.bytes) != move for arc in possible):
                yield f"value {value}: no {move.kind} from {move.before} to {move.after} of {move.bytes} bytes"
            made.add(move.after)
        for m, q in problem.wiring.ends(value)[1:]:
            read = _layout(problem.nodes[m].ports[q], solution)
            if read not in made:
                yield f"{problem.nodes[m].what}: reads value {value} as {read}, which no move makes"


@cache
def _arcs(layout: Layout, rank: int, mesh: Mesh) -> tuple[ReshardEdge, ...]:
    return tuple(reshard_edges(layout, rank, mesh))


def _collectives(planned: Sequence[Collective], found: Sequence[Collective]) -> Iterator[str]:
    if len(planned) != len(found):
        yield f"collectives: {len(planned)} in the plan, {len(found)} follow from its layouts"
        return
    for i, (a, b) in enumerate(zip(planned, found, strict=True)):
        if _sent(a) != _sent(b):
            said, follows = (" ".join(map(str, _sent(c))) for c in (a, b))
            yield f"collectives[{i}]: {said} in the plan, {follows} follows"


def _sent(c: Collective) -> tuple[object, ...]:
    return c.kind, ",".join(c.axes), c.bytes, c.trips, c.seconds


def _memory(plan: PlanData, program: TracedProgram, donated: frozenset[int], limit: float) -> Iterator[str]:
    s = plan.solution
    peak = Liveness(copy_timeline(program.graph, s.mesh, s.layouts, s.uses, s.trees), donated).peak().bytes
    if peak > limit:
        said, allowed = bytes_text(plan.memory), bytes_text(limit)
        yield f"memory: {bytes_text(peak)} per device with what is donated here, {said} in the plan, {allowed} allowed"


# ---- Match -----------------------------------------------------------------------------------------------------------
# Whether a loaded plan is a plan of this program: on this mesh and topology, within this memory, with these pins.


def check_same_program(
    plan: PlanData, program: TracedProgram, mesh: Mesh, pins: Pins, memory: float | None = None
) -> None:
    """Raise PlanFileError, listing what differs, unless ``plan`` was made for all of these.

    Args:
      memory: limit in bytes per device; None takes the topology's, as planning does.
    """
    rows = [*_differences(plan, program, mesh, pins), *_memory_limit(plan, mesh, memory)]
    if rows:
        title = f"the plan of {plan.name} was made for something else than this call of {program.name}:"
        raise PlanFileError(faults(title, shortened(rows), "plan again without plan=, and save that"))


def _differences(plan: PlanData, program: TracedProgram, mesh: Mesh, pins: Pins) -> Iterator[str]:
    if tuple(plan.mesh) != tuple(mesh):
        yield f"mesh: {plan.mesh} in the plan, {mesh} here"
    yield from _topology(plan.topology, mesh.topology)
    if plan.pipeline != program.pipeline:
        yield f"pipeline: {plan.pipeline or 'none'} in the plan, {program.pipeline or 'none'} here"
    rows = [*_leaves("input", plan.inputs, program.inputs), *_leaves("output", plan.outputs, program.outputs)]
    yield from rows
    if not rows and fingerprint(program) != plan.fingerprint:
        yield from _operations(plan, program)
    yield from _pinned("input", plan.inputs, program.inputs, pins.inputs)
    yield from _pinned("output", plan.outputs, program.outputs, pins.outputs)


def _topology(planned: Topology, given: Topology) -> Iterator[str]:
    """A plan chosen for other costs is not the plan that would be chosen here, and its seconds mean nothing here."""
    kept = "parallelize over plan.mesh to keep the plan's"
    if planned.name != given.name:
        yield f"topology: {planned.name} in the plan, {given.name} here; {kept}"
        return
    for field in fields(Topology):
        a, b = getattr(planned, field.name), getattr(given, field.name)
        if a != b:
            yield f"topology {given.name}: {field.name} is {a} in the plan, {b} here; {kept}"


def _memory_limit(plan: PlanData, mesh: Mesh, memory: float | None) -> Iterator[str]:
    limit = mesh.topology.memory if memory is None else memory
    if plan.memory > limit:
        said = f"topology {mesh.topology.name} has" if memory is None else "memory= allows"
        yield f"memory: {bytes_text(plan.memory)} per device in the plan, {said} {bytes_text(limit)} here"


def _leaves(noun: str, planned: Sequence[Array], given: Sequence[Leaf]) -> Iterator[str]:
    a = {array.path: array.type for array in planned}
    b = {leaf.path: leaf.type for leaf in given}
    for path in dict.fromkeys((*a, *b)):
        if a.get(path) != b.get(path):
            yield f"{noun} {path}".rstrip() + f": {a.get(path, 'absent')} in the plan, {b.get(path, 'absent')} here"


def _operations(plan: PlanData, program: TracedProgram) -> Iterator[str]:
    counts = dict.fromkeys(plan.operations, 0)
    for _, op in walk(program.graph):
        counts[op.name] = counts.get(op.name, 0) + 1
    changed = [name for name in sorted(counts) if counts[name] != plan.operations.get(name, 0)]
    for name in changed:
        yield f"operations: {plan.operations.get(name, 0)} {name} in the plan, {counts[name]} here"
    if not changed:
        yield "operations: as many of each kind as in the plan, with other operands or parameters"


def _pinned(noun: str, planned: Sequence[Array], given: Sequence[Leaf], pins: Sequence[Layout]) -> Iterator[str]:
    at = {array.path: array.layout for array in planned}
    for leaf, pin in zip(given, pins, strict=True):
        layout = at.get(leaf.path)
        if layout is not None and any(layout.on(axis) is not pin.on(axis) for axis in pin.axes):
            yield f"{noun} {leaf.path}".rstrip() + f": {layout} in the plan, pinned to {pin} here"
