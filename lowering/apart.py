"""Keeping collectives apart that were planned apart.

Remat computes a value twice, so that it need not be kept in between: the second time behind an
``optimization_barrier``, in which the compiler must not look for the first. Moves of the two are
planned twice as well: a weight is gathered for the forward pass, and again for the backward pass.
Some compilers (a CPU's) drop barriers before they look for equal expressions, and would gather
once and keep the whole weight. So what is moved again passes a choice that is never made, and that
the compiler cannot know of: the device's number is never as large as that.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Graph, Op, Value, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.move import Move
from meshdsl.lowering.moves import Sizes
from meshdsl.trace.common import expression
from meshdsl.trace.graphs import Table, substitute, values

_IDENTITIES = ("optimization_barrier", "constrain")
Moved = tuple[int, Layout]  # a value, and the layout it is moved to


def repeats(graph: Graph, trees: Mapping[int, Sequence[Move]]) -> dict[Moved, int]:
    """By value and the layout it is moved to: how many equal moves come before, barriers left out; 0 is not listed."""
    bodies = (body for _, op in walk(graph) for body in op.bodies)
    return {moved: count for one in (graph, *bodies) for moved, count in _repeats(one, trees).items()}


def _repeats(graph: Graph, trees: Mapping[int, Sequence[Move]]) -> dict[Moved, int]:
    table: Table = {}
    seen: dict[object, Sequence[Value]] = {}
    count: Counter[tuple[int, Layout, Layout]] = Counter()
    found: dict[Moved, int] = {}
    for op in (None, *graph.ops):
        made = graph.inputs if op is None else op.outputs
        same = made if op is None else _first(substitute(op, table), seen)
        table.update({value.id: first for value, first in zip(made, same, strict=True) if first is not value})
        for value, first in zip(made, same, strict=True):
            for move in (move for move in trees.get(value.id, ()) if move.bytes):
                found[value.id, move.after] = count[first.id, move.before, move.after]
                count[first.id, move.before, move.after] += 1
    return {moved: before for moved, before in found.items() if before}


def _first(op: Op, seen: dict[object, Sequence[Value]]) -> Sequence[Value]:
    """The first values that are equal to the operation's results."""
    if op.name in _IDENTITIES and len(tuple(values(op.inputs))) == len(op.outputs):
        return tuple(values(op.inputs))
    return op.outputs if op.bodies else seen.setdefault(expression(op), op.outputs)


def another(x: jax.Array, count: int, move: Move, sizes: Sizes) -> jax.Array:
    """The same array, which the compiler holds for another one for every ``count``."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    axis = move.axes[0]
    return jnp.where(lax.axis_index(axis) == sizes[axis] + count, jnp.zeros_like(x), x)
