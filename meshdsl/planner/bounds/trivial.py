"""What no plan of a program can undercut, without planning it: each operation alone, its best share on every device.

    seconds >= sum over operations of trips * (max(FLOPs / rate, bytes / bandwidth) / devices + overhead)
    memory  >= sum over inputs of bytes / devices of the axes that may split it

Moves, divisibility and what one layout costs the next are left out, so it takes no search; a step in microbatches is
looked at as it is run, with the ticks in which a stage has nothing to do. It tells candidates that need no planning.
"""

from math import prod

from meshdsl.ir.graph import LOOPS, Op, TracedProgram, Value, walk
from meshdsl.ir.solution import Pins
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.planner.costs.op_cost import OpWork, alone_seconds, materialised, work_of

_FREE = (*LOOPS, "return", "constrain")


def least_seconds(program: TracedProgram, mesh: Mesh) -> float:
    """Seconds that every plan of the program takes at least."""
    kept = materialised(program.graph)
    ops = ((op, graph.trips) for graph, op in walk(program.graph) if op.name not in _FREE)
    return sum(trips * _shared(op, work_of(op, kept), mesh) for op, trips in ops)


def least_memory(program: TracedProgram, mesh: Mesh, pins: Pins) -> int:
    """Bytes per device that every plan of the program needs at least: its arguments, in all parts there can be."""
    read = {x.id for op in program.graph.ops for x in op.inputs if isinstance(x, Value)}
    pinned = zip(program.graph.inputs, pins.inputs, strict=True)
    return sum(v.bytes // _parts(pin, mesh) for v, pin in pinned if v.id in read)


def _shared(op: Op, work: OpWork, mesh: Mesh) -> float:
    started = mesh.topology.overhead if any(work.touched) else 0.0
    return (alone_seconds(op, work, mesh) - started) / mesh.size + started


def _parts(pin: Layout, mesh: Mesh) -> int:
    """Into how many parts the axes can split it that are not pinned otherwise."""
    return prod(size for axis, size in mesh if axis not in pin.axes or isinstance(pin.on(axis), Split))
