"""Why a collective is there, in one sentence.

    params/wte data=S(0) -> data=B: dot_general (model.py:31) reads it
    partial sum of dot_general (model.py:40) model=P -> model=B: add (model.py:41) reads it

A reduction belongs to the operation that made the partial value, and so does a move of what is
returned; any other collective belongs to the first operation that needs the layout it leads to,
directly or through further moves.
"""

from collections.abc import Iterator, Sequence

from meshdsl.ir import Graph, Op, Program, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.move import Move
from meshdsl.layouts.placement import Partial, Split
from meshdsl.plan.index import index_of
from meshdsl.planner.identity import identity
from meshdsl.planner.solution import Solution


class Reasons:
    """The index of a program, and the names of its values, under one solution."""

    def __init__(self, program: Program, solution: Solution) -> None:
        self.program, self.solution, self.index = program, solution, index_of(program.graph)
        self._changes: dict[int, str] = {}  # by the identity of a move: equal values share theirs
        leaves = zip(program.inputs, program.graph.inputs, strict=True)
        self.names: dict[int, str] = {value.id: leaf.path for leaf, value in leaves}
        for _, op in self.index.ops:
            if op.bodies:
                self._enter_bodies(op)

    def ops(self) -> Iterator[tuple[Graph, Op]]:
        """Every operation with the graph that it stands in, in program order."""
        return ((home or self.program.graph, op) for home, op in self.index.ops)

    def moved(self) -> Iterator[tuple[Value, Graph]]:
        """Every value that is moved, with its graph, in program order."""
        index, graph = self.index, self.program.graph
        return ((index.value(v), index.home(v) or graph) for v in index.in_order(self.solution.trees))

    def name(self, value: Value) -> str:
        """Path of the input that the value is, or what made it."""
        if value.id in self.names:
            return self.names[value.id]
        maker = self.index.maker(value.id)
        return maker.called if maker else "a loop's carry"

    def named(self, value: int) -> str:
        """The name of the value with this id, and the line that made it."""
        maker = self.index.maker(value)
        name = self.name(self.index.value(value))
        return f"{name} ({self.place(maker)})" if maker is not None and value not in self.names else name

    def place(self, op: Op) -> str:
        """The user's line that an operation comes from."""
        return self.index.places.of(op.source)

    def reader(self, value: int, move: Move) -> Op:
        """The first operation that reads what the move leads to."""
        reached = {move.after}
        for other in self.solution.trees[value]:
            if other.before in reached:
                reached.add(other.after)
        uses = self.solution.uses
        return next(op for op, i in self.index.readers(value) if uses[op.id, i] in reached)

    def explain(self, value: Value, move: Move) -> tuple[Op, Op, str]:
        """The first operation that waits for the collective, the one that it belongs to, and the sentence."""
        reader, maker = self.reader(value.id, move), self.index.maker(value.id)
        made_for = isinstance(move.source, Partial) or reader.name == "return"
        at = maker if maker is not None and made_for else reader
        return reader, at, f"{self._what(value, move)} {self._change(move)}: {self._need(reader)}"

    def _enter_bodies(self, op: Op) -> None:
        for body, origins in zip(op.bodies, _origins(op), strict=True):
            for value, (origin, suffix) in zip(body.inputs, origins, strict=True):
                if isinstance(origin, Value) and origin.id in self.names:
                    self.names[value.id] = self.names[origin.id] + suffix

    def _what(self, value: Value, move: Move) -> str:
        maker = self.index.maker(value.id)
        made = self.name(value) if maker is None else f"{_which(maker, value)} ({self.place(maker)})"
        if isinstance(move.source, Partial):
            return f"partial {move.source.reduction} of {made}"
        return made if maker is None else f"result of {made}"

    def _change(self, move: Move) -> str:
        if identity(move) not in self._changes:
            self._changes[identity(move)] = _change(move)
        return self._changes[identity(move)]

    def _need(self, reader: Op) -> str:
        if reader.name == "return":
            last = reader is self.program.graph.ops[-1]
            return "the step returns it" if last else "the loop's body returns it"
        verb = "states it" if reader.name == "constrain" else "reads it"
        return f"{_called(reader)} ({self.place(reader)}) {verb}"


def _called(op: Op) -> str:
    return f"the {op.name}" if op.bodies else op.called


def _which(op: Op, value: Value) -> str:
    """The operation, and which of its results if it has several."""
    shape = ",".join(map(str, value.shape))
    return _called(op) if len(op.outputs) == 1 else f"{_called(op)}'s {value.dtype}[{shape}]"


def _change(move: Move) -> str:
    if move.kind == "collective-permute":
        dim = move.source.dim if isinstance(move.source, Split) else 0
        return f"{','.join(move.before.splitting(dim))} -> {','.join(move.after.splitting(dim))} on dim {dim}"
    return f"{_on(move.before, move.axes)} -> {_on(move.after, move.axes)}"


def _on(layout: Layout, axes: Sequence[str]) -> str:
    return " ".join(f"{axis}={layout.on(axis)}" for axis in axes)


_Origin = tuple[object, str]


def _origins(op: Op) -> list[list[_Origin]]:
    """Per body and body input, the operand that it is, and what to add to its name."""
    if op.name == "scan":
        consts, end = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"]
        return [_consts(op.inputs[:consts]) + _unnamed(end - consts) + [(x, "[i]") for x in op.inputs[end:]]]
    if op.name == "while":
        asked, closed = op.params["cond_nconsts"], op.params["body_nconsts"]
        carries = _unnamed(len(op.inputs) - asked - closed)
        return [_consts(op.inputs[:asked]) + carries, _consts(op.inputs[asked : asked + closed]) + carries]
    return [_consts(op.inputs[1:]) for _ in op.bodies]


def _consts(operands: Sequence[object]) -> list[_Origin]:
    return [(x, "") for x in operands]


def _unnamed(count: int) -> list[_Origin]:
    return [(None, "")] * count
