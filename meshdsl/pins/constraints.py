"""Constraints that jax's own functions state, fitted to the mesh that the step is planned on.

``jax.lax.with_sharding_constraint`` is written for one mesh, and compiles where sizes do not divide. So its axes that
split nothing may be missing here, or be divided by a shard_map around it. An axis is left free, with a note, where it
would split a dim unevenly that is too short to be padded. An axis that splits a dim and is missing here is an error,
which ``make_pins`` reports.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from meshdsl.ir.graph import Graph, Op, TracedProgram
from meshdsl.ir.rewrite import with_ops
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B
from meshdsl.pins.conflicts import LONG


def fit_constraints(program: TracedProgram, mesh: Mesh) -> TracedProgram:
    """Returns the program with every constraint of jax on axes of the mesh; ``md.constrain`` is meant as it is."""
    notes: list[str] = []
    graph = _fitted(program.graph, mesh, notes)
    if graph is program.graph:
        return program
    said = list(dict.fromkeys(notes))
    return replace(program, graph=graph, notes=[*program.notes, *said], warnings=[*program.warnings, *said])


def _fitted(graph: Graph, mesh: Mesh, notes: list[str]) -> Graph:
    ops = [_fitted_op(op, mesh, notes) for op in graph.ops]
    return graph if all(x is y for x, y in zip(ops, graph.ops, strict=True)) else with_ops(graph, ops)


def _fitted_op(op: Op, mesh: Mesh, notes: list[str]) -> Op:
    if op.bodies:
        bodies = [_fitted(body, mesh, notes) for body in op.bodies]
        same = all(x is y for x, y in zip(bodies, op.bodies, strict=True))
        return op if same else replace(op, bodies=tuple(bodies))
    if op.name != "constrain" or "by" not in op.params:
        return op
    layout: Layout = op.params["layout"]
    free = set(_uneven(op, layout, mesh, notes))
    free.update(axis for axis, p in layout.placements if p is B and (axis not in mesh.names or axis in op.manual))
    kept = {axis: p for axis, p in layout.placements if axis not in free}
    return op if len(kept) == len(layout.placements) else replace(op, params={**op.params, "layout": Layout(**kept)})


def _uneven(op: Op, layout: Layout, mesh: Mesh, notes: list[str]) -> Iterator[str]:
    """Yields the axes of dims that do not divide, and are too short to be padded."""
    for dim, n in enumerate(op.outputs[0].shape):
        axes = [axis for axis in layout.splitting(dim) if axis in mesh.names]
        blocks = prod(map(mesh.axis, axes))
        if n % blocks and n < LONG * blocks:
            over = ", ".join(f"{axis}={mesh.axis(axis)}" for axis in axes)
            what = f"{op.called} at {op.source}: dim {dim} of size {n}"
            notes.append(f"{what} does not divide over {over}, and is left free")
            yield from axes
