"""The step with a loop over microbatches in it.

    before   what does not depend on the batch                     once
    inside   what is known of a part of the batch, and sums of it   once per microbatch
    after    what reads the sums, the optimizer say                 once

Nothing is differentiated again and nothing is scaled: parts of sums are added up in the dtype that they have. The
result is a step like any other with a scan in it, which is planned as any other: a gradient is a carry of that scan,
and is reduced over the devices after it, once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Graph, Value
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Partial, Split
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.collectives import identity
from meshdsl.lowering.local.registry import run_exchanges
from meshdsl.pipelining.interpreter import AXIS, Runner, marked, put_back
from meshdsl.pipelining.time_axis import EACH, WHOLE, Place, TimePlacement, held
from meshdsl.trace.annotate import annotate
from meshdsl.trace.passes import run_passes
from meshdsl.trace.read_jaxpr import read_jaxpr

JOIN = {"sum": lax.add, "max": lax.max, "min": lax.min}


def retraced(graph: Graph, run: Any) -> Graph:
    """The graph of another way to run a graph, with the lines of the operations that it runs."""
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in graph.inputs]
    return annotate(run_passes(put_back(read_jaxpr(jax.make_jaxpr(run)(*avals)), graph)))


class Step:
    """A step in three parts; ``exported`` are values of the inside that others read.

    Args:
      later: ids of operations that are done after the loop although they could be done inside.
    """

    def __init__(self, graph: Graph, placing: TimePlacement, later: Collection[int] = ()) -> None:
        self.graph, self.placing = graph, placing
        ops = graph.ops[:-1]
        whole = {op.id for op in ops if any(placing.of(v) is WHOLE for v in op.outputs)}
        self.makers = {v.id: op for op in ops for v in op.outputs}
        self.after = [op for op in ops if op.id in later or op.id in whole]
        self.inside = [op for op in ops if placing.in_turns(op) and op.id not in later]
        self.before = [op for op in ops if not placing.in_turns(op) and op.id not in whole]
        wanted = {v.id for op in self.inside for v in values(op.inputs)}
        self.batch = [v for v in graph.inputs if v.id in wanted and isinstance(placing.of(v), Split)]
        made = {v.id for op in self.inside for v in op.outputs}
        read = {v.id: v for op in (*self.after, graph.ops[-1]) for v in values(op.inputs) if v.id in made}
        self.exported = list(read.values())

    def run(self, *arrays: jax.Array) -> Arrays:
        """The step on whole arrays."""
        whole = Runner(TimePlacement(self.placing.turns))
        whole.define(self.graph.inputs, arrays, [B] * len(arrays))
        whole.run(self.before)
        whole.define(self.exported, self._loop(whole), [B] * len(self.exported))
        whole.run(self.after)
        return tuple(whole.get(x, B) for x in self.graph.returned)

    def _loop(self, whole: Runner) -> list[jax.Array]:
        with marked(self.inside[0]):
            return self.looped(whole)

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        blocks = tuple(dealt(whole.get(v, B), self.placing.turns) for v in self.batch)
        sums = [Sum.of(v, self.placing) for v in self.exported]

        def turn(carry: Arrays, given: tuple[jax.Array, Arrays]) -> tuple[Arrays, Arrays]:
            with run_exchanges(AXIS, given[0]):
                found = self._turn(whole, given[1])
            return self._added(sums, carry, found), others(found, sums)

        start = tuple(s.nothing for s in sums if s)
        totals, stacks = lax.scan(turn, start, (jnp.arange(self.placing.turns), blocks))
        left, right = iter(totals), iter(stacks)
        pairs = zip(self.exported, sums, strict=True)
        return [next(left) if s else self.joined(v, next(right)) for v, s in pairs]

    def _added(self, sums: Sequence["Sum | None"], carry: Arrays, found: Arrays) -> Arrays:
        so_far, added = iter(carry), []
        for v, s, x in zip(self.exported, sums, found, strict=True):
            if s:
                with marked(self.makers[v.id]):
                    added.append(s.add(next(so_far), x))
        return tuple(added)

    def joined(self, v: Value, stack: jax.Array) -> jax.Array:
        """A value of which every turn made a part."""
        with marked(self.makers[v.id]):
            return joined(stack, self.placing.of(v))

    def _turn(self, whole: Runner, blocks: Sequence[jax.Array]) -> Arrays:
        inner = self.turn(whole, blocks)
        inner.run(self.inside)
        return tuple(inner.natural(v) for v in self.exported)

    def turn(self, whole: Runner, blocks: Sequence[jax.Array]) -> Runner:
        """What a turn starts from."""
        inner = Runner(self.placing, dict(whole.arrays))
        inner.add(self.graph)
        for v, block in zip(self.batch, blocks, strict=True):
            del inner.arrays[v.id, B]
            inner.arrays[v.id, Split(0)] = block
        return inner


@dataclass(frozen=True)
class Sum:
    """A value to which every turn adds."""

    value: Value
    reduction: str
    turns: int

    @classmethod
    def of(cls, value: Value, placing: TimePlacement) -> "Sum | None":
        """How a value made in turns is put together; None if each turn makes a part, or all of it."""
        place = placing.of(value)
        if isinstance(place, Partial):
            return cls(value, place.reduction, 1)
        mean = place is EACH and jnp.issubdtype(value.dtype, jnp.inexact)
        return cls(value, "sum", placing.turns) if mean else None

    @property
    def nothing(self) -> jax.Array:
        """What the first turn is added to."""
        return jnp.full(self.value.shape, identity(self.reduction, self.value.dtype), self.value.dtype)

    def add(self, so_far: jax.Array, found: jax.Array) -> jax.Array:
        """With another turn's."""
        part = found / self.turns if self.turns > 1 else found
        total: jax.Array = JOIN[self.reduction](so_far, part)
        return total

    def masked(self, found: jax.Array, valid: jax.Array) -> jax.Array:
        """What a turn adds; nothing where it is none."""
        return jnp.where(valid, found, jnp.asarray(identity(self.reduction, found.dtype), found.dtype))


def dealt(x: jax.Array, turns: int) -> jax.Array:
    """The first dim in blocks, one per turn."""
    return x.reshape(turns, x.shape[0] // turns, *x.shape[1:])


def joined(x: jax.Array, place: Place) -> jax.Array:
    """Blocks of all turns, one after the other along the dim that they are of; else what the last turn has."""
    split = held(place)
    if not isinstance(split, Split):
        return x[-1]
    dim = int(split.dim)
    apart = jnp.moveaxis(x, 0, dim)
    return apart.reshape(*apart.shape[:dim], -1, *apart.shape[dim + 2 :])


def others(found: Arrays, sums: Sequence[Sum | None]) -> Arrays:
    """What is not added up."""
    return tuple(x for x, s in zip(found, sums, strict=True) if s is None)
