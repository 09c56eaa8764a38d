"""What to say when memory is short: the least possible, what holds it, and what would help, in numbers."""

from collections.abc import Iterable, Iterator

from meshdsl.errors import LayoutError, MemoryLimitError, faults, shortened
from meshdsl.ir.graph import TracedProgram, Value, walk
from meshdsl.ir.solution import Pins
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.bounds.trivial import least_memory
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.problem.build import Problem
from meshdsl.trace.annotate import BACKWARD, FORWARD
from meshdsl.util.text import bytes_text

_SHOWN, _DOUBLINGS = 8, 4
_REMEDY = "use more devices, a smaller batch, jax.checkpoint, or raise memory="


def larger(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh with more and more devices on its outermost axis that has several, as far as its topology has links."""
    name = next((name for name, size in mesh if size > 1), None)
    for doubled in range(1, _DOUBLINGS + 1) if name else ():
        try:
            yield Mesh(topology=mesh.topology, **{n: size << doubled * (n == name) for n, size in mesh})
        except LayoutError:
            return


def too_small(
    problem: Problem, pins: Pins, least: Peak, limit: float, none: bool, on_more: Iterable[tuple[Mesh, int]]
) -> MemoryLimitError:
    """The error when no plan was found that fits.

    Args:
      least: the fullest point of the smallest plan. none: whether it is proved that none is smaller.
      on_more: larger meshes and the least bytes found on each; those that do not help are left out.
    """
    program, alone = problem.program, least_memory(problem.program, problem.mesh, pins)
    at = f" at {least.op.name} ({least.op.source})" if least.op else ""
    known = "possible" if none else "found"
    limits = f"memory={bytes_text(limit)} per device; the least {known} is {bytes_text(least.bytes)}{at}"
    names, kept = _names(program, pins), _kept(program)
    helping = [(mesh, found) for mesh, found in on_more if found < least.bytes]
    rows = [f"{bytes_text(size)}: {names.get(v, 'a slice in a loop')}" for v, size in least.held()]
    again = sum(size for v, size in least.held() if v in kept)
    advice = [
        f"{'no plan can fit: ' if alone > limit else ''}arguments alone hold {bytes_text(alone)}, in all parts that "
        "their pins allow",
        *([f"{bytes_text(again)} is kept for the backward pass: jax.checkpoint computes it again"] if again else []),
        *(f"on mesh {mesh} the least found is {bytes_text(found)}{_fits(found, limit)}" for mesh, found in helping),
        _REMEDY,
    ]
    return MemoryLimitError(faults(f"no plan fits {limits}, held by:", shortened(rows, _SHOWN), "\n".join(advice)))


def _fits(found: int, limit: float) -> str:
    return ", which fits" if found <= limit else ""


def _names(program: TracedProgram, pins: Pins) -> dict[int, str]:
    """What values are called, by id."""
    names = {v.id: f"{op.name} at {op.source}" for _, op in walk(program.graph) for v in op.outputs}
    for value, leaf, pin in zip(program.graph.inputs, program.inputs, pins.inputs, strict=True):
        names[value.id] = f"{leaf.path}, pinned to {pin}" if pin.axes else leaf.path
    return names


def _kept(program: TracedProgram) -> set[int]:
    """Ids of the values that the forward pass makes and the backward pass reads."""
    made = {v.id for _, op in walk(program.graph) if op.phase == FORWARD for v in op.outputs}
    read = (x for _, op in walk(program.graph) if op.phase == BACKWARD for x in op.inputs)
    return made & {x.id for x in read if isinstance(x, Value)}
