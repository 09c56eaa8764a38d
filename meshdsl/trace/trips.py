"""How often a body runs in one step: its own trips times those of every loop around it.

A scan says how long it is. A ``while`` does if it counts: a carry that starts from a literal,
grows by a literal and is compared ``lt`` with a literal. Otherwise it is taken to run
``GUESS`` times and every graph inside is marked as estimated.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshdsl.ir import Graph, Literal, Op
from meshdsl.trace.graphs import Atom

GUESS = 10


def count_trips(graph: Graph, trips: int = 1, estimated: bool = False) -> None:
    """Write the trips into a graph that runs ``trips`` times, and into its bodies."""
    graph.trips, graph.estimated = trips, estimated
    for op in graph.ops:
        if op.bodies:
            times, guessed = _times(op)
            for body, n in zip(op.bodies, times, strict=True):
                count_trips(body, trips * n, estimated or guessed)


def _times(op: Op) -> tuple[Sequence[int], bool]:
    """How often each body runs when the operation runs once, and whether that is a guess."""
    if op.name == "scan":
        return (op.params["length"],), False
    if op.name == "cond":
        return (1,) * len(op.bodies), False
    trips = counted(op)
    return (GUESS + 1, GUESS) if trips is None else (trips + 1, trips), trips is None


def counted(op: Op) -> int | None:
    """Trips of ``while i < stop: i += stride``, where start, stop and stride are literals."""
    condition, body = op.bodies
    test = _made_by(condition, condition.returned[0])
    if test is None or test.name != "lt":
        return None
    index = _carry_of(condition, test.inputs[0], op.params["cond_nconsts"])
    if index is None or not np.issubdtype(test.inputs[0].dtype, np.integer):
        return None
    start, stride = _initial(op, index), _stride(body, op.params["body_nconsts"], index)
    stop = _fixed(op, condition, test.inputs[1])
    if start is None or stop is None or stride is None or stride <= 0:
        return None
    return max(0, -((start - stop) // stride))


def _stride(body: Graph, consts: int, index: int) -> int | None:
    """What a trip adds to carry ``index``."""
    step = _made_by(body, body.returned[index])
    if step is None or step.name != "add":
        return None
    carry = body.inputs[consts + index]
    other = [x for x in step.inputs if x is not carry]
    return _number(other[0]) if len(other) == 1 else None


def _fixed(op: Op, condition: Graph, x: Atom) -> int | None:
    """The number that the condition reads as ``x``: a literal, or a carry that no trip changes."""
    index = _carry_of(condition, x, op.params["cond_nconsts"])
    if index is None:
        return _number(x)
    body = op.bodies[1]
    unchanged = body.returned[index] is body.inputs[op.params["body_nconsts"] + index]
    return _initial(op, index) if unchanged else None


def _initial(op: Op, index: int) -> int | None:
    return _number(op.inputs[op.params["cond_nconsts"] + op.params["body_nconsts"] + index])


def _carry_of(graph: Graph, x: Atom, consts: int) -> int | None:
    return next((i for i, v in enumerate(graph.inputs[consts:]) if v is x), None)


def _made_by(graph: Graph, x: Atom) -> Op | None:
    return next((op for op in graph.ops if any(v is x for v in op.outputs)), None)


def _number(x: Any) -> int | None:
    return int(x.value) if isinstance(x, Literal) and np.issubdtype(x.dtype, np.integer) else None
