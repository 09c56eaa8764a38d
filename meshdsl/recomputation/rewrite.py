"""Compute forward values again in the backward pass, given the operations that are to run twice.

``recomputing(program, ops)`` is the program in which no value of these operations is kept for the backward pass:
wherever backward operations read one, copies of the operations compute it from what is kept. Any set of operations in
``recomputable`` may be given; values of all others are kept as far as a copy reads them.

    y = tanh x                                      y = tanh x
    z = sin y                                       z = sin y
    ...                                ops = {tanh} ...
    a = backward of z                               a = backward of z
    b = mul a y        reads y                      x' = optimization_barrier x
                                                    y' = tanh x'
                                                    b = mul a y'

Copies stand in front of the first backward operation that reads them. They bind the same primitives with the same
parameters on the same operands, random keys included, so they give the same numbers. Compilers would see that, merge
both and keep ``y``; so kept values pass a barrier, as they do in ``jax.checkpoint``. A parameter needs one only where a
copy reads nothing else: elsewhere the first and the second product may share a gathered weight.

In a loop over layers the forward pass is a scan that stacks what the backward pass, another scan, reads slice by slice
(``LayerLoops``). Copies stand in the body of the second, and read the slices, constants and stacks of the first; what a
copy reads of the carry is stacked. Different loops are not merged, so nothing needs a barrier there.

Of operations with several results some can be spared: these are kept, and a copy of a loop does not compute them.

Operations and results are given by their ids in ``program``.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.lax import optimization_barrier_p

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value, walk
from meshdsl.ir.index import producers
from meshdsl.ir.loops import LoopPort, PortRole, loop_ports, reading_more, with_ports
from meshdsl.ir.rewrite import (
    Table,
    copied,
    defined,
    fresh_ids,
    new_value,
    renumber,
    returning,
    substitute,
    values,
    with_ops,
)
from meshdsl.recomputation.hosting import hosting
from meshdsl.recomputation.levels import LayerLoops, is_mixed, layer_loops, reads_residual
from meshdsl.trace.annotate import BACKWARD, count_trips
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.read_jaxpr import RECOMPUTED, REMATTED


class RecomputedResidual(NamedTuple):
    """A residual that is computed again.

    Args:
      value: its id in the program before; of a residual that a loop stacks, that in the body.
      originals: ids in the program before of all values that are computed again for it.
      copies: these, in the program after.
    """

    value: int
    originals: tuple[int, ...]
    copies: tuple[Value, ...]


@dataclass(frozen=True)
class Recomputing:
    """A program that recomputes.

    Args:
      program: the rewritten program.
      residuals: what is computed again, in the order of the backward pass.
    """

    program: TracedProgram
    residuals: tuple[RecomputedResidual, ...]


def recomputing(
    program: TracedProgram, ops: Collection[int], spared: Collection[int] = (), hosted: Collection[int] = ()
) -> Recomputing:
    """Returns the program in which the backward pass computes the results of some forward operations again.

    Args:
      ops: ids of operations, all of them recomputable.
      spared: ids of results of these that are kept all the same.
      hosted: ids of values that are kept in the host's memory, all of them hostable.
    """
    if not ops and not hosted:
        return Recomputing(program, ())
    graph = copied(program.graph)
    rewriter = _Rewriter(frozenset(ops), frozenset(spared), fresh_ids(graph))
    made = dce(rewriter.level(graph))
    made = hosting(made, hosted, rewriter.ids) if hosted else made
    count_trips(made)
    found = _alive(rewriter.residuals, made)
    renumber(made)
    check_graph(made)
    return Recomputing(replace(program, graph=made), found)


def _alive(residuals: Mapping[int, dict[int, Value]], graph: Graph) -> tuple[RecomputedResidual, ...]:
    """The copies that dead code elimination left."""
    here = {id(v) for v in defined(graph)}
    left = ((value, {v: w for v, w in made.items() if id(w) in here}) for value, made in residuals.items())
    return tuple(RecomputedResidual(value, tuple(made), tuple(made.values())) for value, made in left if made)


class _Rewriter:
    """Rewrites levels.

    Attributes:
      residuals: per residual that is computed again, by its id, the values computed for it, with their copies.
    """

    def __init__(self, ops: frozenset[int], spared: frozenset[int], ids: Iterator[int]) -> None:
        self.ops, self.spared, self.ids = ops, spared, ids
        self.residuals: dict[int, dict[int, Value]] = {}

    def level(self, graph: Graph) -> Graph:
        """Returns a level, rewritten, with the levels inside."""
        graph = self._with_layer_loops(graph)
        copies = _Copies(graph, self, _Barriers(graph, self.ids).front)
        ops: list[Op] = []
        for op in graph.ops:
            if reads_residual(op):
                after = list[Op]()
                while ops and _expands(ops[-1]):
                    after.append(ops.pop())
                for x in values(op.inputs):
                    ops += copies.of(x)
                ops += reversed(after)
                op = substitute(op, copies.table)
            ops.append(replace(op, bodies=tuple(map(self.level, op.bodies))) if is_mixed(op) else op)
        return with_ops(graph, ops)

    def _with_layer_loops(self, graph: Graph) -> Graph:
        made: dict[int, Op] = {}
        stacks = defaultdict[int, dict[int, tuple[Value, Value]]](dict)
        for loops in layer_loops(graph):
            forward = made.setdefault(loops.forward.id, loops.forward)
            backward = made.get(loops.backward.id, loops.backward)
            made[backward.id] = self._recomputing(loops._replace(backward=backward), stacks[forward.id])
        for id, more in stacks.items():
            made[id] = _stacking(made[id], list(more.values()))
        return with_ops(graph, (made.get(op.id, op) for op in graph.ops))

    def _recomputing(self, loops: LayerLoops, stacks: dict[int, tuple[Value, Value]]) -> Op:
        """Returns the backward scan with copies of operations of the forward scan.

        Args:
          stacks: what the forward scan is to stack besides, as (value in its body, stack), by the id of the value.
        """
        reader = _SliceReader(loops.forward, loops.backward, stacks, self.ids)
        copies = _Copies(
            loops.forward.bodies[0], self, lambda op, _: ([], {x.id: reader(x) for x in values(op.inputs)})
        )
        read, body = {each.slice.id: each.value for each in loops.residuals}, loops.backward.bodies[0]
        ops: list[Op] = []
        for op in body.ops:
            inside = [read[x.id] for x in values(op.inputs) if x.id in read]
            for x in inside:
                ops += copies.of(x)
            again = {slice: copies.table[x.id] for slice, x in read.items() if x.id in copies.table}
            ops.append(substitute(op, again))
        return reader.extended(with_ops(body, ops)) if copies.table else loops.backward


# ---- Copies ----------------------------------------------------------------------------------------------------------

Front = Callable[[Op, Table], tuple[list[Op], Table]]


class _Copies:
    """Copies of the operations of one graph, each made once.

    Args:
      front: for an operation whose copy is to be made, and the copies so far, the operations in front of the copy, and
        what the copy reads in place of operands that are kept.

    Attributes:
      table: the copies of values, by the ids of these.
    """

    def __init__(self, graph: Graph, rewriter: _Rewriter, front: Front) -> None:
        self.rewriter, self.front = rewriter, front
        self.table: Table = {}
        self._made = producers(graph)
        self._order = {op.id: i for i, op in enumerate(graph.ops)}

    def of(self, x: Value) -> list[Op]:
        """Returns the operations that compute a value again, in order; none if it is kept or computed already."""
        ops, open_values, rewriter = dict[int, Op](), [x], self.rewriter
        while open_values:
            value = open_values.pop()
            op = self._made.get(value.id) if value.id not in rewriter.spared else None
            if op is not None and op.id in rewriter.ops and op.id not in ops and value.id not in self.table:
                ops[op.id] = op
                open_values += values(op.inputs)
        found, again = list[Op](), dict[int, Value]()
        for op in sorted(ops.values(), key=lambda op: self._order[op.id]):
            ahead, kept = self.front(op, self.table)
            copy = _again(op, {**kept, **self.table}, rewriter.ids)
            made = zip(op.outputs, copy.outputs, strict=True)
            again.update((v.id, w) for v, w in made if v.id not in rewriter.spared)
            self.table.update(again)
            found += [*ahead, copy]
        if again:
            rewriter.residuals.setdefault(x.id, {}).update(again)
        return found


def _expands(op: Op) -> bool:
    """Whether a backward operation makes a large array of a small one; what is computed again then waits for that."""
    return op.phase == BACKWARD and op.name == "broadcast_in_dim" and REMATTED not in op.scope


def _again(op: Op, table: Table, ids: Iterator[int]) -> Op:
    """Returns a copy of an operation on other operands."""
    copy = substitute(op, table)
    outputs, bodies = tuple(new_value(v, ids) for v in op.outputs), tuple(map(copied, op.bodies))
    for _, inner in (each for body in bodies for each in walk(body)):
        inner.phase, inner.scope = BACKWARD, _scope(inner)
    return replace(copy, outputs=outputs, bodies=bodies, phase=BACKWARD, scope=_scope(op))


def _scope(op: Op) -> str:
    return f"{op.scope}/{REMATTED}"


class _Barriers:
    """Barriers in front of copies that stand in the same graph, one for each kept value."""

    def __init__(self, graph: Graph, ids: Iterator[int]) -> None:
        self.ids, self.behind = ids, dict[int, Value]()
        given = (v for op in graph.ops if op.name == "constant" for v in op.outputs)
        self.inputs = {v.id for v in (*graph.inputs, *given)}

    def front(self, op: Op, copies: Table) -> tuple[list[Op], Table]:
        """As ``_Copies`` takes it. Inputs need no barrier where the copy is told apart by another operand."""
        kept = [x for x in values(op.inputs) if x.id not in copies]
        apart = [x for x in kept if x.id not in self.inputs]
        if not apart and len(kept) == len(list(values(op.inputs))):
            apart = kept[:1]
        new = {x.id: x for x in apart if x.id not in self.behind}
        self.behind.update((x.id, new_value(x, self.ids)) for x in new.values())
        barriers = [self._barrier(op, x) for x in new.values()]
        return barriers, {x.id: self.behind[x.id] for x in apart}

    def _barrier(self, op: Op, x: Value) -> Op:
        scope = f"{op.scope}/{RECOMPUTED}"
        return Op(
            0,
            "optimization_barrier",
            optimization_barrier_p,
            {},
            (x,),
            (self.behind[x.id],),
            op.source,
            BACKWARD,
            scope,
        )


# ---- Loops over layers -----------------------------------------------------------------------------------------------


class _SliceReader:
    """Gives the body of a backward scan what the body of the forward scan reads and makes in the same iteration."""

    def __init__(self, forward: Op, backward: Op, stacks: dict[int, tuple[Value, Value]], ids: Iterator[int]) -> None:
        self.forward, self.backward, self.stacks, self.ids = forward, backward, stacks, ids
        body, ports = forward.bodies[0], list(loop_ports(forward))
        self._given = {body.inputs[i].id: port for port in ports for _, i in port.inputs}
        self._stacked: dict[int, Value] = {
            x.id: forward.outputs[port.result]
            for port in ports
            if port.role is PortRole.STACK and isinstance(x := body.returned[port.outputs[0][1]], Value)
        }
        self._known: dict[tuple[PortRole, int], Value] = {
            (port.role, backward.inputs[port.operand].id): backward.bodies[0].inputs[port.inputs[0][1]]
            for port in loop_ports(backward)
            if port.role in (PortRole.CONST, PortRole.SLICE) and isinstance(backward.inputs[port.operand], Value)
        }
        self._more: list[tuple[PortRole, Atom, Value]] = []  # role, operand, input of the body

    def __call__(self, x: Value) -> Atom:
        """Returns what the backward body has for a value of the forward body."""
        port = self._given.get(x.id)
        if port is not None and port.role is not PortRole.CARRY:
            operand = self.forward.inputs[port.operand]
            return self._read(port.role, operand, x) if isinstance(operand, Value) else operand
        if x.id not in self._stacked:
            shape = (self.forward.params["length"], *x.shape)
            _, self._stacked[x.id] = self.stacks.setdefault(x.id, (x, Value(next(self.ids), shape, x.dtype)))
        return self._read(PortRole.SLICE, self._stacked[x.id], x)

    def _read(self, role: PortRole, operand: Value, like: Value) -> Value:
        if (role, operand.id) not in self._known:
            inside = self._known[role, operand.id] = new_value(like, self.ids)
            self._more.append((role, operand, inside))
        return self._known[role, operand.id]

    def extended(self, body: Graph) -> Op:
        """Returns the backward scan with another body, and with what this was asked for."""
        return reading_more(self.backward, body, self._more)


def _stacking(op: Op, more: Sequence[tuple[Value, Value]]) -> Op:
    """Returns a scan that stacks more values of its body, given with the stacks."""
    body, results, ports_before = op.bodies[0], len(op.outputs), list(loop_ports(op))
    returned = len(body.returned)
    ports = [LoopPort(PortRole.STACK, outputs=((0, returned + k),), result=results + k) for k in range(len(more))]
    body = returning(body, (*body.returned, *(x for x, _ in more)))
    op = replace(op, outputs=(*op.outputs, *(stack for _, stack in more)))
    return with_ports(op, [*ports_before, *ports], (body,))
