"""Keeping collectives inside the loops they were planned in.

A collective of a value that is the same in every trip can run before the loop, once, and XLA
moves it there. The plan has both to choose from, though: gathering a weight inside the loop
costs more communication and less memory. What was planned inside stays inside when its
operand passes an ``optimization_barrier`` together with a value that changes from trip to
trip; the barrier computes nothing.
"""

from collections.abc import Collection
from itertools import repeat

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Graph, Literal, Op, Value
from meshdsl.layouts.price import COLLECTIVES
from meshdsl.lowering.walk import Arrays
from meshdsl.planner.solution import Solution


def varying(body: Graph, consts: int, carries: int) -> list[int]:
    """Inputs of a loop's body that change from trip to trip: slices, and carries that are not just handed on."""
    handed = [i for i in range(carries) if body.returned[i] is body.inputs[consts + i]]
    return [i for i in range(consts, len(body.inputs)) if i - consts not in handed]


def gathered_inside(body: Graph, change: Collection[int], solution: Solution) -> list[int]:
    """Inputs other than those that ``change``, from which a collective inside the body is computed."""
    origins = {value.id: frozenset({i}) for i, value in enumerate(body.inputs) if i not in change}
    for op in body.ops:
        found = [_origins(x, origins) for x in op.inputs]
        known = [f for f in found if f is not None]
        if len(known) == len(found):
            origins.update((value.id, frozenset().union(*known)) for value in op.outputs)
    inside = {value.id for op in body.ops if _exchanges(op, solution) for value in op.outputs}
    moved = [sources for id, sources in origins.items() if id in inside or _communicates(id, solution)]
    return sorted(frozenset().union(*moved))


def read_by(body: Graph, inputs: Collection[int]) -> list[int]:
    """Those of the inputs that the body reads; the compiler drops a tie to any other."""
    read = {x.id for op in body.ops for x in op.inputs if isinstance(x, Value)}
    return [i for i in inputs if body.inputs[i].id in read]


def tie(arrays: Arrays, held: Collection[int], change: Collection[int]) -> Arrays:
    """The arrays, with those at ``held`` made to depend on the smallest of those in ``change``."""
    plain = [i for i in change if not jnp.issubdtype(arrays[i].dtype, jax.dtypes.extended)]
    if not held or not plain:
        return arrays
    at = [*held, min(plain, key=lambda i: arrays[i].size)]
    tied = dict(zip(at, lax.optimization_barrier(tuple(arrays[i] for i in at)), strict=True))
    return tuple(tied.get(i, array) for i, array in enumerate(arrays))


def _origins(x: Value | Literal, origins: dict[int, frozenset[int]]) -> frozenset[int] | None:
    """The unchanging inputs that ``x`` is computed from; None if it changes."""
    return frozenset() if isinstance(x, Literal) else origins.get(x.id)


def _exchanges(op: Op, solution: Solution) -> bool:
    """Whether an operation communicates, or what is in it if it is a loop: one that is the same in every trip moves."""
    return bool(solution.exchanging(op.id)) or any(map(_sends, op.bodies, repeat(solution)))


def _sends(body: Graph, solution: Solution) -> bool:
    made = (value.id for op in body.ops for value in op.outputs)
    sent = any(_communicates(value, solution) for value in (*(x.id for x in body.inputs), *made))
    return sent or any(_exchanges(op, solution) for op in body.ops)


def _communicates(value: int, solution: Solution) -> bool:
    return any(move.kind in COLLECTIVES for move in solution.trees.get(value, ()))
