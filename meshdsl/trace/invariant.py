"""Clean-up: what a scan never changes is no carry, and where nothing changes there is no loop.

A scan that carries a value unchanged through every trip (parameters next to a gradient
accumulator) gets it as a const, which may be moved once before the loop or in every trip. A scan whose
body reads consts alone makes the same in every trip, and a ``while`` may count to one: compilers do either once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from jax import lax

from meshdsl.ir import Graph, Op
from meshdsl.trace.graphs import (
    Table,
    broadcast_params,
    in_bodies,
    kept,
    look_up,
    returning,
    substitute,
    values,
    with_ops,
)
from meshdsl.trace.trips import counted

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


def run_once(graph: Graph) -> Graph:
    """The graph without loops of one trip, and with scans that read neither carries nor slices done once."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(run_once, substitute(op, table))
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
