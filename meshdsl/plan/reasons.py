"""The plan's reason column: which operation waits for a collective, and why the collective is there.

    params/wte data=S(0) -> data=B, needed by dot_general (model.py:31)
    partial sum of dot_general (model.py:40) model=P -> model=B, needed by add (model.py:41)

``Reasons.explain`` writes the sentence: the value, by the path of the input that it is or by its producer; its layout
before and after; and the first operation that uses the value in a layout that this reshard step leads to, directly or
through further steps. The collective *belongs* to a line of the user's source. A reduction belongs to the producer of
the partial sum, and so does the reshard of a returned value; any other collective belongs to that first consumer.

``collectives_inside`` lists the collectives that local programs run by themselves, such as the halo exchange of a
convolution.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import PurePath

import numpy as np

from meshdsl.ir.graph import Graph, Literal, Op, Source, TracedProgram, Value, sent_itemsize, walk
from meshdsl.ir.index import graph_index
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import exchange_price
from meshdsl.layouts.exchange import Exchange, ExchangeStep, ordered_exchanges
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Partial, Split
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.rules.dim_groups import ELEMENTWISE
from meshdsl.util.arrays import Ids, object_id
from meshdsl.util.lazy import memoize_by_object

# ---- Names of source lines -------------------------------------------------------------------------------------------


class SourceNames:
    """Names of the source lines of a program: ``file.py:12``, the same on every machine.

    Files that share a name are told apart by as many of their folders as that takes.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        files = {source.file for source in sources if source.file}
        self.files = {file: _shortest(file, files) for file in files}

    def of(self, source: Source) -> str:
        """The name of a line; ``?`` if it is unknown."""
        return f"{self.files[source.file]}:{source.line}" if source.file else str(source)


def _shortest(file: str, files: set[str]) -> str:
    """The end of a path with the fewest folders that no other of the files ends with."""
    parts, others = PurePath(file).parts, [PurePath(other).parts for other in files if other != file]
    lengths = (n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others))
    return "/".join(parts[-next(lengths, len(parts)) :])


# ---- Producers and consumers in program order ------------------------------------------------------------------------


class ReasonIndex:
    """Operations, producers and consumers of a graph and its bodies, as plans name them; values are given by their ids.

    It is made once per graph and does not keep the graph alive.

    Args:
      graph: the program's graph.

    Attributes:
      ops: operations in program order, each with the body that it is in, None for the graph itself.
      order: per operation id, the position in that order.
      sources: distinct source lines of the operations.
      source_names: their names.
    """

    def __init__(self, graph: Graph) -> None:
        self.ops = [(None if home is graph else home, op) for home, op in walk(graph)]
        self.order = {op.id: i for i, (_, op) in enumerate(self.ops)}
        sources = {object_id(op.source): op.source for _, op in self.ops}  # few distinct objects
        self.sources = list(dict.fromkeys(sources.values()))
        self.source_names = SourceNames(self.sources)
        self._numbers = numbers = graph_index(graph)
        # as lists by value id, since single look-ups in arrays are slow
        by_id = numbers.number_by_id
        self._made: list[int] = np.where(by_id >= 0, numbers.producer[by_id], 0).tolist()
        uses, begins = numbers.uses_by_value
        self._uses: tuple[list[int], list[int]] = (
            numbers.use_position[uses].tolist(),
            numbers.use_operand[uses].tolist(),
        )
        self._begins: list[int] = begins[by_id].tolist()
        self._ends: list[int] = begins[by_id + 1].tolist()

    def value(self, value: int) -> Value:
        """The value with this id."""
        return self._numbers.value(value)

    def producer(self, value: int) -> Op | None:
        """The operation that makes a value; None for an input of the graph or of a body."""
        return self._numbers.ops[self._made[value]]

    def body(self, value: int) -> Graph | None:
        """The body that a value is in; None in the graph itself."""
        owner = self._numbers.blocks[int(self._numbers.block_of[self._made[value]])].owner
        return owner[0].bodies[owner[1]] if owner else None

    def uses(self, value: int) -> list[tuple[Op, int]]:
        """The consumers of a value in program order, each with the index of the operand."""
        here, ops = slice(self._begins[value], self._ends[value]), self._numbers.ops
        return [(op, i) for at, i in zip(*(column[here] for column in self._uses), strict=True) if (op := ops[at])]

    def in_order(self, values: Iterable[int]) -> list[int]:
        """The values in program order."""
        numbers, ids = self._numbers, list(values)
        known = numbers.numbers_of(ids)
        order = np.lexsort((known, self._ranks[numbers.producer[known]]))
        return [ids[i] for i in order.tolist()]

    @cached_property
    def _ranks(self) -> Ids:
        """Per position of the graph's index, its rank in program order; inputs of a body follow its operation."""
        ranks = np.array([2 * self.order[op.id] if op else -1 for op in self._numbers.ops])
        for block in self._numbers.blocks:
            if block.owner:
                ranks[block.start - 1] = 2 * self.order[block.owner[0].id] + 1
        return ranks


@memoize_by_object
def reason_index(graph: Graph) -> ReasonIndex:
    """The index of a graph, made once."""
    return ReasonIndex(graph)


# ---- Reasons ---------------------------------------------------------------------------------------------------------

_SUFFIXES = {PortRole.CONST: "", PortRole.OPERAND: "", PortRole.SLICE: "[i]"}  # of names inside a loop


class Reasons:
    """Names of values, and reasons of reshard steps, under one solution.

    Args:
      program: the planned program.
      solution: its layouts and reshard steps.
    """

    def __init__(self, program: TracedProgram, solution: Solution) -> None:
        self.program, self.solution, self.index = program, solution, reason_index(program.graph)
        # by the identity of a step, which equal values share, and names of dims
        self._changes: dict[tuple[int, tuple[str, ...]], str] = {}
        leaves = list(zip(program.inputs, program.graph.inputs, strict=True))
        self.names: dict[int, str] = {value.id: leaf.path for leaf, value in leaves}
        returned = zip(program.outputs, program.graph.returned, strict=True)
        known = [*((leaf, value) for leaf, value in returned if isinstance(value, Value)), *leaves]
        self._dims: dict[int, tuple[str, ...]] = {value.id: leaf.dims for leaf, value in known if leaf.dims}
        for _, op in self.index.ops:
            if op.bodies:
                self._name_body_inputs(op)
        if self._dims:
            self._name_dims_by_partners()

    def _name_body_inputs(self, op: Op) -> None:
        """Names the inputs of a loop's bodies that are inputs of the step outside."""
        for port in loop_ports(op):
            outside = op.inputs[port.operand] if port.role in _SUFFIXES else None
            if isinstance(outside, Value) and outside.id in self.names:
                for body, i in port.inputs:
                    inside = op.bodies[body].inputs[i].id
                    self.names[inside] = self.names[outside.id] + _SUFFIXES[port.role]
                    if dims := self._dims.get(outside.id):
                        self._dims[inside] = dims[1:] if port.role is PortRole.SLICE else dims

    def _name_dims_by_partners(self) -> None:
        """Gives what is combined with a named array element by element, such as its gradient, the names of its dims."""
        ops = [op for _, op in self.index.ops if op.name in ELEMENTWISE]
        for op in (*ops, *reversed(ops)):
            same = [x for x in (*op.inputs, *op.outputs) if isinstance(x, Value) and x.shape == op.outputs[0].shape]
            if dims := next((self._dims[x.id] for x in same if x.id in self._dims), None):
                for x in same:
                    self._dims.setdefault(x.id, dims)

    def ops(self) -> Iterator[tuple[Graph, Op]]:
        """Every operation with the graph that it is in, in program order."""
        return ((body or self.program.graph, op) for body, op in self.index.ops)

    def resharded(self) -> Iterator[tuple[Value, Graph]]:
        """Every value that has reshard steps, with the graph that it is in, in program order."""
        index, graph = self.index, self.program.graph
        return ((index.value(v), index.body(v) or graph) for v in index.in_order(self.solution.trees))

    def name(self, value: Value) -> str:
        """The path of the input that the value is, or the name of its producer."""
        if value.id in self.names:
            return self.names[value.id]
        producer = self.index.producer(value.id)
        return producer.called if producer else "a loop's carry"

    def name_and_line(self, value: int) -> str:
        """The name of the value with this id and, unless it is an input, the line of its producer.

        What a loop stacks goes by the operation in its body that makes each slice: ``scan's tanh (model.py:12)``.
        """
        producer = self.index.producer(value)
        name = self.name(self.index.value(value))
        if producer is None or value in self.names:
            return name
        maker = self._maker_of_slices(producer, value)
        if maker is not None:
            return f"{producer.name}'s {maker.called} ({self.line(maker)})"
        return f"{name} ({self.line(producer)})"

    def _maker_of_slices(self, loop: Op, value: int) -> Op | None:
        """The operation that makes each slice of what a loop stacks, in the innermost body; None for all others."""
        at = next(i for i, x in enumerate(loop.outputs) if x.id == value)
        port = next((port for port in loop_ports(loop) if port.result == at and port.role is PortRole.STACK), None)
        if port is None:
            return None
        body, i = port.outputs[0]
        inside = loop.bodies[body].returned[i]
        maker = self.index.producer(inside.id) if isinstance(inside, Value) else None
        return maker and (self._maker_of_slices(maker, inside.id) or maker)

    def line(self, op: Op) -> str:
        """The user's line that an operation comes from, ``file.py:12``."""
        return self.index.source_names.of(op.source)

    def consumer(self, value: int, step: ReshardStep) -> Op:
        """The first operation that uses the value in a layout that ``step`` leads to."""
        reached = {step.after}
        for later in self.solution.trees[value]:
            if later.before in reached:
                reached.add(later.after)
        uses = self.solution.uses
        return next(op for op, i in self.index.uses(value) if uses[op.id, i] in reached)

    def explain(self, value: Value, step: ReshardStep) -> tuple[Op, Op, str]:
        """The operation that waits for the collective, the operation that it belongs to, and the sentence."""
        consumer, producer = self.consumer(value.id, step), self.index.producer(value.id)
        belongs_to_producer = isinstance(step.source, Partial) or consumer.name == "return"
        owner = producer if producer is not None and belongs_to_producer else consumer
        return consumer, owner, f"{self._subject(value, step)} {self._change(value, step)}, {self._need(consumer)}"

    def _subject(self, value: Value, step: ReshardStep) -> str:
        producer = self.index.producer(value.id)
        name = self.name(value)
        if producer is not None:
            name = f"{_display_name(producer)} ({self.line(producer)})"
            if len(producer.outputs) > 1:  # which of the results
                shape = ",".join(map(str, value.shape))
                name = f"{_display_name(producer)}'s {value.dtype}[{shape}] ({self.line(producer)})"
        if isinstance(step.source, Partial):
            return f"partial {step.source.reduction} of {name}"
        return name if producer is None else f"result of {name}"

    def _change(self, value: Value, step: ReshardStep) -> str:
        key = object_id(step), self._dims.get(value.id, ())
        if key not in self._changes:
            self._changes[key] = _change(step, key[1])
        return self._changes[key]

    def _need(self, consumer: Op) -> str:
        if consumer.name == "return":
            last = consumer is self.program.graph.ops[-1]
            return "returned by the step" if last else "returned by the loop's body"
        verb = "specified" if consumer.name == "constrain" else "needed"
        return f"{verb} by {_display_name(consumer)} ({self.line(consumer)})"


def _display_name(op: Op) -> str:
    return f"the {op.name}" if op.bodies else op.called


def _change(step: ReshardStep, dims: Sequence[str]) -> str:
    """What a step changes; dims by their names, where they have one."""
    if step.kind == "collective-permute":
        dim = step.source.dim if isinstance(step.source, Split) else 0
        names: dict[int | str, str] = {i: name for i, name in enumerate(dims) if name}
        name = names.get(dim, dim)
        return f"{','.join(step.before.splitting(dim))} -> {','.join(step.after.splitting(dim))} on dim {name}"
    before, after = (_on(layout.named(dims), step.axes) for layout in (step.before, step.after))
    return f"{before} -> {after}"


def _on(layout: Layout, axes: Sequence[str]) -> str:
    return " ".join(f"{axis}={layout.on(axis)}" for axis in axes)


# ---- Collectives inside local programs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalCollective:
    """One collective that the local program of an operation runs.

    Args:
      op: the operation.
      graph: the graph that it is in.
      exchange: what the devices exchange.
      value: the operand or result whose elements are exchanged.
      kind: kind of the collective.
      axes: mesh axes it runs over, outermost first.
      bytes: bytes that one device sends per iteration.
      seconds: predicted seconds per iteration.
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
    """Every collective of local programs in the graph and its bodies, in program order.

    A piece of a value that two operations fetch in the same way is listed once, since the compiler merges the two, and
    an exchange for a result without consumers is not listed, since the compiler removes it.
    """
    exchanging = {op for op, rows in solution.rows.items() for row in rows if row.collectives}
    if not exchanging:
        return
    seen: set[object] = set()
    used = {x.id for _, op in walk(graph) for x in op.inputs if isinstance(x, Value)}
    for inside, op in walk(graph):
        if op.id not in exchanging:
            continue
        unused = [i for i, x in enumerate(op.outputs, len(op.inputs)) if x.id not in used]
        steps = ordered_exchanges([row.collectives for row in solution.rows[op.id]]) or ()
        for step in steps:
            if step.exchange.port in unused:
                continue
            for piece, found in _collectives_of(op, inside, step, solution):
                if piece not in seen:
                    seen.add(piece)
                    yield found


def _collectives_of(
    op: Op, graph: Graph, step: ExchangeStep, solution: Solution
) -> Iterator[tuple[object, LocalCollective]]:
    """The collectives of one exchange, each with a key that is equal for equal pieces of a value."""
    mesh, e = solution.mesh, step.exchange
    axes = tuple(mesh.names[i] for i in step.axes)
    value, layout = _port(op, e.port, solution)
    block = step.widened(layout.local_shape(value.shape, mesh.sizes_by_name))
    extent = block[e.dim] if e.dim is not None else 1
    wider = tuple((t.axes, t.exchange.before, t.exchange.after) for t in step.earlier)
    for part in e.parts(extent, [mesh.axis(name) for name in axes]) or ():
        sent = part.stop - part.start if e.dim is not None and part.stop else extent
        size = prod(block) // max(1, extent) * sent * sent_itemsize(value.itemsize)
        over = tuple(axes[i] for i in part.axes)
        cost = exchange_price(part.kind, over, mesh, part.group)
        found = LocalCollective(op, graph, e, value, part.kind, over, round(cost.sent * size), cost.seconds(size))
        key = (value.id, layout, axes, part, wider) if part.distance else (op.id, e, part)
        yield key, found


def _port(op: Op, port: int, solution: Solution) -> tuple[Value, Layout]:
    """The operand or result at a port, and its layout there."""
    value = (*op.inputs, *op.outputs)[port]
    if isinstance(value, Literal):
        raise TypeError(f"{op.name} exchanges the literal {value.value}")
    return value, solution.uses[op.id, port] if port < len(op.inputs) else solution.layouts[value.id]
