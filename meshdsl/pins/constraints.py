"""Constraints that jax's own functions state, fitted to the mesh that the step is planned on.

``jax.lax.with_sharding_constraint`` is written for one mesh, and compiles where sizes do not divide. So its axes that
split nothing may be missing here, or be divided by a shard_map around it. An axis is left free, with a note, where it
would split a dim unevenly that is too short to be padded. An axis that splits a dim and is missing here is an error,
which ``make_pins`` reports.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir.graph import Op, TracedProgram
from meshdsl.ir.rewrite import with_each_op
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B
from meshdsl.pins.conflicts import LONG, UNEVEN, sized, uneven_dims


def fit_constraints(program: TracedProgram, mesh: Mesh) -> TracedProgram:
    """Returns the program with every constraint of jax on axes of the mesh; ``md.constrain`` is meant as it is."""
    notes: list[str] = []
    graph = with_each_op(program.graph, lambda op: _fitted(op, mesh, notes))
    if graph is program.graph:
        return program
    said = list(dict.fromkeys(notes))
    return replace(program, graph=graph, notes=[*program.notes, *said], warnings=[*program.warnings, *said])


def _fitted(op: Op, mesh: Mesh, notes: list[str]) -> Op:
    """Returns the operation with the axes of a constraint of jax that it keeps; ``notes`` name those left free."""
    if op.name != "constrain" or "by" not in op.params:
        return op
    layout: Layout = op.params["layout"]
    free = set(_uneven(op, layout, mesh, notes))
    free.update(axis for axis, p in layout.placements if p is B and (axis not in mesh.names or axis in op.manual))
    kept = {axis: p for axis, p in layout.placements if axis not in free}
    return op if len(kept) == len(layout.placements) else replace(op, params={**op.params, "layout": Layout(**kept)})


def _uneven(op: Op, layout: Layout, mesh: Mesh, notes: list[str]) -> Iterator[str]:
    """Yields the axes of dims that do not divide, and are too short to be padded."""
    shape = op.outputs[0].shape
    for dim, axes, blocks in uneven_dims(shape, layout, mesh):
        if shape[dim] < LONG * blocks:
            what = f"{op.called} at {op.source}: dim {dim} of size {shape[dim]}"
            notes.append(f"{what} {UNEVEN} {sized(axes, mesh)}, and is left free")
            yield from axes
