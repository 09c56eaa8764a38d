"""Clean-up: what a scan never changes is no carry.

A scan that carries a value unchanged through every trip (parameters next to a gradient
accumulator) gets it as a const, which may be moved once before the loop or in every trip.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from meshdsl.ir import Graph, Op
from meshdsl.trace.graphs import Table, in_bodies, kept, returning, substitute, with_ops

T = TypeVar("T")


def drop_invariants(graph: Graph) -> Graph:
    """The graph whose scans carry only what changes."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(drop_invariants, substitute(op, table))
        if op.name == "scan":
            op, fixed = _uncarried(op)
            table.update(fixed)
        ops.append(op)
    return with_ops(graph, ops)


def _uncarried(op: Op) -> tuple[Op, Table]:
    """The scan with its unchanged carries as consts, and what replaces their results."""
    (body,), consts, end = op.bodies, op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"]
    changes = [a is not b for a, b in zip(body.returned, body.inputs[consts:end], strict=False)]
    if all(changes):
        return op, {}
    fixed = [not c for c in changes]
    stay = (*changes, *[True] * (len(op.outputs) - len(changes)))
    body = returning(replace(body, inputs=_moved(body.inputs, consts, changes)), kept(body.returned, stay))
    table = {v.id: x for v, x, f in zip(op.outputs, op.inputs[consts:end], fixed, strict=False) if f}
    params = {**op.params, "num_consts": consts + sum(fixed), "num_carry": sum(changes)}
    inputs, outputs = _moved(op.inputs, consts, changes), kept(op.outputs, stay)
    return replace(op, inputs=inputs, outputs=outputs, params=params, bodies=(body,)), table


def _moved(items: Sequence[T], consts: int, changes: Sequence[bool]) -> tuple[T, ...]:
    """Consts, carries, slices with the unchanged carries moved to the end of the consts."""
    carries = items[consts : consts + len(changes)]
    fixed = kept(carries, (not c for c in changes))
    return (*items[:consts], *fixed, *kept(carries, changes), *items[consts + len(changes) :])
