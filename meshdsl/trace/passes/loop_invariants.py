"""Loop invariants: unchanged carries become consts, single-iteration loops are inlined, invariant code is hoisted.

A scan that carries a value unchanged through every iteration (parameters next to a gradient accumulator) takes it as a
const, which may be resharded once in front of the loop or in every iteration. A scan whose body reads only consts
computes the same in every iteration, and a ``while`` may count to one: compilers run either once.
"""

from collections.abc import Iterator
from dataclasses import replace

from jax import lax

from meshdsl.ir.graph import Graph, Op
from meshdsl.ir.loops import LoopPort, PortRole, body_operands, loop_ports, with_ports
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

# ---- Unchanged carries, single iterations ----------------------------------------------------------------------------


def invariant_carries_to_consts(graph: Graph) -> Graph:
    """Returns the graph whose scans carry only values that change."""
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
    """Returns the graph with loops of one iteration inlined, and scans that read only consts run once."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(inline_single_trip_loops, substitute(op, table))
        if op.name == "while" and not any(asked.effects for asked in op.bodies[0].ops) and counted(op) == 1:
            ops += inlined(op, 1, table)
        else:
            ops += _stacked(op, table) if op.name == "scan" and _repeats(op) else [op]
    return with_ops(graph, ops)


def _repeats(op: Op) -> bool:
    (body,) = op.bodies
    read = {v.id for inner in body.ops for v in values(inner.inputs)}
    varies = (i for port in loop_ports(op) if not port.invariant for _, i in port.inputs)
    return (
        not any(body.inputs[i].id in read for i in varies)
        and not any(inner.effects for inner in body.ops)
        and op.params["length"] > 0
    )


def inlined(op: Op, which: int, table: Table) -> Iterator[Op]:
    """Returns the operations of a body that runs once; adds the replacements of the results of ``op`` to ``table``."""
    body = op.bodies[which]
    inside: Table = {v.id: x for v, x in zip(body.inputs, body_operands(op)[which], strict=True)}
    for inner in body.ops[:-1]:
        yield substitute(inner, inside)
    table.update((v.id, look_up(x, inside)) for v, x in zip(op.outputs, body.returned, strict=True))


def _stacked(op: Op, table: Table) -> Iterator[Op]:
    """The operations of a scan's body, and broadcasts that stack its results; adds those of carries to ``table``."""
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


# ---- Hoisting --------------------------------------------------------------------------------------------------------
# Loop-invariant code motion: operations that compute the same in every iteration move in front of the loop.
#
# Compilers hoist them, and a collective among them then runs once, not once per iteration: that of the norm of weights
# which all steps of a recurrent network share, say. As in XLA, results larger than their operands stay inside, since
# they would be live through the loop; so do constants, barriers, and operations with effects or bodies. In front of a
# ``while`` without iterations they are computed in vain.


def hoist_invariants(graph: Graph) -> Graph:
    """Returns the graph with invariant operations in front of their loops, inner loops first."""
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
        if _is_invariant(inner, table):
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


def _is_invariant(op: Op, table: Table) -> bool:
    read = list(values(op.inputs))
    if not read or op.bodies or op.effects or op.name in ("return", "optimization_barrier"):
        return False
    known = all(x.id in table for x in read)
    return known and sum(v.bytes for v in op.outputs) <= sum(v.bytes for v in read)
