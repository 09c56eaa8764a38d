"""Clean-up: what a scan never changes is no carry, and where nothing changes there is no loop.

A scan that carries a value unchanged through every trip (parameters next to a gradient
accumulator) gets it as a const, which may be moved once before the loop or in every trip. A scan whose
body reads consts alone makes the same in every trip, and a ``while`` may count to one: compilers do either once.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from jax import lax

from meshdsl.ir.graph import Graph, Op
from meshdsl.ir.loops import LoopPort, PortRole, loop_ports, with_ports
from meshdsl.ir.rewrite import (
    Table,
    broadcast_params,
    fresh_ids,
    in_bodies,
    look_up,
    new_value,
    substitute,
    values,
    with_ops,
)
from meshdsl.trace.annotate import counted

# ---- Invariant -------------------------------------------------------------------------------------------------------


T = TypeVar("T")


def invariant_carries_to_consts(graph: Graph) -> Graph:
    """The graph whose scans carry only what changes."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(invariant_carries_to_consts, substitute(op, table))
        if op.name == "scan":
            op, fixed = _uncarried(op)
            table.update(fixed)
        ops.append(op)
    return with_ops(graph, ops)


def inline_single_trip_loops(graph: Graph) -> Graph:
    """The graph without loops of one trip, and with scans that read neither carries nor slices done once."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(inline_single_trip_loops, substitute(op, table))
        if op.name == "while" and not any(asked.effects for asked in op.bodies[0].ops) and counted(op) == 1:
            ops += _inlined(op, table)
        else:
            ops += _stacked(op, table) if op.name == "scan" and _repeats(op) else [op]
    return with_ops(graph, ops)


def _repeats(op: Op) -> bool:
    (body,) = op.bodies
    read = {v.id for inner in body.ops for v in values(inner.inputs)}
    changes = any(v.id in read for v in body.inputs[op.params["num_consts"] :])
    return not changes and not any(inner.effects for inner in body.ops) and op.params["length"] > 0


def _inlined(op: Op, table: Table) -> Iterator[Op]:
    """The operations of the only trip; ``table`` gets what replaces the loop's results."""
    body, inputs = op.bodies[1], op.inputs[op.params["cond_nconsts"] :]
    inside: Table = {v.id: x for v, x in zip(body.inputs, inputs, strict=True)}
    for inner in body.ops[:-1]:
        yield substitute(inner, inside)
    table.update((v.id, look_up(x, inside)) for v, x in zip(op.outputs, body.returned, strict=True))


def _stacked(op: Op, table: Table) -> Iterator[Op]:
    """The operations of a scan's body, and its results stacked; ``table`` gets what replaces the others."""
    (body,), carries = op.bodies, op.params["num_carry"]
    inside: Table = {v.id: x for v, x in zip(body.inputs, op.inputs, strict=True)}
    for inner in body.ops[:-1]:
        yield substitute(inner, inside)
    table.update((v.id, look_up(x, inside)) for v, x in zip(op.outputs[:carries], body.returned, strict=False))
    for x, made in zip(body.returned[carries:], op.outputs[carries:], strict=True):
        params = broadcast_params(made.shape, range(1, len(made.shape)))
        whole = replace(op, name="broadcast_in_dim", primitive=lax.broadcast_in_dim_p, params=params, bodies=())
        yield replace(whole, inputs=(look_up(x, inside),), outputs=(made,))


def _uncarried(op: Op) -> tuple[Op, Table]:
    """The scan with its unchanged carries as consts, and what replaces their results."""
    (body,), ports, table = op.bodies, list[LoopPort](), Table()
    for port in loop_ports(op):
        if port.role is PortRole.CARRY:
            ((_, i),), ((_, j),) = port.inputs, port.outputs
            if body.returned[j] is body.inputs[i]:
                table[op.outputs[port.result].id] = op.inputs[port.operand]
                port = LoopPort(PortRole.CONST, port.operand, port.inputs)
        ports.append(port)
    return (with_ports(op, ports), table) if table else (op, table)


# ---- Hoist -----------------------------------------------------------------------------------------------------------
# Clean-up: what is the same in every trip of a loop is computed in front of it.
#
# Compilers move such operations out of loops, and a collective among them is then sent once, not once per trip: the
# norm of weights that all steps of a recurrent network share, say. In front of the loop the plan counts it as it is.
# As in XLA, what is larger than that which it is made of stays inside, since it would be kept through the loop; so do
# constants, barriers, and operations with effects or loops in them. A ``while`` that makes no trip has computed them
# for nothing.


def hoist_invariants(graph: Graph) -> Graph:
    """The graph with loops, inner ones first, that compute only what changes."""
    return _hoisted(graph, fresh_ids(graph))


def _hoisted(graph: Graph, ids: Iterator[int]) -> Graph:
    ops: list[Op] = []
    for op in graph.ops:
        op = replace(op, bodies=tuple(_hoisted(body, ids) for body in op.bodies)) if op.bodies else op
        if op.name in ("scan", "while"):
            front, op = _parted(op, ids)
            ops += front
        ops.append(op)
    return with_ops(graph, ops)


def _parted(op: Op, ids: Iterator[int]) -> tuple[list[Op], Op]:
    """The operations of the body that compute the same in every iteration, and the loop without them."""
    at = len(op.bodies) - 1
    body, ports = op.bodies[at], list(loop_ports(op))
    consts = [port for port in ports if port.role is PortRole.CONST and port.inputs[0][0] == at]
    table: Table = {body.inputs[port.inputs[0][1]].id: op.inputs[port.operand] for port in consts}
    front: list[Op] = []
    stay: list[Op] = []
    for inner in body.ops:
        if _same_every_trip(inner, table):
            front.append(substitute(inner, table))
            table.update((v.id, v) for v in inner.outputs)
        else:
            stay.append(inner)
    if not front:
        return front, op
    made = {v.id: v for each in front for v in each.outputs}
    passed = {v.id: new_value(v, ids) for each in stay for v in values(each.inputs) if v.id in made}
    inside: Table = dict(passed)
    for k in range(len(passed)):
        ports.append(LoopPort(PortRole.CONST, len(op.inputs) + k, ((at, len(body.inputs) + k),)))
    body = replace(body, inputs=(*body.inputs, *passed.values()), ops=tuple(substitute(each, inside) for each in stay))
    op = replace(op, inputs=(*op.inputs, *(made[i] for i in passed)))
    return front, with_ports(op, ports, (*op.bodies[:at], body))


def _same_every_trip(op: Op, table: Table) -> bool:
    read = list(values(op.inputs))
    if not read or op.bodies or op.effects or op.name in ("return", "optimization_barrier"):
        return False
    known = all(x.id in table for x in read)
    return known and sum(v.bytes for v in op.outputs) <= sum(v.bytes for v in read)
