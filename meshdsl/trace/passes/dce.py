"""Clean-up: what nobody reads is not computed.

Loops shrink with their results: a carry stays only if its result is read or if another carry,
a stacked output or the condition that stays reads it; consts, slices and operands stay if a
body still reads them. A sort moves along only what is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from meshdsl.ir.graph import Graph, Op
from meshdsl.ir.rewrite import filtered, returning, value_ids, with_ops

Wanted = Sequence[bool]


def dce(graph: Graph) -> Graph:
    """The graph without operations whose results are not read and that have no effects."""
    live: set[int] = set()
    ops: list[Op] = []
    for op in reversed(graph.ops):
        wanted = [v.id in live for v in op.outputs]
        if op.name == "return" or op.effects or any(wanted):
            op = _SHRUNK[op.name](op, wanted) if op.name in _SHRUNK else op
            live.update(value_ids(op.inputs))
            ops.append(op)
    return with_ops(graph, reversed(ops))


def _scan(op: Op, wanted: Wanted) -> Op:
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    body, keep = _shrink(op.bodies[0], consts, wanted[:carries], wanted[carries:])
    used = _read(body)
    stay = [v.id in used for v in op.bodies[0].inputs]
    stay[consts : consts + carries] = keep
    params = {**op.params, "num_consts": sum(stay[:consts]), "num_carry": sum(keep)}
    outputs = filtered(op.outputs, (*keep, *wanted[carries:]))
    body = replace(body, inputs=filtered(body.inputs, stay))
    return replace(op, inputs=filtered(op.inputs, stay), outputs=outputs, params=params, bodies=(body,))


def _while(op: Op, wanted: Wanted) -> Op:
    asked, closed = op.params["cond_nconsts"], op.params["body_nconsts"]
    condition = dce(op.bodies[0])
    used = _read(condition)
    asks = [v.id in used for v in condition.inputs]
    read = [w or a for w, a in zip(wanted, asks[asked:], strict=True)]
    body, keep = _shrink(op.bodies[1], closed, read, ())
    used = _read(body)
    stay = [v.id in used for v in body.inputs[:closed]]
    bodies = (
        replace(condition, inputs=filtered(condition.inputs, (*asks[:asked], *keep))),
        replace(body, inputs=filtered(body.inputs, (*stay, *keep))),
    )
    params = {**op.params, "cond_nconsts": sum(asks[:asked]), "body_nconsts": sum(stay)}
    inputs = filtered(op.inputs, (*asks[:asked], *stay, *keep))
    return replace(op, inputs=inputs, outputs=filtered(op.outputs, keep), params=params, bodies=bodies)


def _cond(op: Op, wanted: Wanted) -> Op:
    branches = [dce(returning(b, filtered(b.returned, wanted))) for b in op.bodies]
    read = [_read(b) for b in branches]
    stay = [any(b.inputs[i].id in r for b, r in zip(branches, read, strict=True)) for i in range(len(op.inputs) - 1)]
    bodies = tuple(replace(b, inputs=filtered(b.inputs, stay)) for b in branches)
    inputs = filtered(op.inputs, (True, *stay))
    return replace(op, inputs=inputs, outputs=filtered(op.outputs, wanted), bodies=bodies)


def _sort(op: Op, wanted: Wanted) -> Op:
    """Keys are compared also if nobody reads them in order."""
    stay = [i < op.params["num_keys"] or w for i, w in enumerate(wanted)]
    return replace(op, inputs=filtered(op.inputs, stay), outputs=filtered(op.outputs, stay))


_SHRUNK: dict[str, Callable[[Op, Wanted], Op]] = {"scan": _scan, "while": _while, "cond": _cond, "sort": _sort}


def _shrink(body: Graph, start: int, carries: Wanted, rest: Wanted) -> tuple[Graph, list[bool]]:
    """A loop's body returning only what is wanted, and which carries stay: those wanted or read by what stays."""
    keep = list(carries)
    while True:
        shrunk = dce(returning(body, filtered(body.returned, (*keep, *rest))))
        used = _read(shrunk)
        grown = [k or v.id in used for k, v in zip(keep, body.inputs[start:], strict=False)]
        if grown == keep:
            return shrunk, keep
        keep = grown


def _read(graph: Graph) -> set[int]:
    return {value for op in graph.ops for value in value_ids(op.inputs)}
