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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.layouts.layout import Layout
from meshdsl.planner.solution import Solution
from meshdsl.trace.common import expression
from meshdsl.trace.graphs import Table, substitute, values

_IDENTITIES = ("optimization_barrier", "constrain")
Moved = tuple[int, Layout]  # a value, and the layout it is moved to
Read = tuple[int, int]  # an operation, and the number of its operand


@dataclass(frozen=True)
class Repeats:
    """What is sent again: how many equal ones come before, barriers left out. Firsts are not listed."""

    moves: Mapping[Moved, int]
    reads: Mapping[Read, int]


@dataclass
class _Seen:
    """What one graph has sent so far."""

    expressions: dict[object, Sequence[Value]] = field(default_factory=dict)
    moved: Counter[object] = field(default_factory=Counter)
    exchanged: dict[int, dict[int, int]] = field(default_factory=dict)


def repeats(graph: Graph, solution: Solution) -> Repeats:
    """Of the graph and all bodies in it."""
    moves: dict[Moved, int] = {}
    reads: dict[Read, int] = {}
    for one in (graph, *(body for _, op in walk(graph) for body in op.bodies)):
        _collect(one, solution, moves, reads)
    return Repeats(moves, reads)


def _collect(graph: Graph, solution: Solution, moves: dict[Moved, int], reads: dict[Read, int]) -> None:
    table: Table = {}
    seen = _Seen()
    for op in (None, *graph.ops):
        made = graph.inputs if op is None else op.outputs
        same = made if op is None else _first(substitute(op, table), seen.expressions)
        if op is not None and solution.exchanging(op.id):
            reads.update((read, before) for read, before in _reads(op, table, seen) if before)
        table.update({value.id: first for value, first in zip(made, same, strict=True) if first is not value})
        for value, first in zip(made, same, strict=True):
            moves.update((moved, before) for moved, before in _moves(value, first, solution, seen) if before)


def _reads(op: Op, table: Table, seen: _Seen) -> Iterator[tuple[Read, int]]:
    """Per operand, how many values that equal it were exchanged before; the same value is exchanged once."""
    for i, value in enumerate(op.inputs):
        first = table.get(value.id, value) if isinstance(value, Value) else value
        if isinstance(value, Value) and isinstance(first, Value):
            known = seen.exchanged.setdefault(first.id, {})
            yield (op.id, i), known.setdefault(value.id, len(known))


def _moves(value: Value, first: Value, solution: Solution, seen: _Seen) -> Iterator[tuple[Moved, int]]:
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


def another(x: jax.Array, count: int, axis: str, size: int) -> jax.Array:
    """The same array, which the compiler holds for another one for every ``count``; ``size`` is the axis's."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return jnp.where(lax.axis_index(axis) == size + count, jnp.zeros_like(x), x)
