"""The error when no plan fits the memory: how much the smallest plan needs, for which values, and what would help."""

from collections.abc import Iterable, Iterator

from meshdsl.errors import LayoutError, MemoryLimitError, faults, shortened
from meshdsl.ir.graph import Value, walk
from meshdsl.ir.host import TO_DEVICE
from meshdsl.ir.solution import Pins
from meshdsl.layouts.mesh import Mesh
from meshdsl.planner.bounds.trivial import least_memory
from meshdsl.planner.limits import SearchLimits
from meshdsl.planner.liveness.peak import Peak
from meshdsl.planner.problem.build import Problem
from meshdsl.trace.annotate import BACKWARD, FORWARD
from meshdsl.trace.read_jaxpr import starts_recomputation
from meshdsl.util.text import bytes_text

_SHOWN = 8  # lines of values
_REMEDY = "use more devices, a smaller batch, jax.checkpoint, or raise memory="
_REMEDY_RECOMPUTED = "use more devices, a smaller batch, or raise memory="


def larger_meshes(mesh: Mesh, doublings: int) -> Iterator[Mesh]:
    """Yields the mesh with its outermost parallel axis doubled once, twice, ..., as far as its topology has links."""
    name = next((name for name, size in mesh if size > 1), None)
    for doubled in range(1, doublings + 1) if name else ():
        try:
            yield Mesh(topology=mesh.topology, **{n: size << doubled * (n == name) for n, size in mesh})
        except LayoutError:
            return


def infeasible_error(
    problem: Problem,
    pins: Pins,
    smallest: Peak,
    limit: float,
    limits: SearchLimits,
    is_least: bool,
    on_larger_meshes: Iterable[tuple[Mesh, int]],
) -> MemoryLimitError:
    """Returns the error when no plan within the limit was found.

    Args:
      smallest: the peak of the smallest plan found.
      limits: under which it was found.
      is_least: whether it is proved that no plan is smaller.
      on_larger_meshes: larger meshes, with the least bytes found on each; only those that help are listed.
    """
    program, alone = problem.program, least_memory(problem.program, problem.mesh, pins)
    names = {v.id: f"{op.name} at {op.source}" for _, op in walk(program.graph) for v in op.outputs}
    for value, leaf, pin in zip(program.graph.inputs, program.inputs, pins.inputs, strict=True):
        names[value.id] = f"{leaf.path}, pinned to {pin}" if pin.axes else leaf.path
    for _, op in walk(program.graph):
        if op.name == TO_DEVICE and isinstance(x := op.inputs[0], Value):
            names[op.outputs[0].id] = f"{names.get(x.id, 'a residual in a loop')}, from the host's memory"
    rows = [f"{bytes_text(size)}: {names.get(v, 'a slice in a loop')}" for v, size in smallest.bytes_by_value()]

    made = (op for _, op in walk(program.graph) if op.phase == FORWARD and op.name != TO_DEVICE)
    forward = {v.id for op in made for v in op.outputs}
    operands = (x for _, op in walk(program.graph) if op.phase == BACKWARD for x in op.inputs)
    residuals = forward & {x.id for x in operands if isinstance(x, Value)}
    saved = sum(size for v, size in smallest.bytes_by_value() if v in residuals)

    is_recomputed = any(starts_recomputation(op) for _, op in walk(program.graph))
    advises_checkpoint = limits.memory_advises_checkpoint and not is_recomputed  # else it adds nothing
    is_all = not pins.hosted  # others might be in the host's memory, too
    what = "the arguments" if is_all else "the arguments that stay on the device"
    advice = [
        f"{'infeasible: ' if alone > limit and is_all else ''}{what} alone need {bytes_text(alone)} per device, even "
        "fully sharded under their pins"
    ]
    if saved and advises_checkpoint:
        advice.append(
            f"{bytes_text(saved)} are residuals for the backward pass: jax.checkpoint recomputes them instead"
        )
    for mesh, least in on_larger_meshes:
        if least < smallest.bytes:
            fits = ", which fits" if least <= limit else ""
            advice.append(f"on mesh {mesh} the least found is {bytes_text(least)}{fits}")
    at = f" at {smallest.op.name} ({smallest.op.source})" if smallest.op else ""
    needed = f"the least {'possible' if is_least else 'found'} is {bytes_text(smallest.bytes)}{at}"
    title = f"no plan fits memory={bytes_text(limit)} per device; {needed}, held by:"
    advice.append(_REMEDY if advises_checkpoint else _REMEDY_RECOMPUTED)
    error = MemoryLimitError(faults(title, shortened(rows, _SHOWN), "\n".join(advice)))
    error.least = smallest.bytes
    return error
