"""Whether a loaded plan is a plan of this program: on this mesh, with these arguments and pins."""

from collections.abc import Iterator, Sequence

from meshdsl.errors import PlanFileError, faults
from meshdsl.ir import Leaf, Program, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.value import Array, Plan
from meshdsl.planner.solution import Pins
from meshdsl.program_text import fingerprint

_SHOWN = 8


def check_match(plan: Plan, program: Program, mesh: Mesh, pins: Pins) -> None:
    """Raise PlanFileError, listing what differs, unless ``plan`` was made for all of these."""
    rows = list(_differences(plan, program, mesh, pins))
    if rows:
        more = [f"... and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
        title = f"the plan of {plan.name} was made for something else than this call of {program.name}:"
        raise PlanFileError(faults(title, [*rows[:_SHOWN], *more], "plan again without plan=, and save that"))


def _differences(plan: Plan, program: Program, mesh: Mesh, pins: Pins) -> Iterator[str]:
    if tuple(plan.mesh) != tuple(mesh):
        yield f"mesh: {plan.mesh} in the plan, {mesh} here"
    rows = [*_leaves("input", plan.inputs, program.inputs), *_leaves("output", plan.outputs, program.outputs)]
    yield from rows
    if not rows and fingerprint(program) != plan.fingerprint:
        yield from _operations(plan, program)
    yield from _pinned("input", plan.inputs, program.inputs, pins.inputs)
    yield from _pinned("output", plan.outputs, program.outputs, pins.outputs)


def _leaves(noun: str, planned: Sequence[Array], given: Sequence[Leaf]) -> Iterator[str]:
    a = {array.path: array.type for array in planned}
    b = {leaf.path: f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]" for leaf in given}
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
