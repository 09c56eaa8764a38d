"""Why a collective is there, in one sentence.

    params/wte data=S(0) -> data=B, needed by dot_general (model.py:31)
    partial sum of dot_general (model.py:40) model=P -> model=B, needed by add (model.py:41)

A reduction belongs to the operation that made the partial value, and so does a move of what is
returned; any other collective belongs to the first operation that needs the layout it leads to,
directly or through further moves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import PurePath

import numpy as np

from meshdsl.ir.graph import Graph, Literal, Op, Source, TracedProgram, Value, walk
from meshdsl.ir.index import graph_index
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import price
from meshdsl.layouts.exchange import Exchange, ExchangeStep, ordered_exchanges
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Partial, Split
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.util.arrays import Ids, object_id
from meshdsl.util.lazy import memoize_by_object

# ---- Places ----------------------------------------------------------------------------------------------------------
# Names of source lines: ``file.py:12``, the same on every machine.
#
# Where files of one name are in one program, each is named with as many of its folders as tell it
# from the others.


class SourceNames:
    """Names of the lines of all operations of a program."""

    def __init__(self, sources: Iterable[Source]) -> None:
        files = {source.file for source in sources if source.file}
        self.files = {file: _shortest(file, files) for file in files}

    def of(self, source: Source) -> str:
        """The line's name; ``?`` if it is not known."""
        return f"{self.files[source.file]}:{source.line}" if source.file else str(source)


def _shortest(file: str, files: set[str]) -> str:
    """The file with no more folders than it needs to be told from the others."""
    parts, others = PurePath(file).parts, [PurePath(other).parts for other in files if other != file]
    alike = (n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others))
    return "/".join(parts[-next(alike, len(parts)) :])


# ---- Index -----------------------------------------------------------------------------------------------------------
# What a plan's text asks of a program, whatever the plan: who makes and reads its values, and where they stand.


class ReasonIndex:
    """The operations of a graph and its bodies, in program order; of the graph itself it does not keep hold.

    Args:
      ops: with the bodies that they stand in, if they do. order: per op id, its position among them.
      sources: the lines that they come from. places: what those are called.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops = [(None if home is graph else home, op) for home, op in walk(graph)]
        self.order = {op.id: i for i, (_, op) in enumerate(self.ops)}
        sources = {object_id(op.source): op.source for _, op in self.ops}  # most are one of few objects
        self.sources = list(dict.fromkeys(sources.values()))
        self.places = SourceNames(self.sources)
        self._numbers = numbers = graph_index(graph)
        self._made: list[int] = np.where(
            numbers.number_by_id >= 0, numbers.producer[numbers.number_by_id], 0
        ).tolist()  # by value id
        by_value, begins = numbers.uses_by_value
        self._read: tuple[list[int], list[int]] = (
            numbers.use_position[by_value].tolist(),
            numbers.use_operand[by_value].tolist(),
        )
        self._begins: list[int] = begins[numbers.number_by_id].tolist()
        self._ends: list[int] = begins[numbers.number_by_id + 1].tolist()

    def value(self, value: int) -> Value:
        """A value, given by its id, as in all that follow."""
        return self._numbers.value(value)

    def maker(self, value: int) -> Op | None:
        """What makes a value; None for what comes in."""
        return self._numbers.ops[self._made[value]]

    def home(self, value: int) -> Graph | None:
        """The body that a value is in, if it is."""
        around = self._numbers.blocks[int(self._numbers.block_of[self._made[value]])].owner
        return around[0].bodies[around[1]] if around else None

    def readers(self, value: int) -> list[tuple[Op, int]]:
        """The operations that read a value, in program order, and as which operand."""
        there, ops = slice(self._begins[value], self._ends[value]), self._numbers.ops
        return [(op, i) for at, i in zip(*(some[there] for some in self._read), strict=True) if (op := ops[at])]

    def in_order(self, values: Iterable[int]) -> list[int]:
        """Values in program order."""
        numbers, ids = self._numbers, list(values)
        made = numbers.numbers_of(ids)
        order = np.lexsort((made, self._ranks[numbers.producer[made]]))
        return [ids[i] for i in order.tolist()]

    @cached_property
    def _ranks(self) -> Ids:
        """Per position, a number that says what comes before what; what comes into a body comes after its operation."""
        found = np.array([2 * self.order[op.id] if op else -1 for op in self._numbers.ops])
        for part in self._numbers.blocks:
            if part.owner:
                found[part.start - 1] = 2 * self.order[part.owner[0].id] + 1
        return found


@memoize_by_object
def index_of(graph: Graph) -> ReasonIndex:
    """The index of a graph."""
    return ReasonIndex(graph)


# ---- Reason ----------------------------------------------------------------------------------------------------------


class Reasons:
    """The index of a program, and the names of its values, under one solution."""

    def __init__(self, program: TracedProgram, solution: Solution) -> None:
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

    def reader(self, value: int, move: ReshardStep) -> Op:
        """The first operation that reads what the move leads to."""
        reached = {move.after}
        for other in self.solution.trees[value]:
            if other.before in reached:
                reached.add(other.after)
        uses = self.solution.uses
        return next(op for op, i in self.index.readers(value) if uses[op.id, i] in reached)

    def explain(self, value: Value, move: ReshardStep) -> tuple[Op, Op, str]:
        """The first operation that waits for the collective, the one that it belongs to, and the sentence."""
        reader, maker = self.reader(value.id, move), self.index.maker(value.id)
        made_for = isinstance(move.source, Partial) or reader.name == "return"
        at = maker if maker is not None and made_for else reader
        return reader, at, f"{self._what(value, move)} {self._change(move)}, {self._need(reader)}"

    def _enter_bodies(self, op: Op) -> None:
        for body, origins in zip(op.bodies, _origins(op), strict=True):
            for value, (origin, suffix) in zip(body.inputs, origins, strict=True):
                if isinstance(origin, Value) and origin.id in self.names:
                    self.names[value.id] = self.names[origin.id] + suffix

    def _what(self, value: Value, move: ReshardStep) -> str:
        maker = self.index.maker(value.id)
        made = self.name(value) if maker is None else f"{_which(maker, value)} ({self.place(maker)})"
        if isinstance(move.source, Partial):
            return f"partial {move.source.reduction} of {made}"
        return made if maker is None else f"result of {made}"

    def _change(self, move: ReshardStep) -> str:
        if object_id(move) not in self._changes:
            self._changes[object_id(move)] = _change(move)
        return self._changes[object_id(move)]

    def _need(self, reader: Op) -> str:
        if reader.name == "return":
            last = reader is self.program.graph.ops[-1]
            return "returned by the step" if last else "returned by the loop's body"
        verb = "specified" if reader.name == "constrain" else "needed"
        return f"{verb} by {_called(reader)} ({self.place(reader)})"


def _called(op: Op) -> str:
    return f"the {op.name}" if op.bodies else op.called


def _which(op: Op, value: Value) -> str:
    """The operation, and which of its results if it has several."""
    shape = ",".join(map(str, value.shape))
    return _called(op) if len(op.outputs) == 1 else f"{_called(op)}'s {value.dtype}[{shape}]"


def _change(move: ReshardStep) -> str:
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


# ---- Inside ----------------------------------------------------------------------------------------------------------
# The collectives inside the local programs of a solution, as the plan lists them.


@dataclass(frozen=True)
class LocalCollective:
    """One collective of an operation: what it is of, and what one device sends.

    Args:
      value: the operand or result whose elements are exchanged.
    """

    op: Op
    graph: Graph
    exchange: Exchange
    value: Value
    kind: str
    axes: tuple[str, ...]
    bytes: int
    seconds: float


def collectives_inside(graph: Graph, solution: Solution) -> Iterator[LocalCollective]:
    """Every collective of a local program in the graph and its bodies, in program order.

    A piece of a value that two operations fetch alike is listed once: the compiler drops the second,
    and what is exchanged for a result that nobody reads.
    """
    exchanging = {op for op, rows in solution.rows.items() for row in rows if row.collectives}
    if not exchanging:
        return
    seen: set[object] = set()
    read = {x.id for _, op in walk(graph) for x in op.inputs if isinstance(x, Value)}
    for inside, op in walk(graph):
        for turn in _turns(op, solution, read) if op.id in exchanging else ():
            for piece, found in _collectives(op, inside, turn, solution):
                if piece not in seen:
                    seen.add(piece)
                    yield found


def _turns(op: Op, solution: Solution, read: set[int]) -> Iterator[ExchangeStep]:
    """What an operation exchanges, but for results that nobody reads."""
    unread = [i for i, x in enumerate(op.outputs, len(op.inputs)) if x.id not in read]
    turns = ordered_exchanges([row.collectives for row in solution.rows[op.id]]) or ()
    return (turn for turn in turns if turn.exchange.port not in unread)


def _collectives(
    op: Op, graph: Graph, turn: ExchangeStep, solution: Solution
) -> Iterator[tuple[object, LocalCollective]]:
    """The collectives of one exchange, each with what tells its piece from others."""
    mesh, e = solution.mesh, turn.exchange
    axes = tuple(mesh.names[i] for i in turn.axes)
    value, layout = _port(op, e.port, solution)
    block = turn.widened(layout.local_shape(value.shape, mesh.sizes_by_name))
    extent = block[e.dim] if e.dim is not None else 1
    wider = tuple((t.axes, t.exchange.before, t.exchange.after) for t in turn.earlier)
    for part in e.parts(extent, [mesh.axis(name) for name in axes]) or ():
        sent = part.stop - part.start if e.dim is not None and part.stop else extent
        given = prod(block) // max(1, extent) * sent * value.itemsize
        over = tuple(axes[i] for i in part.axes)
        cost = price(part.kind, over, mesh)
        found = LocalCollective(op, graph, e, value, part.kind, over, round(cost.sent * given), cost.seconds(given))
        piece = (value.id, layout, axes, part, wider) if part.distance else (op.id, e, part)
        yield piece, found


def _port(op: Op, port: int, solution: Solution) -> tuple[Value, Layout]:
    """The operand or result, and how it lies there."""
    value = (*op.inputs, *op.outputs)[port]
    if isinstance(value, Literal):
        raise TypeError(f"{op.name} exchanges the literal {value.value}")
    return value, solution.uses[op.id, port] if port < len(op.inputs) else solution.layouts[value.id]
