"""Why XLA keeps exactly the planned collectives: it cannot merge repeated ones nor move them out of loops.

**Repeated collectives.** Rematerialisation computes a value twice so that it need not be stored: the second time behind
an ``optimization_barrier``, which hides that both are equal. Their reshards are planned twice as well: a weight is
gathered for the forward pass, and again for the backward pass. Some compilers (the CPU's) drop barriers before common
subexpression elimination, and would gather once and keep the whole weight live. So the operand of a repeated collective
passes an ``opaque_copy``: a ``where`` whose condition is never true, which the compiler cannot know, since it compares
the device's index with a number beyond the axis.

Two arrays that differ may have equal blocks: where an axis of 4 splits the first dim of ``x[4, 3]``, a device holds the
same elements of ``x`` and of its transpose. So views of one block count as equal, and so does what enters a user's
shard_map: a weight that its body gathers may be gathered outside, too. A user's function with a rule is one operation
to the planner, and to the compiler what it consists of.

**Collectives in loops.** A collective on a loop invariant can run once in front of the loop, and XLA moves it there.
But the plan had the choice: gathering a weight inside the loop costs more communication and less memory. A collective
that is planned inside stays inside when its operand passes an ``optimization_barrier`` together with a value that
changes between iterations; the barrier computes nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Graph, Literal, Op, Value, walk
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.manual import BOUNDARY
from meshdsl.ir.rewrite import Table, fresh_ids, look_up, substitute, values
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, P, S
from meshdsl.lowering.interpreter import Arrays
from meshdsl.trace.passes.cse import expression
from meshdsl.trace.passes.duplicate import CAST
from meshdsl.trace.read_jaxpr import Frame, read_graph
from meshdsl.trace.source import SourceContext

# ---- Repeated collectives --------------------------------------------------------------------------------------------


_IDENTITIES = ("optimization_barrier", "constrain")
_VIEWS = ("reshape", "transpose", "squeeze", "broadcast_in_dim", *BOUNDARY)
Block = tuple[int, Layout]  # of one device: a value id, and the layout of the value
Moved = tuple[int, Layout]  # a value id, and the layout that a reshard step leads to
Read = tuple[int, int]  # an op id, and the position of its operand


@dataclass(frozen=True)
class RepeatedCollectives:
    """Per repeated reshard step and exchanged operand, the number of equal earlier ones (barriers ignored)."""

    moves: Mapping[Moved, int]
    reads: Mapping[Read, int]


@dataclass
class _SentBefore:
    """The collectives of one graph so far."""

    expressions: dict[object, Sequence[Value]] = field(default_factory=dict)
    viewed: dict[Block, Block] = field(default_factory=dict)  # by view, the block that it is a view of
    cast: dict[Block, Block] = field(default_factory=dict)  # by cast, the block that it is a cast of
    moved: Counter[object] = field(default_factory=Counter)
    exchanged: dict[object, dict[int, int]] = field(default_factory=dict)

    def contents(self, value: Value, layout: Layout, mesh: Mesh) -> object:
        """Returns a key that is equal for blocks of one shape that hold the same elements in the same order."""
        block = value.id, layout
        return self.viewed.get(block, block), layout.local_shape(value.shape, mesh.sizes_by_name)

    def numbers(self, value: Value, layout: Layout) -> Block:
        """Returns the block whose numbers are those of this one, in another shape or in other floats perhaps."""
        block = value.id, layout
        while (source := self.cast.get(block) or self.viewed.get(block, block)) != block:
            block = source
        return block


def repeated_collectives(graph: Graph, solution: Solution) -> RepeatedCollectives:
    """Returns the repeated collectives of the graph and of all bodies in it, each by itself."""
    moves: dict[Moved, int] = {}
    reads: dict[Read, int] = {}
    ids = fresh_ids(graph)
    for one in (graph, *(body for _, op in walk(graph) for body in op.bodies)):
        _collect(one, solution, moves, reads, ids)
    return RepeatedCollectives(moves, reads)


def _collect(
    graph: Graph, solution: Solution, moves: dict[Moved, int], reads: dict[Read, int], ids: Iterator[int]
) -> None:
    table: Table = {}
    seen = _SentBefore()
    for op in (None, *graph.ops):
        made = graph.inputs if op is None else op.outputs
        inside = ids if any(_communicates(value.id, solution) for value in made) else None
        same = made if op is None else _first(substitute(op, table), seen.expressions, inside)
        if op is not None and solution.exchanging(op.id):
            reads.update((read, before) for read, before in _reads(op, table, solution, seen) if before)
        if op is not None and _is_view(op, solution):
            (source,) = values(substitute(op, table).inputs)
            block = source.id, solution.uses[op.id, 0]
            seen.viewed[same[0].id, solution.layouts[op.outputs[0].id]] = seen.viewed.get(block, block)
        if op is not None and op.name == CAST and isinstance(op.inputs[0], Value):
            (source,) = values(substitute(op, table).inputs)
            seen.cast[same[0].id, solution.layouts[op.outputs[0].id]] = source.id, solution.uses[op.id, 0]
        table.update({value.id: first for value, first in zip(made, same, strict=True) if first is not value})
        for value, first in zip(made, same, strict=True):
            moves.update((moved, before) for moved, before in _moves(value, first, solution, seen) if before)


def _is_view(op: Op, solution: Solution) -> bool:
    """Whether a device's result has the elements of its operand in the same order."""
    if op.name not in _VIEWS or not isinstance(op.inputs[0], Value):
        return False
    turned = op.params["dimensions"] if op.name == "reshape" else op.params.get("permutation")
    sizes, after = solution.mesh.sizes_by_name, solution.layouts[op.outputs[0].id]
    block = solution.uses[op.id, 0].local_shape(op.inputs[0].shape, sizes)
    order = [d for d in turned or () if block[d] != 1]
    return prod(block) == prod(after.local_shape(op.outputs[0].shape, sizes)) and order == sorted(order)


def _reads(op: Op, table: Table, solution: Solution, seen: _SentBefore) -> Iterator[tuple[Read, int]]:
    """Per operand, the number of other equal values that were exchanged before; one value is exchanged once.

    Where the user's collective is one that a reshard step could be, it counts among those.
    """
    for i, value in enumerate(op.inputs):
        first = table.get(value.id, value) if isinstance(value, Value) else value
        if isinstance(value, Value) and isinstance(first, Value):
            contents = seen.contents(first, solution.uses[op.id, i], solution.mesh)
            if move := _as_move(op):
                yield (op.id, i), seen.moved[contents, *move]
                seen.moved[contents, *move] += 1
            else:
                known = seen.exchanged.setdefault(contents, {})
                yield (op.id, i), known.setdefault(value.id, len(known))


def _as_move(op: Op) -> tuple[object, ...]:
    """Returns kind, axes and placements of the reshard step that the user's collective is like; empty if none."""
    if op.name not in ("all_gather", "psum") or op.params["groups"] is not None:
        return ()
    if op.name == "psum":
        return "all-reduce", op.params["moved"], P, B
    return ("all-gather", op.params["moved"], S(op.params["dim"]), B) if op.params["tiled"] else ()


def _moves(value: Value, first: Value, solution: Solution, seen: _SentBefore) -> Iterator[tuple[Moved, int]]:
    """Per reshard step of a value, the number of equal earlier ones.

    Parts that are rounded are sent as rows of bytes, whatever the shape and the floats of the block.
    """
    for move in (move for move in solution.trees.get(value.id, ()) if move.bytes):
        contents = seen.contents(first, move.before, solution.mesh)
        key: tuple[object, ...] = contents, move.kind, move.axes, move.source, move.target
        if move.format:
            key = seen.numbers(first, move.before), move.kind, move.axes, move.format
        yield (value.id, move.after), seen.moved[key]
        seen.moved[key] += 1


def _first(op: Op, seen: dict[object, Sequence[Value]], ids: Iterator[int] | None) -> Sequence[Value]:
    """The first values equal to the operation's results; ``ids`` are for those inside a function with a rule."""
    if op.name in _IDENTITIES and len(tuple(values(op.inputs))) == len(op.outputs):
        return tuple(values(op.inputs))
    if op.name == "ruled" and ids is not None:
        return _first_inside(op, seen, ids)
    return op.outputs if op.bodies else seen.setdefault(expression(op), op.outputs)


def _first_inside(op: Op, seen: dict[object, Sequence[Value]], ids: Iterator[int]) -> Sequence[Value]:
    """The first values equal to the results of a user's function with a rule, whose operations compilers see."""
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in op.inputs)
    traced = jax.make_jaxpr(op.params["ruled"].function)(*shapes)
    inside = read_graph(traced, Frame(ids, body=False), SourceContext())
    table: Table = {v.id: x for v, x in zip(inside.inputs, op.inputs, strict=True)}
    for each in inside.ops[:-1]:
        first = _first(replace(substitute(each, table), manual=op.manual), seen, ids)
        table.update({v.id: x for v, x in zip(each.outputs, first, strict=True)})
    found = zip(op.outputs, (look_up(x, table) for x in inside.returned), strict=True)
    return tuple(x if isinstance(x, Value) else v for v, x in found)


# ---- Collectives in loops --------------------------------------------------------------------------------------------


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
    """Returns the invariant inputs (not in ``change``) that a collective inside the body is computed from."""
    found = collective_sources(body, change, solution)
    for op in (op for op in body.ops if op.id in solution.prefetch):  # slices are gathered in front of these loops
        known = {value.id: i for i, value in enumerate(body.inputs) if i not in change}
        found += [frozenset({known[x.id]}) for x in values(op.inputs) if x.id in known]
    return sorted(frozenset().union(*found))


def collective_sources(body: Graph, change: Collection[int], solution: Solution) -> list[frozenset[int]]:
    """Returns, per collective of a body that no input in ``change`` matters to, the inputs that it is computed from."""
    origins = {value.id: frozenset({i}) for i, value in enumerate(body.inputs) if i not in change}
    exchanged: list[frozenset[int]] = []
    for op in body.ops:
        found = [_origins(x, origins) for x in op.inputs]
        known = [f for f in found if f is not None]
        ports = {e.port for row in solution.rows.get(op.id, ()) for e in row.collectives}
        exchanged += [f for i, f in enumerate(found) if f is not None and i in ports]
        if len(known) == len(found):
            origins.update((value.id, frozenset().union(*known)) for value in op.outputs)
    inside = {value.id for op in body.ops if _exchanges(op, solution) for value in op.outputs}
    moved = [sources for id, sources in origins.items() if id in inside or _communicates(id, solution)]
    return [*moved, *exchanged]


def read_by(body: Graph, inputs: Collection[int]) -> list[int]:
    """Returns those of the inputs that the body uses; the compiler would drop a barrier with any other."""
    read = {x.id for op in body.ops for x in op.inputs if isinstance(x, Value)}
    return [i for i in inputs if body.inputs[i].id in read]


def tie_to_iteration(arrays: Arrays, held: Collection[int], change: Collection[int]) -> Arrays:
    """Returns the arrays, with those at ``held`` made to depend on the smallest of those in ``change``."""
    plain = [i for i in change if not jnp.issubdtype(arrays[i].dtype, jax.dtypes.extended)]
    if not held or not plain:
        return arrays
    at = [*held, min(plain, key=lambda i: arrays[i].size)]
    tied = dict(zip(at, lax.optimization_barrier(tuple(arrays[i] for i in at)), strict=True))
    return tuple(tied.get(i, array) for i, array in enumerate(arrays))


def _origins(x: Value | Literal, origins: dict[int, frozenset[int]]) -> frozenset[int] | None:
    """The invariant inputs that ``x`` is computed from; None if it changes between iterations."""
    return frozenset() if isinstance(x, Literal) else origins.get(x.id)


def _exchanges(op: Op, solution: Solution) -> bool:
    """Whether an operation communicates, or any operation in its bodies: XLA also moves invariant loops."""
    return bool(solution.exchanging(op.id)) or any(map(_sends, op.bodies, repeat(solution)))


def _sends(body: Graph, solution: Solution) -> bool:
    made = (value.id for op in body.ops for value in op.outputs)
    sent = any(_communicates(value, solution) for value in (*(x.id for x in body.inputs), *made))
    return sent or any(_exchanges(op, solution) for op in body.ops)


def _communicates(value: int, solution: Solution) -> bool:
    return any(move.kind in COLLECTIVES for move in solution.trees.get(value, ()))
