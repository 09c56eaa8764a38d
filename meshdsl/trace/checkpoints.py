"""The step without its ``jax.checkpoint``: the backward pass reads what the forward pass has computed.

Autodiff leaves in the backward pass what a checkpoint computes again (``REMATTED``), behind barriers: its forward
operations, and those that only derivatives need. Both belong to the forward pass of the step written without it:

    forward            backward                             forward            backward
    y = tanh x         x' = optimization_barrier x          y = tanh x         a = mul g d
    z = sin y          y' = tanh x'                         d = sub 1 (y * y)  b = mul a x
                       d = sub 1 (y' * y')                  z = sin y
                       a = mul g d
                       b = mul a x'

So these operations *move* there, one after the other (``forward_pass``): one that is there already is that one, any
other is placed behind the last one that moved, which is where autodiff would have it. Barriers are identities. Dead
code elimination does the rest.

The body of a backward scan recomputes a layer from slices of stacks, and these are values of the body of the scan that
stacked them. So its operations move into that body, and what the rest of the backward body reads of them becomes a
stack there and a slice here; what is the same in every iteration stands outside of both. A scan that is recomputed as
a whole moves into the scan that it repeats.

Only what depends on the forward pass alone can move; ``CheckpointsTaken.kept`` says what stays and why.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp

from meshdsl.errors import shortened
from meshdsl.ir.graph import Atom, Graph, Literal, Op, Source, Value, walk
from meshdsl.ir.loops import PortRole, loop_ports, reading_more
from meshdsl.ir.rewrite import Table, fresh_ids, new_value, substitute, values, with_ops
from meshdsl.trace.forward_pass import TRANSPOSED, ForwardGraph, ForwardLoop, move_all
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.read_jaxpr import REMATTED, starts_checkpoint


class CheckpointsTaken(NamedTuple):
    """A graph whose checkpoints are taken out.

    Args:
      taken: source lines of what was computed again, in order.
      kept: what still is, each with the reason.
    """

    graph: Graph
    taken: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """Both in sentences, for the plan."""
        what = f"jax.checkpoint is taken out (remat='replace'): {', '.join(shortened(self.taken))}"
        return [*([what] if self.taken else []), *(f"{each} (remat='replace')" for each in shortened(self.kept))]


def without_checkpoints(graph: Graph) -> CheckpointsTaken:
    """Returns a step, as it was read and before any pass but ``remove_identities``, without ``jax.checkpoint``.

    The same graph if there is none, or none that can be taken out.
    """
    barred = [op.source for _, op in walk(graph) if starts_checkpoint(op)]
    if not barred and not _recomputes(graph):
        return CheckpointsTaken(graph, (), ())
    remover = _Remover(fresh_ids(graph))
    made = dce(remover.level(_without_identities(graph)))
    taken, kept = tuple(dict.fromkeys(map(str, [*barred, *remover.taken]))), tuple(dict.fromkeys(remover.kept))
    if not remover.taken and (kept or not barred):
        return CheckpointsTaken(graph, (), kept)
    return CheckpointsTaken(made, taken, kept)


def _recomputes(graph: Graph) -> bool:
    return any(REMATTED in op.scope for _, op in walk(graph))


def _without_identities(graph: Graph) -> Graph:
    """The graph without the barriers of checkpoints, and the roundings that a policy adds to what it keeps."""
    table: Table = {}
    made = dict[int, Op]()
    ops: list[Op] = []
    for op in graph.ops:
        op = substitute(op, table)
        op = replace(op, bodies=tuple(map(_without_identities, op.bodies))) if op.bodies else op
        maker = made.get(op.inputs[0].id) if op.name == "reduce_precision" else None
        is_added = maker is not None and (maker.source, maker.scope) == (op.source, op.scope)
        if starts_checkpoint(op) or (is_added and _keeps_precision(op)):
            table[op.outputs[0].id] = op.inputs[0]
        else:
            made.update((v.id, op) for v in op.outputs)
            ops.append(op)
    return with_ops(graph, ops)


def _keeps_precision(op: Op) -> bool:
    """Whether a rounding is to the precision that its operand has."""
    try:
        known = jnp.finfo(op.outputs[0].dtype)
    except ValueError:  # dtypes without a precision
        return False
    return (op.params["exponent_bits"], op.params["mantissa_bits"]) == (known.nexp, known.nmant)


# ---- The backward pass -----------------------------------------------------------------------------------------------


@dataclass
class _Remover:
    """Takes checkpoints out of the levels of a step.

    Attributes:
      taken: source lines of what was computed again.
      kept: sentences on what still is.
    """

    ids: Iterator[int]
    taken: list[Source] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    def level(self, graph: Graph) -> Graph:
        """Returns a graph with a forward and a backward pass without checkpoints."""
        home, known = ForwardGraph(graph, self.ids), Table()
        known.update((v.id, v) for v in graph.inputs)
        backward = _Backward(self, home, known, lambda x: x)
        for op in graph.ops:
            if TRANSPOSED in op.scope or REMATTED in op.scope:
                for each in backward.without(op):
                    home.append(each, is_known=False)
            else:
                op = backward.reading(op)
                if op.bodies:
                    op = replace(op, bodies=tuple(self.level(b) if _recomputes(b) else b for b in op.bodies))
                home.append(op)
                known.update((v.id, home.first(v)) for v in op.outputs)
        return with_ops(graph, home.made())


@dataclass
class _Backward:
    """The backward pass in one graph.

    Args:
      home: the graph of the forward pass, to which operations move.
      known: by value id here, the equal value there.
      here: returns what this graph has for a value of the forward pass.
    """

    remover: _Remover
    home: ForwardGraph
    known: Table
    here: Callable[[Atom], Atom]
    moved: set[int] = field(default_factory=set)  # ids of values whose operations have moved

    def without(self, op: Op) -> list[Op]:
        """Returns what stays here of an operation."""
        if REMATTED in op.scope:
            why = self._obstacle(op)
            if not why:
                self.remover.taken.append(op.source)
                move_all([op], self.home, self.known)
                self.moved.update(v.id for v in op.outputs)
                return []
            self.remover.kept.append(f"{op.called} at {op.source} is still computed again: {why}")
        elif op.bodies and any(map(_recomputes, op.bodies)):
            op = self._without_inside(op)
        elif op.name == "enter_shard_map":
            self._enter_again(op)
        self.home.restart()
        return [self.reading(op)]

    def _enter_again(self, op: Op) -> None:
        """Notes what the forward pass has of blocks that the backward pass enters: left there, or entered as well."""
        if op.inputs[0].id not in self.known:
            return
        read = substitute(op, self.known)
        left, entered = self.home.makers.get(read.inputs[0].id), self.home.find(read)
        if left is not None and left.name == "leave_shard_map" and left.params == op.params:
            self.known[op.outputs[0].id] = self.home.first(left.inputs[0])
        elif entered is not None:
            self.known[op.outputs[0].id] = entered[0]

    def _obstacle(self, op: Op) -> str:
        """Why an operation cannot move; empty if it can."""
        unknown = next((x for x in values(op.inputs) if x.id not in self.known), None)
        if unknown is not None:
            return "it reads what the forward pass does not compute"
        if op.effects and self.home.find(substitute(op, self.known)) is None:
            return "it has effects that the forward pass has not"
        return ""

    def reading(self, op: Op) -> Op:
        """Returns the operation reading what this graph has after all."""
        return substitute(op, {x.id: self.here(self.known[x.id]) for x in values(op.inputs) if x.id in self.moved})

    def _without_inside(self, op: Op) -> Op:
        """Returns a scan of the backward pass whose recomputation has moved to the one of the forward pass."""
        operands = [self.known.get(x.id) if isinstance(x, Value) else x for x in op.inputs]
        loop = self.home.loop_for(op, operands, is_whole=False) if op.name == "scan" else None
        if loop is None:
            found = next(each for body in op.bodies for _, each in walk(body) if REMATTED in each.scope)
            why = f"no loop of the forward pass belongs to the {op.name} around it"
            self.remover.kept.append(f"{found.called} at {found.source} is still computed again: {why}")
            return op
        reader = _BackwardScan(op, loop, operands, self)
        return reader.made()


class _BackwardScan:
    """A scan of the backward pass beside the one of the forward pass that stacks what it reads."""

    def __init__(self, op: Op, loop: ForwardLoop, operands: Sequence[Atom | None], around: _Backward) -> None:
        self.op, self.loop, self.around = op, loop, around
        self._more: list[tuple[PortRole, Atom, Value]] = []
        self._here: dict[int, Atom] = {}
        body, known = op.bodies[0], Table()
        for port in loop_ports(op):
            x = operands[port.operand] if port.role in (PortRole.CONST, PortRole.SLICE) else None
            read = None if x is None else loop.inside(port.role, x)
            if read is not None:
                own = body.inputs[port.inputs[0][1]]
                known[own.id] = read[0]
                self._here.setdefault(read[0].id, own)
        self._backward = _Backward(around.remover, loop.bodies[0], known, self._read)

    def _read(self, x: Atom) -> Atom:
        """What the body has for a value of the forward body."""
        if isinstance(x, Literal):
            return x
        if x.id not in self._here:
            role, outside = self.loop.outside_of(x)
            if isinstance(outside, Literal):
                return outside
            inside = self._here[x.id] = new_value(x, self.loop.outside.ids)
            self._more.append((role, self.around.here(outside), inside))
        return self._here[x.id]

    def made(self) -> Op:
        """Returns the scan without what has moved."""
        body = self.op.bodies[0]
        self.loop.bodies[0].restart()
        ops = [each for op in body.ops for each in self._backward.without(op)]
        op = replace(self.op, effects=any(op.effects for op in ops))
        return reading_more(op, with_ops(body, ops), self._more)
