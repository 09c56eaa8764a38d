"""Moving operations to the forward pass of a step, by global value numbering.

An operation moves to a ``ForwardGraph``, whose values it reads. If the graph has an operation with the same primitive,
parameters and operands, its results are the results of that one; else it is placed behind what moved last, and behind
its operands. Random keys are operands like others. So one after the other of a sequence of operations moves.

A scan or conditional moves into one that reads and makes what it reads, a ``ForwardLoop``: the operations of its bodies
move to the bodies there, and what it returns becomes a carry, a stack or a result more, unless there is an equal one.
Carries with equal initial values are taken to be equal, which is right if their next values turn out to be equal
(Alpern, Wegman and Zadeck 1988, "Detecting equality of variables in programs"); else they are paired otherwise.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.loops import LoopPort, PortRole, loop_ports, with_ports
from meshdsl.ir.rewrite import Table, look_up, new_value, returning, substitute, values
from meshdsl.trace.passes.cse import expression, identity
from meshdsl.trace.read_jaxpr import REMATTED

TRANSPOSED = "transpose("  # in the name stack of the backward pass
Position = tuple[int, int]  # in a graph: number of an operation that is there, and of one that has moved behind it
_INPUT = (-1, 0)
_GIVEN = (PortRole.CONST, PortRole.SLICE, PortRole.OPERAND)  # roles of what a body reads and does not change


class ForwardGraph:
    """A graph of the forward pass: operations find their equals here, or move here."""

    def __init__(self, graph: Graph, ids: Iterator[int]) -> None:
        self.graph, self.ids = graph, ids
        self.position: dict[int, Position] = {v.id: _INPUT for v in graph.inputs}
        self.makers: dict[int, Op] = {}
        self.cursor = _INPUT  # of what moved last
        self._first: Table = {}  # per value, the first that is equal
        self._equal: dict[Any, tuple[Value, ...] | None] = {}  # per expression, its results; None if they differ by run
        self._ops: list[Op] = []
        self._moved: dict[int, list[Op]] = defaultdict(list)
        self._loops: dict[int, ForwardLoop] = {}  # by id of the operation object

    def first(self, x: Atom) -> Atom:
        """Returns the first value that is equal to a value of this graph."""
        return look_up(x, self._first)

    def merge(self, x: Value, first: Atom) -> None:
        """Notes that a value equals an earlier one, or a number."""
        if first is not x:
            self._first[x.id] = self.first(first)

    def restart(self) -> None:
        """Begins a sequence of operations that has nothing to do with what moved last."""
        self.cursor = _INPUT

    def append(self, op: Op, is_known: bool = True) -> None:
        """Appends the next operation of the graph.

        Args:
          is_known: it belongs to the forward pass.
        """
        self._ops.append(op)
        if is_known:
            self._enter(op, (len(self._ops) - 1, 0))

    def _enter(self, op: Op, position: Position) -> None:
        self.position.update((v.id, position) for v in op.outputs)
        self.makers.update((v.id, op) for v in op.outputs)
        key = self._key(op)
        if op.effects and op.outputs:  # two runs are two results, of which nothing says which one is meant
            self._equal[key] = None if key in self._equal else op.outputs
        else:
            found = self._equal.setdefault(key, op.outputs) or ()
            for v, first in zip(op.outputs, found, strict=True) if found is not op.outputs else ():
                self.merge(v, first)
        if op.name in ("scan", "cond"):
            self._loops[id(op)] = ForwardLoop(op, position, self)

    def _key(self, op: Op) -> Any:
        return expression(substitute(op, self._first), always=True)

    def find(self, op: Op) -> Sequence[Atom] | None:
        """Returns the results of an operation that equals ``op``, whose operands are values of this graph, if any."""
        found = self._equal.get(self._key(op))
        return None if found is None else tuple(map(self.first, found))

    def move(self, op: Op) -> Sequence[Atom]:
        """Moves an operation, whose operands are values of this graph, here; returns its results."""
        found = self.find(op)
        if found is not None:
            self.cursor = max([self.position[v.id] for v in values(found)], default=self.cursor)
            return found
        loop = self.loop_for(op, op.inputs, is_whole=True) if op.bodies else None
        if loop is not None:
            self.cursor = loop.position
            return loop.move_in(op)
        op = _of_forward_pass(op, self.ids)
        at, _ = max([self.cursor, *(self.position[x.id] for x in values(op.inputs))])
        self._moved[at].append(op)
        self.cursor = at, len(self._moved[at])
        self._enter(op, self.cursor)
        return op.outputs

    def loop_for(self, op: Op, operands: Sequence[Atom | None], is_whole: bool) -> "ForwardLoop | None":
        """Returns the loop or conditional that reads and stacks most of what ``op`` reads; None if none does.

        Args:
          operands: of ``op``, as values of this graph, as far as it knows them.
          is_whole: all of ``op`` is to move there.
        """
        alike = ((loop.likeness(op, operands, is_whole), loop) for loop in self._loops.values())
        (count, *_), best = max(alike, key=lambda each: each[0], default=((0,), None))
        return best if count else None

    def made(self) -> tuple[Op, ...]:
        """Returns all operations, those that moved among them."""
        front = self._moved.get(-1, [])
        ops = [*front, *(each for i, op in enumerate(self._ops) for each in (op, *self._moved.get(i, ())))]
        return tuple(self._loops[id(op)].made() if id(op) in self._loops else op for op in ops)


def _of_forward_pass(op: Op, ids: Iterator[int]) -> Op:
    """An operation as one of the forward pass, with results of its own."""
    bodies = tuple(_own(body, ids) for body in op.bodies)
    outputs = tuple(new_value(v, ids) for v in op.outputs)
    return replace(op, outputs=outputs, bodies=bodies, scope=_forward_scope(op.scope))


def _own(body: Graph, ids: Iterator[int]) -> Graph:
    """A body as one of the forward pass, with values of its own."""
    inputs = tuple(new_value(v, ids) for v in body.inputs)
    table: Table = {v.id: w for v, w in zip(body.inputs, inputs, strict=True)}
    ops: list[Op] = []
    for op in body.ops:
        ops.append(_of_forward_pass(substitute(op, table), ids))
        table.update((v.id, w) for v, w in zip(op.outputs, ops[-1].outputs, strict=True))
    return replace(body, inputs=inputs, ops=tuple(ops))


def _forward_scope(scope: str) -> str:
    """The name stack of an operation if autodiff had neither recomputed nor transposed it."""
    scope = "/".join(part for part in scope.split("/") if part != REMATTED)
    while TRANSPOSED in scope:
        before, _, inside = scope.partition(TRANSPOSED)
        depths = accumulate(({"(": 1, ")": -1}.get(c, 0) for c in inside), initial=1)
        end = next((i for i, depth in enumerate(depths) if not depth), len(inside) + 1)
        scope = before + inside[: end - 1] + inside[end:]
    return scope


# ---- Loops and conditionals ------------------------------------------------------------------------------------------


class ForwardLoop:
    """A scan or conditional of the forward pass, which grows by what moves into its bodies.

    Args:
      outside: the graph in which it is.
    """

    def __init__(self, op: Op, position: Position, outside: ForwardGraph) -> None:
        self.op, self.position, self.outside = op, position, outside
        self._inputs, self._outputs = list(op.inputs), list(op.outputs)
        self._ports = list(loop_ports(op))
        self._bodies: list[_LoopBody] = []
        made = (port for port in self._ports if port.role in (PortRole.STACK, PortRole.RESULT))
        self._made_by = {op.outputs[port.result].id: port for port in made}
        self._origins: dict[int, LoopPort] = {}  # per input of a body, the port by which it comes in
        self._results: dict[Any, Value] = {}  # per values that the bodies return
        self._copies: Table = {}  # of invariants, in front of the loop

    @property
    def bodies(self) -> "list[_LoopBody]":
        """The bodies, read when something first moves in."""
        if not self._bodies:
            self._bodies = [_LoopBody(self, b) for b in range(len(self.op.bodies))]
            first: dict[Any, LoopPort] = {}
            for port in self._ports:
                if port.role in _GIVEN:
                    x = self._inputs[port.operand]
                    same = first.setdefault(self._key(port.role, x), port)
                    for (b, i), (_, j) in zip(port.inputs, same.inputs, strict=True):
                        body = self._bodies[b]
                        body.merge(body.inputs[i], x if isinstance(x, Literal) else body.inputs[j])
            for body in self._bodies:
                body.read()
            for port in self._ports:
                self._origins.update((self._bodies[b].inputs[i].id, port) for b, i in port.inputs)
                inside = tuple(self._bodies[b].returned[j] for b, j in port.outputs)
                if port.role in (PortRole.STACK, PortRole.RESULT):
                    self._results.setdefault(self._result_key(inside), self._outputs[port.result])
        return self._bodies

    def _key(self, role: PortRole, operand: Atom) -> Any:
        return role, identity(self.outside.first(operand))

    def _result_key(self, inside: Sequence[Atom]) -> Any:
        return tuple(identity(body.first(x)) for body, x in zip(self.bodies, inside, strict=True))

    def likeness(self, op: Op, operands: Sequence[Atom | None], is_whole: bool) -> tuple[int, bool, int]:
        """Returns how many operands of an operation this one reads alike or has made; none if ``op`` is no such loop.

        Of loops that are equal in that, one of the same line is preferred, then one that reads little else.

        Args:
          operands: of ``op``, as values of the graph around this loop; None for those that are not known there.
          is_whole: all of ``op`` is to move in.
        """
        kind = op.name, len(op.bodies), op.params.get("length"), is_whole and op.params.get("reverse")
        mine = self.op.params
        if kind != (self.op.name, len(self.op.bodies), mine.get("length"), is_whole and mine.get("reverse")):
            return 0, False, 0
        read = {self._key(port.role, self._inputs[port.operand]) for port in self._ports if port.operand >= 0}
        alike = 0
        for port in loop_ports(op):
            x = operands[port.operand] if port.operand >= 0 else None
            if x is None:
                continue
            is_read = self._key(port.role, x) in read or self._made(port.role, x) is not None
            if not is_read and (port.role is PortRole.PREDICATE or (is_whole and not self._reaches(x))):
                return 0, False, 0
            alike += is_read and (isinstance(x, Value) or port.role is PortRole.PREDICATE)
        return alike, op.source == self.op.source, -len(self.op.inputs)

    def _reaches(self, x: Atom) -> bool:
        """Whether a value is there before the loop."""
        return isinstance(x, Literal) or self.outside.position[x.id] < self.position

    def _made(self, role: PortRole, x: Atom) -> LoopPort | None:
        """The port by which the loop itself makes what is to be read: stacks, or the results of a conditional."""
        if role not in (PortRole.SLICE, PortRole.OPERAND) or not isinstance(x, Value):
            return None
        return self._made_by.get(x.id)

    def inside(self, role: PortRole, x: Atom) -> tuple[Atom, ...] | None:
        """Returns what each body has for a value of the graph around it; None if that is not there before the loop."""
        made = self._made(role, x)
        if made is not None:
            return tuple(self.bodies[b].first(self.bodies[b].returned[j]) for b, j in made.outputs)
        if isinstance(x, Literal):
            return (x,) * len(self.bodies)
        key, ports = self._key(role, x), (port for port in self._ports if port.role is role)
        port = next((port for port in ports if self._key(role, self._inputs[port.operand]) == key), None)
        if port is None:
            if not self._reaches(x):
                return None
            shape = x.shape[1:] if role is PortRole.SLICE else x.shape
            inputs = [Value(next(self.outside.ids), shape, x.dtype) for _ in self.bodies]
            where = tuple(body.add_input(v, role) for body, v in zip(self.bodies, inputs, strict=True))
            port = LoopPort(role, len(self._inputs), tuple(enumerate(where)))
            self._inputs.append(x)
            self._ports.append(port)
            self._origins.update((self.bodies[b].inputs[i].id, port) for b, i in port.inputs)
        return tuple(self.bodies[b].first(self.bodies[b].inputs[i]) for b, i in port.inputs)

    def find_in_front(self, op: Op, b: int) -> tuple[Atom, ...] | None:
        """Returns what body ``b`` has for the results of an equal operation in front of the loop, if there is one."""
        role = PortRole.OPERAND if self.op.name == "cond" else PortRole.CONST
        ports = (port for port in self._ports if port.role is role)
        given = {self.bodies[b].inputs[port.inputs[b][1]].id: self._inputs[port.operand] for port in ports}
        if any(x.id not in given for x in values(op.inputs)):
            return None
        found = self.outside.find(substitute(op, given))
        read = [self.inside(role, x) for x in found or ()]
        return tuple(x[b] for x in read if x) if found is not None and all(read) else None

    def outside_of(self, x: Value) -> tuple[PortRole, Atom]:
        """Returns how another scan reads a value of the body, and of which value around the loops."""
        body, origin = self.bodies[0], self._origins.get(x.id)
        if origin is not None and origin.role in (PortRole.CONST, PortRole.SLICE):
            return origin.role, self._inputs[origin.operand]
        if body.is_invariant(x):
            outside = self._invariant(x)
            body.hoist(x, self.inside(PortRole.CONST, outside))
            return PortRole.CONST, outside
        return PortRole.SLICE, self._result(PortRole.STACK, (x,), (self.op.params["length"], *x.shape))

    def _invariant(self, x: Value) -> Atom:
        """The same value in the graph around the loop, computed there in front of it."""
        if x.id not in self._copies:
            op, origin = self.bodies[0].makers.get(x.id), self._origins.get(x.id)
            if origin is not None:
                self._copies[x.id] = self._inputs[origin.operand]
            elif op is not None:
                self.outside.restart()
                results = self.outside.move(substitute(op, {v.id: self._invariant(v) for v in values(op.inputs)}))
                self._copies.update((v.id, result) for v, result in zip(op.outputs, results, strict=True))
        return self._copies[x.id]

    def _result(self, role: PortRole, inside: tuple[Atom, ...], shape: tuple[int, ...]) -> Value:
        """The result of the loop that is this in each body; the stack of it, of a scan."""
        key = self._result_key(inside)
        if key in self._results:
            return self._results[key]
        made = self._results[key] = Value(next(self.outside.ids), shape, inside[0].dtype)
        where = tuple(body.add_returned(x) for body, x in zip(self.bodies, inside, strict=True))
        port = LoopPort(role, outputs=tuple(enumerate(where)), result=len(self._outputs))
        self._made_by[made.id] = port
        self._ports.append(port)
        self._outputs.append(made)
        self.outside.position[made.id] = self.position
        return made

    # -- What moves in as a whole

    def move_in(self, op: Op) -> Sequence[Atom]:
        """Moves all that a scan or conditional computes into this one, and returns its results."""
        other, carries = set[tuple[int, int]](), {p.result: p for p in self._ports if p.role is PortRole.CARRY}
        while True:
            pairs = self._paired_carries(op, other)
            tables = self._read_alike(op, pairs)
            for body, inner, table in zip(self.bodies, op.bodies, tables, strict=True):
                body.restart()
                move_all(inner.ops[:-1], body, table)
            ends = [[look_up(x, table) for x in inner.returned] for inner, table in zip(op.bodies, tables, strict=True)]
            ports = list(loop_ports(op))
            wrong = [
                (port.result, mine)
                for port in ports
                if port.role is PortRole.CARRY and (mine := pairs.get(port.result)) is not None
                if identity(ends[0][port.outputs[0][1]]) != self._carried(carries[mine])
            ]
            if not wrong:
                break
            other.add(wrong[0])
        return [self._result_of(op, port, pairs, tables, ends) for port in ports if port.result >= 0]

    def _paired_carries(self, op: Op, other: set[tuple[int, int]]) -> dict[int, int]:
        """The carries of a scan that are taken to be carries of this one, by their results.

        Args:
          other: pairs that have turned out to differ.
        """
        found = dict[int, int]()
        mine = [port for port in self._ports if port.role is PortRole.CARRY]
        for port in loop_ports(op):
            if port.role is PortRole.CARRY:
                key = self._key(port.role, op.inputs[port.operand])
                alike = (p.result for p in mine if self._key(p.role, self._inputs[p.operand]) == key)
                free = (r for r in alike if r not in found.values() and (port.result, r) not in other)
                first = next(free, None)
                found.update({} if first is None else {port.result: first})
        return found

    def _carried(self, port: LoopPort) -> Any:
        """The identity of the next value of a carry."""
        return identity(self.bodies[0].first(self.bodies[0].returned[port.outputs[0][1]]))

    def _read_alike(self, op: Op, pairs: dict[int, int]) -> list[Table]:
        """Per body, what the bodies here have for the inputs of those of ``op``."""
        tables: list[Table] = [{} for _ in op.bodies]
        for port in loop_ports(op):
            if port.role in _GIVEN:
                read = self.inside(port.role, op.inputs[port.operand])
                assert read is not None  # as ``likeness`` has found
                tables_read = zip(port.inputs, read, strict=True)
                for (b, i), x in tables_read:
                    tables[b][op.bodies[b].inputs[i].id] = x
            elif port.role is PortRole.CARRY:
                own = op.bodies[0].inputs[port.inputs[0][1]]
                mine = next(
                    (p for p in self._ports if p.role is port.role and p.result == pairs.get(port.result)), None
                )
                body = self.bodies[0]
                i = mine.inputs[0][1] if mine else body.add_input(new_value(own, self.outside.ids), port.role)
                tables[0][own.id] = body.inputs[i]
        return tables

    def _result_of(
        self, op: Op, port: LoopPort, pairs: dict[int, int], tables: list[Table], ends: list[list[Atom]]
    ) -> Atom:
        """The result that this loop has for one of ``op``."""
        inside, like = tuple(ends[b][j] for b, j in port.outputs), op.outputs[port.result]
        if port.role is not PortRole.CARRY:
            return self._result(port.role, inside, like.shape)
        if port.result in pairs:
            return self._outputs[pairs[port.result]]
        body, own = self.bodies[0], tables[0][op.bodies[0].inputs[port.inputs[0][1]].id]
        at = next(i for i, v in enumerate(body.inputs) if v is own)
        made = new_value(like, self.outside.ids)
        outputs = ((0, body.add_returned(inside[0])),)
        self._ports.append(LoopPort(port.role, len(self._inputs), ((0, at),), outputs, len(self._outputs)))
        self._inputs.append(op.inputs[port.operand])
        self._outputs.append(made)
        self.outside.position[made.id] = self.position
        return made

    def made(self) -> Op:
        """Returns the loop with all that moved in."""
        if not self._bodies:
            return self.op
        bodies = [body.made_body() for body in self._bodies]
        op = replace(self.op, inputs=tuple(self._inputs), outputs=tuple(self._outputs))
        return with_ports(op, self._ports, bodies)


class _LoopBody(ForwardGraph):
    """The body of a loop of the forward pass.

    Attributes:
      inputs: of the body, and those that were added.
      returned: by the body, and what was added.
    """

    def __init__(self, loop: ForwardLoop, number: int) -> None:
        graph = loop.op.bodies[number]
        super().__init__(graph, loop.outside.ids)
        self._loop, self._number = loop, number
        self.inputs, self.returned = list(graph.inputs), list(graph.returned)
        given = (i for port in loop_ports(loop.op) if port.invariant for b, i in port.inputs if b == number)
        self._invariant = {graph.inputs[i].id for i in given}
        self._hoisted: Table = {}

    def find(self, op: Op) -> Sequence[Atom] | None:
        """Returns the results of an equal operation, in the body or, if it is invariant, in front of the loop."""
        found = super().find(op)
        if found is None and not op.effects and all(map(self.is_invariant, values(op.inputs))):
            found = self._loop.find_in_front(op, self._number)
        return found

    def read(self) -> None:
        """Reads the operations, once it is known which inputs are equal."""
        for op in self.graph.ops[:-1]:
            self.append(op)

    def _enter(self, op: Op, position: Position) -> None:
        super()._enter(op, position)
        if not op.effects and all(map(self.is_invariant, values(op.inputs))):
            self._invariant.update(v.id for v in op.outputs)

    def is_invariant(self, x: Value) -> bool:
        """Returns whether a value is the same in every iteration."""
        return x.id in self._invariant

    def hoist(self, x: Value, given: tuple[Atom, ...] | None) -> None:
        """Reads an invariant value as what is given to the body, if it is."""
        if given is not None:
            self._hoisted[x.id] = given[self._number]

    def add_input(self, value: Value, role: PortRole) -> int:
        """Adds an input; returns its position."""
        self.inputs.append(value)
        self._invariant |= {value.id} if role in (PortRole.CONST, PortRole.OPERAND) else set()
        self.position[value.id] = _INPUT
        return len(self.inputs) - 1

    def add_returned(self, x: Atom) -> int:
        """Returns one more value of the body; gives its position."""
        self.returned.append(x)
        return len(self.returned) - 1

    def made_body(self) -> Graph:
        """Returns the body with all that was added."""
        ops = (substitute(op, self._hoisted) for op in (*self.made(), self.graph.ops[-1]))
        graph = replace(self.graph, inputs=tuple(self.inputs), ops=tuple(ops))
        return returning(graph, (look_up(x, self._hoisted) for x in self.returned))


def move_all(ops: Sequence[Op], home: ForwardGraph, known: Table) -> None:
    """Moves operations, all of whose operands are known, to a graph of the forward pass.

    Args:
      known: what is there for their operands; their results are added.
    """
    for op in ops:
        results = home.move(substitute(op, known))
        known.update((v.id, x) for v, x in zip(op.outputs, results, strict=True))
