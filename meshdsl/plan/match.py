"""Whether a loaded plan is a plan of this program: on this mesh and topology, within this memory, with these pins."""

from collections.abc import Iterator, Sequence
from dataclasses import fields

from meshdsl.errors import PlanFileError, faults, shortened
from meshdsl.ir import Leaf, Program, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.plan.value import Array, Plan
from meshdsl.planner.solution import Pins
from meshdsl.program_text import fingerprint
from meshdsl.units import bytes_text


def check_match(plan: Plan, program: Program, mesh: Mesh, pins: Pins, memory: float | None = None) -> None:
    """Raise PlanFileError, listing what differs, unless ``plan`` was made for all of these.

    Args:
      memory: limit in bytes per device; None takes the topology's, as planning does.
    """
    rows = [*_differences(plan, program, mesh, pins), *_memory(plan, mesh, memory)]
    if rows:
        title = f"the plan of {plan.name} was made for something else than this call of {program.name}:"
        raise PlanFileError(faults(title, shortened(rows), "plan again without plan=, and save that"))


def _differences(plan: Plan, program: Program, mesh: Mesh, pins: Pins) -> Iterator[str]:
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


def _memory(plan: Plan, mesh: Mesh, memory: float | None) -> Iterator[str]:
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


def _operations(plan: Plan, program: Program) -> Iterator[str]:
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
