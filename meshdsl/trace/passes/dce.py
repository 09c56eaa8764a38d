"""Dead code elimination: operations without effects whose results have no use are dropped.

Loops shrink with their results. A carry stays only if its result is used, or if a carry, a stacked output or a
condition that stays reads it; consts, slices and operands stay if a body still reads them. A sort permutes only its
keys and the operands whose results are used.
"""

from collections.abc import Sequence
from dataclasses import replace

from meshdsl.ir.graph import Graph, Op
from meshdsl.ir.loops import ABSENT, LoopPort, PortRole, loop_ports, with_ports
from meshdsl.ir.rewrite import filtered, returning, value_ids, with_ops


def dce(graph: Graph) -> Graph:
    """Returns the graph without operations that have neither uses nor effects, in its bodies as well."""
    live: set[int] = set()
    ops: list[Op] = []
    for op in reversed(graph.ops):
        wanted = [v.id in live for v in op.outputs]
        if op.name == "return" or op.effects or any(wanted):
            if op.bodies:
                op = _shrunk_loop(op, wanted)
            elif op.name == "sort":
                op = _shrunk_sort(op, wanted)
            live.update(value_ids(op.inputs))
            ops.append(op)
    return with_ops(graph, reversed(ops))


def _shrunk_loop(op: Op, wanted: Sequence[bool]) -> Op:
    """The loop or conditional with the smallest set of ports that still makes the wanted results.

    Ports are live if their result is wanted, if they decide what runs, or if a body reads them; as live carries make a
    body read more, this is repeated until no further carry becomes live.
    """
    ports = list(loop_ports(op))
    live = [port.role is PortRole.PREDICATE or (port.result != ABSENT and wanted[port.result]) for port in ports]
    while True:
        bodies = [dce(_returning_live(body, which, filtered(ports, live))) for which, body in enumerate(op.bodies)]
        uses = [{x for inner in body.ops for x in value_ids(inner.inputs)} for body in bodies]
        used = [any(op.bodies[b].inputs[i].id in uses[b] for b, i in port.inputs) for port in ports]
        more_outputs = any(
            now and not before and port.outputs for port, now, before in zip(ports, used, live, strict=True)
        )
        live = [before or now for before, now in zip(live, used, strict=True)]
        if not more_outputs:
            whole = [returning(shrunk, body.returned) for shrunk, body in zip(bodies, op.bodies, strict=True)]
            return with_ports(op, filtered(ports, live), whole)


def _returning_live(body: Graph, which: int, live: Sequence[LoopPort]) -> Graph:
    """The body returning the outputs of live ports only."""
    outputs = {j for port in live for b, j in port.outputs if b == which}
    return returning(body, [x for j, x in enumerate(body.returned) if j in outputs])


def _shrunk_sort(op: Op, wanted: Sequence[bool]) -> Op:
    """The sort without operands that only move along and whose results have no use."""
    stay = [i < op.params["num_keys"] or w for i, w in enumerate(wanted)]
    return replace(op, inputs=filtered(op.inputs, stay), outputs=filtered(op.outputs, stay))
