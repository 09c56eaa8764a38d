"""Keeping collectives apart that were planned apart.

Remat computes a value twice, so that it need not be kept in between: the second time behind an
``optimization_barrier``, in which the compiler must not look for the first. Moves of the two are
planned twice as well: a weight is gathered for the forward pass, and again for the backward pass.
Some compilers (a CPU's) drop barriers before they look for equal expressions, and would gather
once and keep the whole weight. So what is moved again, or read again by an operation that
exchanges, passes a choice that is never made, and that the compiler cannot know of: the device's
number is never as large as that.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Graph, Literal, Op, Value, walk
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.rewrite import Table, substitute, values
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.interpreter import Arrays
from meshdsl.trace.passes.cse import expression

# ---- Apart -----------------------------------------------------------------------------------------------------------


_IDENTITIES = ("optimization_barrier", "constrain")
Moved = tuple[int, Layout]  # a value, and the layout it is moved to
Read = tuple[int, int]  # an operation, and the number of its operand


@dataclass(frozen=True)
class RepeatedCollectives:
    """What is sent again: how many equal ones come before, barriers left out. Firsts are not listed."""

    moves: Mapping[Moved, int]
    reads: Mapping[Read, int]


@dataclass
class _SentBefore:
    """What one graph has sent so far."""

    expressions: dict[object, Sequence[Value]] = field(default_factory=dict)
    moved: Counter[object] = field(default_factory=Counter)
    exchanged: dict[int, dict[int, int]] = field(default_factory=dict)


def repeated_collectives(graph: Graph, solution: Solution) -> RepeatedCollectives:
    """Of the graph and all bodies in it."""
    moves: dict[Moved, int] = {}
    reads: dict[Read, int] = {}
    for one in (graph, *(body for _, op in walk(graph) for body in op.bodies)):
        _collect(one, solution, moves, reads)
    return RepeatedCollectives(moves, reads)


def _collect(graph: Graph, solution: Solution, moves: dict[Moved, int], reads: dict[Read, int]) -> None:
    table: Table = {}
    seen = _SentBefore()
    for op in (None, *graph.ops):
        made = graph.inputs if op is None else op.outputs
        same = made if op is None else _first(substitute(op, table), seen.expressions)
        if op is not None and solution.exchanging(op.id):
            reads.update((read, before) for read, before in _reads(op, table, seen) if before)
        table.update({value.id: first for value, first in zip(made, same, strict=True) if first is not value})
        for value, first in zip(made, same, strict=True):
            moves.update((moved, before) for moved, before in _moves(value, first, solution, seen) if before)


def _reads(op: Op, table: Table, seen: _SentBefore) -> Iterator[tuple[Read, int]]:
    """Per operand, how many values that equal it were exchanged before; the same value is exchanged once."""
    for i, value in enumerate(op.inputs):
        first = table.get(value.id, value) if isinstance(value, Value) else value
        if isinstance(value, Value) and isinstance(first, Value):
            known = seen.exchanged.setdefault(first.id, {})
            yield (op.id, i), known.setdefault(value.id, len(known))


def _moves(value: Value, first: Value, solution: Solution, seen: _SentBefore) -> Iterator[tuple[Moved, int]]:
    """Per move of a value, how many equal ones there were before."""
    for move in (move for move in solution.trees.get(value.id, ()) if move.bytes):
        key = first.id, move.before, move.after
        yield (value.id, move.after), seen.moved[key]
        seen.moved[key] += 1


def _first(op: Op, seen: dict[object, Sequence[Value]]) -> Sequence[Value]:
    """The first values that are equal to the operation's results."""
    if op.name in _IDENTITIES and len(tuple(values(op.inputs))) == len(op.outputs):
        return tuple(values(op.inputs))
    return op.outputs if op.bodies else seen.setdefault(expression(op), op.outputs)


def opaque_copy(x: jax.Array, count: int, axis: str, size: int) -> jax.Array:
    """The same array, which the compiler holds for another one for every ``count``; ``size`` is the axis's."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jnp.where(lax.axis_index(axis) == size + count, jnp.zeros_like(x), x)


# ---- Invariant -------------------------------------------------------------------------------------------------------
# Keeping collectives inside the loops they were planned in.
#
# A collective of a value that is the same in every trip can run before the loop, once, and XLA
# moves it there. The plan has both to choose from, though: gathering a weight inside the loop
# costs more communication and less memory. What was planned inside stays inside when its
# operand passes an ``optimization_barrier`` together with a value that changes from trip to
# trip; the barrier computes nothing.


def varying(op: Op) -> list[int]:
    """Positions of the inputs of a loop's body that change between iterations: slices, and carries that are updated."""
    body, found = op.bodies[-1], list[int]()
    for port in loop_ports(op):
        changes = port.role in (PortRole.SLICE, PortRole.CARRY)
        for which, i in port.inputs if changes else ():
            if which == len(op.bodies) - 1 and not any(body.returned[j] is body.inputs[i] for _, j in port.outputs):
                found.append(i)
    return found


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


def tie_to_iteration(arrays: Arrays, held: Collection[int], change: Collection[int]) -> Arrays:
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
