"""Bounds on every plan of a program that need no model: each op alone, evenly divided over all devices.

    seconds >= sum over ops of iterations * (max(FLOPs / rate, bytes / bandwidth) / devices + overhead)
    memory  >= sum over inputs on devices of bytes / devices of the axes that may shard it

Resharding, divisibility and consistency between ops are left out, so no search is needed. A step in microbatches is
bounded as it runs, with the ticks in which a stage idles. The search over meshes orders and prunes candidates by these
bounds, taken over the variants of the program (``meshdsl.api.plan_variants``).
"""

from math import prod

from meshdsl.ir.graph import LOOPS, Op, TracedProgram, Value, walk
from meshdsl.ir.host import hosted_values
from meshdsl.ir.solution import Pins
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.planner.costs.op_cost import OpWork, unsharded_seconds, work_of
from meshdsl.planner.costs.traffic import traffic_of

_ROUNDED = 1e-6  # part of a plan's seconds that it may be short of those of its operations, which are rounded to units
_WITHOUT_WORK = (*LOOPS, "return", "constrain")


def least_seconds(program: TracedProgram, mesh: Mesh) -> float:
    """Returns a lower bound on the seconds of every plan."""
    traffic = traffic_of(program.graph, mesh.topology.fusion)
    ops = ((op, graph.trips) for graph, op in walk(program.graph) if op.name not in _WITHOUT_WORK)
    seconds = sum(trips * _divided_seconds(op, work_of(op, traffic.of(op)), mesh) for op, trips in ops)
    return seconds * (1 - _ROUNDED)


def least_memory(program: TracedProgram, mesh: Mesh, pins: Pins) -> int:
    """Returns a lower bound on the bytes per device of every plan: the arguments, sharded as far as pins allow."""
    used = {x.id for op in program.graph.ops for x in op.inputs if isinstance(x, Value)}
    used -= hosted_values(program.graph)
    pinned = zip(program.graph.inputs, pins.inputs, strict=True)
    return sum(value.bytes // _most_shards(pin, mesh) for value, pin in pinned if value.id in used)


def _divided_seconds(op: Op, work: OpWork, mesh: Mesh) -> float:
    overhead = mesh.topology.overhead * work.starts
    return (unsharded_seconds(op, work, mesh) - overhead) / mesh.size + overhead


def _most_shards(pin: Layout, mesh: Mesh) -> int:
    """Returns the product of the axes that may shard an argument: those that are not pinned otherwise."""
    return prod(size for axis, size in mesh if axis not in pin.axes or isinstance(pin.on(axis), Split))
