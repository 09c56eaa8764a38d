"""Clean-up: what is the same in every trip of a loop is computed in front of it.

Compilers move such operations out of loops, and a collective among them is then sent once, not once per trip: the
norm of weights that all steps of a recurrent network share, say. In front of the loop the plan counts it as it is.
As in XLA, what is larger than that which it is made of stays inside, since it would be kept through the loop; so do
constants, barriers, and operations with effects or loops in them. A ``while`` that makes no trip has computed them
for nothing.
"""

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir import Graph, Op
from meshdsl.trace.graphs import Table, fresh_ids, new_value, substitute, values, with_ops


def hoist(graph: Graph) -> Graph:
    """The graph with loops, inner ones first, that compute only what changes."""
    return _hoisted(graph, fresh_ids(graph))


def _hoisted(graph: Graph, ids: Iterator[int]) -> Graph:
    ops: list[Op] = []
    for op in graph.ops:
        op = replace(op, bodies=tuple(_hoisted(body, ids) for body in op.bodies)) if op.bodies else op
        if op.name in _CONSTS:
            front, op = _parted(op, ids)
            ops += front
        ops.append(op)
    return with_ops(graph, ops)


_CONSTS = {"scan": ("num_consts", 0), "while": ("body_nconsts", 1)}


def _parted(op: Op, ids: Iterator[int]) -> tuple[list[Op], Op]:
    """What a loop computes anew in every trip although it is the same, and the loop without it."""
    name, at = _CONSTS[op.name]
    body, count, first = op.bodies[at], op.params[name], op.params["cond_nconsts"] if at else 0
    table: Table = {v.id: x for v, x in zip(body.inputs[:count], op.inputs[first:], strict=False)}
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
    read = {v.id: new_value(v, ids) for each in stay for v in values(each.inputs) if v.id in made}
    inside: Table = dict(read)
    body = replace(
        body,
        inputs=(*body.inputs[:count], *read.values(), *body.inputs[count:]),
        ops=tuple(substitute(each, inside) for each in stay),
    )
    inputs = (*op.inputs[: first + count], *(made[i] for i in read), *op.inputs[first + count :])
    bodies = tuple(body if i == at else each for i, each in enumerate(op.bodies))
    return front, replace(op, inputs=inputs, params={**op.params, name: count + len(read)}, bodies=bodies)


def _same_every_trip(op: Op, table: Table) -> bool:
    read = list(values(op.inputs))
    if not read or op.bodies or op.effects or op.name in ("return", "optimization_barrier"):
        return False
    known = all(x.id in table for x in read)
    return known and sum(v.bytes for v in op.outputs) <= sum(v.bytes for v in read)
