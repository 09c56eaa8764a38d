"""Running a graph on the part of one turn.

A runner keeps each value as the turn has it: its block of what is split, its share of a sum, or the whole. What an
operation reads otherwise is made when it is asked for: a block of something whole by the operations that made it, as
far as they can make blocks (a mask, zeros, random bits), and by a slice of what they start from.

Everything runs while jax traces, under the number of the operation that it came from, so that lines and scopes of the
traced program can be put back.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.lowering.interpreter import Arrays, literal
from meshdsl.lowering.local.collectives import identity
from meshdsl.lowering.local.registry import Local, position, run_local
from meshdsl.pipelining.time_axis import EACH, TimePlacement, held, turned_rows
from meshdsl.primitives.constrain import bind_constrain
from meshdsl.rules.elementwise import is_zero
from meshdsl.rules.registry import all_broadcast
from meshdsl.schedules.simulate import part_of, part_scope

AXIS = "microbatch"
_MARK = "meshdsl-operation-"
_MARKED = re.compile(rf"{_MARK}(\d+)")


@dataclass
class Runner:
    """What one turn has of the values of one graph.

    Args:
      placing: where everything is made; everything is whole where it says nothing.
      makers: per value of this graph, the operation that makes it.
    """

    placing: TimePlacement
    arrays: dict[tuple[int, Placement], jax.Array] = field(default_factory=dict)
    makers: dict[int, Op] = field(default_factory=dict)

    def add(self, graph: Graph) -> None:
        """Know the operations of a graph."""
        self.makers.update((v.id, op) for op in graph.ops for v in op.outputs)

    def define(self, values: Iterable[Value], arrays: Iterable[jax.Array], placed: Sequence[Placement]) -> None:
        """Keep what was made."""
        self.arrays.update(((v.id, p), x) for v, x, p in zip(values, arrays, placed, strict=True))

    def run(self, ops: Iterable[Op]) -> None:
        """Run operations in order."""
        for op in ops:
            self._run(op, self.placing.rows.get(op.id) or all_broadcast(op))

    def _run(self, op: Op, row: Signature) -> None:
        with marked(op):
            if op.name == "stage":
                placed = [held(self.placing.of(v)) for v in op.outputs]
                self.define(op.outputs, map(self.natural, op.inputs), placed)
            elif op.bodies:
                placed = [held(self.placing.of(v)) for v in op.outputs]
                self.define(op.outputs, _LOOPS[op.name](self, op, placed), placed)
            else:
                arrays = tuple(self.get(x, p) for x, p in zip(op.inputs, row.inputs, strict=True))
                self.define(op.outputs, self._results(op, arrays, row), row.outputs)

    def _results(self, op: Op, arrays: Arrays, row: Signature) -> Arrays:
        if op.name == "constant":
            return (op.params["value"],)
        if op.name == "constrain":
            return (bind_constrain(arrays[0], op.params["layout"], op.params["names"]),)
        ports = (tuple(Layout(**{AXIS: p}) for p in side) for side in (row.inputs, row.outputs))
        return run_local(op, arrays, Local({AXIS: self.placing.turns}, *ports))

    def get(self, x: Atom, want: Placement) -> jax.Array:
        """A value as an operation reads it."""
        if isinstance(x, Literal):
            return literal(x)
        if (x.id, want) not in self.arrays:
            self._make(x, want)
        return self.arrays[x.id, want]

    def natural(self, x: Atom) -> jax.Array:
        """A value as it is made."""
        return self.get(x, held(self.placing.of(x)))

    def _make(self, x: Value, want: Placement) -> None:
        have = held(self.placing.of(x))
        if want is have:
            self.run([self.makers[x.id]])
        elif isinstance(want, Split):
            self._make_block(x, want)
        else:
            self.arrays[x.id, want] = self._changed(x, have, want)

    def _make_block(self, x: Value, want: Split) -> None:
        """A block of what is whole: made as a block if it can be."""
        row = self._block_row(x, want)
        if row is not None:
            self._run(self.makers[x.id], row)
        else:
            size = x.shape[int(want.dim)] // self.placing.turns
            whole = self.get(x, B)
            self.arrays[x.id, want] = lax.dynamic_slice_in_dim(whole, position(AXIS) * size, size, int(want.dim))

    def _block_row(self, x: Value, want: Split) -> Signature | None:
        op = self.makers.get(x.id)
        if op is None or op.bodies or any(isinstance(self.placing.of(y), Split) for y in op.inputs):
            return None
        at = op.outputs.index(x)
        rows = (row for row in turned_rows(op, self.placing.turns) if row.outputs[at] is want)
        return next((row for row in rows if not any(isinstance(p, Partial) for p in row.inputs)), None)

    def _changed(self, x: Value, have: Placement, want: Placement) -> jax.Array:
        turns = self.placing.turns
        if isinstance(have, Partial):  # the whole sum is taken to be so many times this turn's
            found = self.get(x, have)
            return found * turns if have is Partial("sum") else found
        if self.placing.of(x) is EACH:
            return self.get(x, B) / turns
        assert isinstance(want, Partial)
        nothing = jnp.asarray(identity(want.reduction, x.dtype), x.dtype)
        whole = self.get(x, B)
        return whole if self._is_zero(x, want) else jnp.where(position(AXIS) == 0, whole, nothing)

    def _is_zero(self, x: Value, want: Partial) -> bool:
        """Whether it is all zeros, which are a share of every sum."""
        op = self.makers.get(x.id)
        zero = op is not None and op.name == "broadcast_in_dim" and is_zero(op.inputs[0])
        return zero and want.reduction == "sum"

    def inside(self, graph: Graph, arrays: Arrays, placed: Sequence[Placement]) -> Arrays:
        """What a loop's body returns, placed so, in this turn."""
        inner = Runner(self.placing)
        inner.add(graph)
        inner.define(graph.inputs, arrays, [held(self.placing.of(v)) for v in graph.inputs])
        inner.run(graph.ops[:-1])
        return tuple(inner.get(x, p) for x, p in zip(graph.returned, placed, strict=True))

    def operands(self, atoms: Sequence[Atom], inputs: Sequence[Value], stacked: bool = False) -> Arrays:
        """Operands of a loop as its body's inputs take them, or stacks of them."""
        places = (held(self.placing.of(v)) for v in inputs)
        return tuple(self.get(x, _stack(p) if stacked else p) for x, p in zip(atoms, places, strict=True))


def _stack(placed: Placement) -> Placement:
    return Split(int(placed.dim) + 1) if isinstance(placed, Split) else placed


def sliced(placed: Placement) -> Placement:
    """Where slices of a stack are, along its first dim."""
    return Split(int(placed.dim) - 1) if isinstance(placed, Split) else placed


def _scan(runner: Runner, op: Op, placed: Sequence[Placement]) -> Arrays:
    (body,), consts = op.bodies, op.params["num_consts"]
    first = consts + op.params["num_carry"]
    closed = runner.operands(op.inputs[:consts], body.inputs[:consts])
    start = runner.operands(op.inputs[consts:first], body.inputs[consts:first])
    stacks = runner.operands(op.inputs[first:], body.inputs[first:], stacked=True)
    ends = [*(held(runner.placing.of(v)) for v in body.inputs[consts:first]), *map(sliced, placed[first - consts :])]

    def step(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        found = runner.inside(body, (*closed, *carry, *slices), ends)
        return found[: len(carry)], found[len(carry) :]

    carry, made = lax.scan(step, start, stacks, length=op.params["length"], **scan_options(op))
    return (*carry, *made)


def scan_options(op: Op) -> dict[str, Any]:
    """How a scan goes over its trips."""
    return {name: op.params[name] for name in ("reverse", "unroll") if name in op.params}


def _while(runner: Runner, op: Op, placed: Sequence[Placement]) -> Arrays:
    (condition, body), split = op.bodies, op.params["cond_nconsts"]
    start, fixed = split + op.params["body_nconsts"], op.params["body_nconsts"]
    asked = runner.operands(op.inputs[:split], condition.inputs[:split])
    closed = runner.operands(op.inputs[split:start], body.inputs[:fixed])
    carry = runner.operands(op.inputs[start:], body.inputs[fixed:])
    ends = [held(runner.placing.of(v)) for v in body.inputs[fixed:]]
    found: Arrays = lax.while_loop(
        lambda carry: runner.inside(condition, (*asked, *carry), [B])[0],
        lambda carry: runner.inside(body, (*closed, *carry), ends),
        carry,
    )
    return found


def _cond(runner: Runner, op: Op, placed: Sequence[Placement]) -> Arrays:
    given = tuple(runner.natural(x) for x in op.inputs[1:])

    def branch(body: Graph) -> Callable[..., Arrays]:
        return lambda *arrays: runner.inside(body, arrays, placed)

    found: Arrays = lax.switch(runner.get(op.inputs[0], B), [branch(body) for body in op.bodies], *given)
    return found


_LOOPS = {"scan": _scan, "while": _while, "cond": _cond}


def marked(op: Op) -> AbstractContextManager[Any]:
    """What is traced in here comes from an operation."""
    return jax.named_scope(f"{_MARK}{op.id}")


def within(part: str) -> AbstractContextManager[Any]:
    """What is traced in here is a part of a pipeline's tick; it stays in the scope."""
    return jax.named_scope(part_scope(part))


def put_back(graph: Graph, before: Graph) -> Graph:
    """The graph with lines and scopes of the operations that its own were made from, parts of ticks in front."""
    known = {op.id: op for _, op in walk(before)}
    for _, op in walk(graph):
        marks = _MARKED.findall(op.scope)
        origin = known[int(marks[-1])] if marks else None
        where, found = origin.scope if origin else "", part_of(op.scope)
        op.source = origin.source if origin else op.source
        op.scope = f"{part_scope(found)}/{where}" if found else where
    return graph


def whole_function(graph: Graph) -> Callable[..., Arrays]:
    """The graph on whole arrays, on no mesh."""

    def run(*arrays: jax.Array) -> Arrays:
        runner = Runner(TimePlacement(1))
        runner.define(graph.inputs, arrays, [B] * len(arrays))
        runner.run(graph.ops[:-1])
        return tuple(runner.get(x, B) for x in graph.returned)

    return run
