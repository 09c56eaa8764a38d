"""Whether a plan that the user gives is valid for the program at hand.

``check_same_program`` compares what the plan was made for: mesh, topology, pipeline, arguments and results, fingerprint
of the program, pins and memory limit.

``check_runnable`` checks the solution itself. A plan of another version may rely on a signature that has been found
wrong and is no longer listed, or be priced with other costs. The plan is valid if

* every operation has one signature of its rule on every mesh axis, its operands and results have the layouts of that
  signature, and tied layouts agree: both sides of a loop's carry, a constant, an output and the input it aliases;
* every layout divides its tensor, and every layout in which a value is used is the value's own or the target of
  reshard steps, which exist and have their present price;
* the listed collectives are those that follow from the layouts, and the peak memory with the arguments that are
  donated now is within the limit.

Both raise one PlanFileError that lists all faults.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from math import prod

import jax

from meshdsl.errors import PlanFileError, faults, shortened
from meshdsl.ir.graph import Leaf, TracedProgram, Value, sent_itemsize, walk
from meshdsl.ir.prefetch import prefetchable
from meshdsl.ir.solution import Pins, Prefetch, Solution
from meshdsl.ir.text import fingerprint
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import Rounding
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, Split
from meshdsl.layouts.reshard import ReshardEdge, reshard_edges
from meshdsl.layouts.sharding_rule import Signature, divides
from meshdsl.layouts.topology import HOST, Topology
from meshdsl.plan.build import collectives_of
from meshdsl.plan.prefetch import peak_of
from meshdsl.plan.rings import ring_faults
from meshdsl.plan.types import Array, Collective, PlanData
from meshdsl.planner.buckets import bucket_faults
from meshdsl.planner.problem.build import Problem, make_problem
from meshdsl.planner.problem.variables import Node, Port
from meshdsl.util.text import bytes_text, seconds_text

_Rows = Mapping[Signature, Signature]  # of a node, by what plans say of them
_REMEDY = "plan again without plan= and save the new plan"


# ---- The same program ------------------------------------------------------------------------------------------------


def check_same_program(
    plan: PlanData, program: TracedProgram, mesh: Mesh, pins: Pins, memory: float | None = None
) -> None:
    """Raises PlanFileError, with all differences, unless ``plan`` was made for this program and these conditions.

    Args:
      plan: the plan given.
      program: program of this call.
      mesh: mesh of this call.
      pins: pins of this call; the plan's layouts have to satisfy them.
      memory: limit in bytes per device; None takes the topology's, as planning does.
    """
    rows = [*_differences(plan, program, mesh, pins), *_memory_limit(plan, mesh, memory)]
    if rows:
        title = f"the plan of {plan.name} does not match this call of {program.name}:"
        raise PlanFileError(faults(title, shortened(rows), _REMEDY))


def _differences(plan: PlanData, program: TracedProgram, mesh: Mesh, pins: Pins) -> Iterator[str]:
    if plan.compiled:
        yield f"it is no plan, but what a program sends that {plan.compiled} compiled, as md.inspect has read it"
        return
    if tuple(plan.mesh) != tuple(mesh):
        yield f"mesh: {plan.mesh} in the plan, {mesh} here"
    yield from _topology_differences(plan.topology, mesh.topology, plan.host is not None)
    if plan.pipeline != program.pipeline:
        yield f"pipeline: {plan.pipeline or 'none'} in the plan, {program.pipeline or 'none'} here"
    rows = [
        *_boundary_differences("input", plan.inputs, program.inputs),
        *_boundary_differences("output", plan.outputs, program.outputs),
    ]
    yield from rows
    if not rows and fingerprint(program) != plan.fingerprint:
        yield from _operation_differences(plan, program)
    yield from _violated_pins("input", plan.inputs, program.inputs, pins.inputs)
    yield from _violated_pins("output", plan.outputs, program.outputs, pins.outputs)
    yield from _violated_memories(plan, program, pins)


# facts that earlier files lack, and that no plan runs differently for
_SIMULATED = ("asynchronous", "beside_products", "merges", "across_loops", "contention")


def _topology_differences(planned: Topology, given: Topology, is_hosting: bool) -> Iterator[str]:
    """A plan for other costs is not the plan that would be chosen here, and its seconds mean nothing here."""
    remedy = "parallelize over plan.mesh to keep the plan's"
    if planned.name != given.name:
        yield f"topology: {planned.name} in the plan, {given.name} here; {remedy}"
        return
    for field in fields(Topology):
        a, b = getattr(planned, field.name), getattr(given, field.name)
        if a != b and field.name not in (_SIMULATED if is_hosting else (*_SIMULATED, *HOST)):
            yield f"topology {given.name}: {field.name} is {a} in the plan, {b} here; {remedy}"


def _boundary_differences(noun: str, planned: Sequence[Array], given: Sequence[Leaf]) -> Iterator[str]:
    a = {array.path: array.type for array in planned}
    b = {leaf.path: leaf.type for leaf in given}
    for path in dict.fromkeys((*a, *b)):
        if a.get(path) != b.get(path):
            yield f"{noun} {path}".rstrip() + f": {a.get(path, 'absent')} in the plan, {b.get(path, 'absent')} here"


def _operation_differences(plan: PlanData, program: TracedProgram) -> Iterator[str]:
    counts = dict.fromkeys(plan.operations, 0)
    for _, op in walk(program.graph):
        counts[op.name] = counts.get(op.name, 0) + 1
    changed = [name for name in sorted(counts) if counts[name] != plan.operations.get(name, 0)]
    for name in changed:
        yield f"operations: {plan.operations.get(name, 0)} {name} in the plan, {counts[name]} here"
    if not changed:
        yield "operations: equal in number to the plan's, with other operands or parameters"
    if plan.jax not in ("", jax.__version__):
        yield f"the plan is of jax {plan.jax}, this is jax {jax.__version__}, which may trace other operations"


def _violated_pins(noun: str, planned: Sequence[Array], given: Sequence[Leaf], pins: Sequence[Layout]) -> Iterator[str]:
    layouts = {array.path: array.layout for array in planned}
    for leaf, pin in zip(given, pins, strict=True):
        layout = layouts.get(leaf.path)
        if layout is not None and any(layout.on(axis) is not pin.on(axis) for axis in pin.axes):
            yield f"{noun} {leaf.path}".rstrip() + f": {layout} in the plan, pinned to {pin} here"


def _violated_memories(plan: PlanData, program: TracedProgram, pins: Pins) -> Iterator[str]:
    hosted = {array.path for array in plan.inputs if array.layout.memory == "host"}
    for i, leaf in enumerate(program.inputs):
        if i in pins.hosted and leaf.path not in hosted:
            yield f"input {leaf.path}: on the device in the plan, pinned to @host here"
        elif i in pins.on_device and leaf.path in hosted:
            yield f"input {leaf.path}: @host in the plan, pinned to @device here"


def _memory_limit(plan: PlanData, mesh: Mesh, memory: float | None) -> Iterator[str]:
    limit = mesh.topology.memory if memory is None else memory
    if plan.memory > limit:
        source = f"topology {mesh.topology.name} has" if memory is None else "memory= allows"
        yield f"memory: {bytes_text(plan.memory)} per device in the plan, {source} {bytes_text(limit)} here"


# ---- A runnable solution ---------------------------------------------------------------------------------------------


def check_runnable(
    plan: PlanData, program: TracedProgram, donated: frozenset[int] = frozenset(), memory: float | None = None
) -> None:
    """Raises PlanFileError, with all faults, unless ``plan`` is valid for ``program`` under today's rules and costs.

    Args:
      plan: the plan given.
      program: program of this call.
      donated: indices of the inputs whose memory the step may reuse, which need not be those of the plan.
      memory: limit in bytes per device; None takes the topology's.
    """
    problem = make_problem(program, plan.mesh, _aliases(plan))
    rows = list(_signature_faults(problem, plan.solution)) or list(_step_faults(problem, plan.solution))
    rows = rows or list(_prefetch_faults(program, plan.solution))
    if not rows:
        rows += [*bucket_faults(program.graph, plan.solution), *ring_faults(program, plan.solution)]
    if not rows:
        rows += _collective_faults(plan.collectives, collectives_of(program, plan.solution))
        rows += _memory_faults(plan, program, donated, plan.topology.memory if memory is None else memory)
    if rows:
        title = f"the plan of {plan.name} is not valid for {program.name} under the rules and costs of this meshdsl:"
        raise PlanFileError(faults(title, shortened(rows), _REMEDY))


def _aliases(plan: PlanData) -> Pins:
    """Pins without layouts: only which output aliases which input; everything else is the plan's to say."""
    index = {array.path: i for i, array in enumerate(plan.inputs)}
    follows = tuple(index[array.follows] if array.follows else None for array in plan.outputs)
    return Pins((Layout(),) * len(plan.inputs), (Layout(),) * len(plan.outputs), follows)


def _signature_faults(problem: Problem, solution: Solution) -> Iterator[str]:
    tables: dict[int, _Rows] = {}  # by the identity of the list of a node's rows, which equal nodes share
    for node in problem.nodes:
        layouts = [_layout(port, solution) for port in node.ports]
        known = [layout for layout in layouts if layout is not None]
        if len(known) < len(layouts):
            yield f"{node.label}: the plan has no layout for one of its tensors"
            continue
        if id(node.rows) not in tables:
            tables[id(node.rows)] = {_comparable(row, row.outputs): row for row in node.rows}
        yield from (f"{node.label}: {text}" for text in _node_faults(node, known, tables[id(node.rows)], solution))


def _layout(port: Port, solution: Solution) -> Layout | None:
    if port.defines or port.use is None:
        return solution.layouts.get(port.value.id)
    return solution.uses.get(port.use)


def _node_faults(node: Node, layouts: list[Layout], table: _Rows, solution: Solution) -> Iterator[str]:
    wrong = [text for i in range(len(solution.mesh.names)) for text in _axis_faults(node, i, layouts, table, solution)]
    yield from wrong or _indivisible_dims(node, layouts, table, solution)
    orders = {pair for layout in layouts for pair in _nesting(layout)}
    swapped = [(a, b) for a, b in orders if a < b and (b, a) in orders]
    yield from (f"its tensors are split over {a} and {b} in different orders" for a, b in swapped)


def _indivisible_dims(node: Node, layouts: list[Layout], table: _Rows, solution: Solution) -> Iterator[str]:
    """Yields a text per tensor of which a dim, or a factor of it, does not divide; the node's rows are in the table."""
    rows: dict[str, Signature] = {}
    for i, axis in enumerate(solution.mesh.names):
        row = _row(node, i, tuple(layout.on(axis) for layout in layouts), solution)
        assert row is not None
        rows[axis] = table[row]
    for p, (port, layout) in enumerate(zip(node.ports, layouts, strict=True)):
        splits = (
            [(solution.mesh.axis(a), rows[a].part(p)) for a in layout.splitting(d)]
            for d in range(len(port.value.shape))
        )
        if not all(map(divides, port.value.shape, splits)):
            yield f"{layout} does not divide a tensor of shape {list(port.value.shape)}"


def _axis_faults(node: Node, i: int, layouts: list[Layout], table: _Rows, solution: Solution) -> Iterator[str]:
    axis = solution.mesh.names[i]
    placed = tuple(layout.on(axis) for layout in layouts)
    row = _row(node, i, placed, solution)
    if row is None or row not in table or not node.allows(row, axis):
        ends = list(zip(node.ports, placed, strict=True))
        operands = ", ".join(str(p) for port, p in ends if not port.defines)
        results = ", ".join(str(p) for port, p in ends if port.defines)
        yield f"no signature on {axis} is ({operands}) -> ({results})"


def _row(node: Node, axis: int, placed: tuple[Placement, ...], solution: Solution) -> Signature | None:
    """The node's row on a mesh axis; None if the plan has none, or its tensors are placed otherwise."""
    if node.op is None:
        return Signature((), placed)
    rows, tensors = solution.rows.get(node.op.id, ()), (*node.op.inputs, *node.op.outputs)
    if axis >= len(rows) or len((*rows[axis].inputs, *rows[axis].outputs)) != len(tensors):
        return None
    both = zip((*rows[axis].inputs, *rows[axis].outputs), tensors, strict=True)
    signed = tuple(p for p, x in both if isinstance(x, Value))
    return _comparable(rows[axis], signed) if signed == placed else None


def _comparable(row: Signature, placed: tuple[Placement, ...]) -> Signature:
    """A row with all its placements in one tuple, and with exchanges without their ports."""
    return Signature((), placed, row.size, tuple(replace(e, port=0) for e in row.collectives))


def _nesting(layout: Layout) -> Iterator[tuple[str, str]]:
    """Pairs of axes that split the same dim, outer axis first."""
    splits = [(axis, p) for axis, p in layout.placements if isinstance(p, Split)]
    return ((a, b) for (a, p), (b, q) in combinations(splits, 2) if p is q)


def _step_faults(problem: Problem, solution: Solution) -> Iterator[str]:
    """Reshard steps that do not exist at their price, and uses in layouts that no step produces."""
    for tensor in problem.index.values:
        value, available = tensor.id, {solution.layouts[tensor.id]}
        size = prod(tensor.shape) * sent_itemsize(tensor.itemsize)
        formats = problem.formats.get(value, ())
        rounding = Rounding(prod(tensor.shape), tensor.itemsize, formats) if formats else None
        for step in solution.trees.get(value, ()):
            possible = _edges(step.before, len(tensor.shape), solution.mesh)
            if step.before not in available or all(
                step not in (edge.of(size), edge.of(size, rounding)) for edge in possible
            ):
                price = f"{step.bytes} bytes in {seconds_text(step.seconds)}"
                yield f"value {value}: no {step.kind} from {step.before} to {step.after} of {price}"
            if any(step.after.on(axis) is not B for axis in problem.manual.get(value, ())):
                yield f"value {value}: {step.after} cuts what the user's shard_map divides"
            available.add(step.after)
        for m, q in problem.wiring.ends_of(value)[1:]:
            used = _layout(problem.nodes[m].ports[q], solution)
            if used not in available:
                yield f"{problem.nodes[m].label}: uses value {value} as {used}, which no reshard step produces"


@cache
def _edges(layout: Layout, rank: int, mesh: Mesh) -> tuple[ReshardEdge, ...]:
    return tuple(reshard_edges(layout, rank, mesh))


def _prefetch_faults(program: TracedProgram, solution: Solution) -> Iterator[str]:
    """Loops that cannot send ahead or behind what the plan says."""
    possible = prefetchable(program.graph, solution)
    for op, chosen in solution.prefetch.items():
        can = possible.get(op, Prefetch())
        for word, noun, a, b in (
            ("ahead", "input", chosen.ahead, can.ahead),
            ("behind", "result", chosen.behind, can.behind),
        ):
            for i in sorted({*a} - {*b}):
                yield f"loop {op}: {noun} {i} of its body cannot be sent {word}"


def _collective_faults(planned: Sequence[Collective], derived: Sequence[Collective]) -> Iterator[str]:
    if len(planned) != len(derived):
        yield f"collectives: {len(planned)} in the plan, {len(derived)} follow from its layouts"
        return
    for i, (a, b) in enumerate(zip(planned, derived, strict=True)):
        if _sent(a) != _sent(b):
            listed, follows = (" ".join(map(str, _sent(c))) for c in (a, b))
            yield f"collectives[{i}]: {listed} in the plan, {follows} follows from its layouts"


def _sent(c: Collective) -> tuple[object, ...]:
    return c.kind, ",".join(c.axes), c.bytes, c.trips, c.seconds


def _memory_faults(plan: PlanData, program: TracedProgram, donated: frozenset[int], limit: float) -> Iterator[str]:
    peak = peak_of(program, plan.solution, donated).bytes
    if peak > limit:
        planned, allowed = bytes_text(plan.memory), bytes_text(limit)
        yield (
            f"memory: {bytes_text(peak)} per device with the arguments donated here, "
            f"{planned} in the plan, {allowed} allowed"
        )
