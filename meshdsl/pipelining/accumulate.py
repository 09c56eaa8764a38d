"""Gradient accumulation: one loop over microbatches inside the step.

The analysis of the time axis cuts a step into three parts:

    before   independent of the batch                                            runs once
    inside   computed from one microbatch, and contributions to sums over the batch   runs once per microbatch
    after    uses complete sums, such as the optimizer                           runs once

    loss, grads = value_and_grad(f)(params, batch)         for each microbatch: loss += ..., grads += ...
    params = update(params, grads)                   ->    params = update(params, grads)

Nothing is differentiated again and nothing is rescaled: contributions are added in the dtype that they have. The result
is an ordinary step that contains a scan, so it is planned like any other; a gradient is a carry of that scan and is
reduced over devices once, after it.

``SplitStep`` is the cut; a ``StepLoop`` runs its inside. ``MicrobatchLoop`` is the plain loop, the pipelines of
``scan_executor`` and ``cut_executor`` are the others.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Graph, Value
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Partial, Split
from meshdsl.layouts.roundness import Roundness
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.collectives import identity
from meshdsl.lowering.local.registry import time_axis_at
from meshdsl.pipelining.interpreter import AXIS, Runner, restore_sources, traced_from
from meshdsl.pipelining.time_axis import AFTER_LOOP, PER_MICROBATCH, TimePlacement, local_placement
from meshdsl.trace.annotate import annotate
from meshdsl.trace.passes import run_passes
from meshdsl.trace.read_jaxpr import read_jaxpr

REDUCE = {"sum": lax.add, "max": lax.max, "min": lax.min}

# ---- The cut ---------------------------------------------------------------------------------------------------------


class StepLoop(Protocol):
    """Runs the inside of a step for all microbatches."""

    def run(self, whole: Runner) -> list[jax.Array]:
        """Returns the exported values, whole, given what ``whole`` knows from before the loop."""


class SplitStep:
    """A step cut into before, inside and after.

    Args:
      deferred: ids of operations that run after the loop although they could run inside.

    ``batch`` are the inputs that the inside uses by microbatch, ``exported`` the values of the inside that the rest
    uses.
    """

    def __init__(self, graph: Graph, placement: TimePlacement, deferred: Collection[int] = ()) -> None:
        self.graph, self.placement = graph, placement
        ops = graph.ops[:-1]
        late = {op.id for op in ops if any(placement.of(v) is AFTER_LOOP for v in op.outputs)}
        self.producers = {v.id: op for op in ops for v in op.outputs}
        self.after = [op for op in ops if op.id in deferred or op.id in late]
        self.inside = [op for op in ops if placement.is_per_microbatch(op) and op.id not in deferred]
        self.before = [op for op in ops if not placement.is_per_microbatch(op) and op.id not in late]
        used = {v.id for op in self.inside for v in values(op.inputs)}
        self.batch = [v for v in graph.inputs if v.id in used and isinstance(placement.of(v), Split)]
        inner = {v.id for op in self.inside for v in op.outputs}
        outer_uses = {v.id: v for op in (*self.after, graph.ops[-1]) for v in values(op.inputs) if v.id in inner}
        self.exported = list(outer_uses.values())

    def retraced(self, loop: StepLoop, roundness: Roundness) -> Graph:
        """Returns the graph of the step whose inside ``loop`` runs; operations keep their source lines.

        Args:
          roundness: which lengths the mesh divides.
        """

        def run(*arrays: jax.Array) -> Arrays:
            whole = Runner(TimePlacement(self.placement.microbatches))
            whole.define(self.graph.inputs, arrays, [B] * len(arrays))
            whole.run(self.before)
            with traced_from(self.inside[0]):
                exported = loop.run(whole)
            whole.define(self.exported, exported, [B] * len(self.exported))
            whole.run(self.after)
            return tuple(whole.get(x, B) for x in self.graph.returned)

        avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in self.graph.inputs]
        read = restore_sources(read_jaxpr(jax.make_jaxpr(run)(*avals)), self.graph)
        return annotate(run_passes(read, roundness))

    def microbatches_of_batch(self, whole: Runner) -> Arrays:
        """Returns the batch by microbatch: a leading dim of microbatches on every array."""
        count = self.placement.microbatches
        blocks = (whole.get(v, B) for v in self.batch)
        return tuple(x.reshape(count, x.shape[0] // count, *x.shape[1:]) for x in blocks)

    def iteration(self, whole: Runner, blocks: Sequence[jax.Array]) -> Runner:
        """Returns the environment in which an iteration starts, with its microbatch of the batch."""
        inner = Runner(self.placement, dict(whole.arrays))
        inner.add_producers(self.graph)
        for v, block in zip(self.batch, blocks, strict=True):
            del inner.arrays[v.id, B]
            inner.arrays[v.id, Split(0)] = block
        return inner

    def joined(self, v: Value, stack: jax.Array) -> jax.Array:
        """Returns a value from its stack by iteration: its blocks concatenated, or the last iteration's whole value."""
        with traced_from(self.producers[v.id]):
            split = local_placement(self.placement.of(v))
            if not isinstance(split, Split):
                return stack[-1]
            dim = int(split.dim)
            blocks = jnp.moveaxis(stack, 0, dim)
            return blocks.reshape(*blocks.shape[:dim], -1, *blocks.shape[dim + 2 :])


# ---- Accumulation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accumulator:
    """A reduction over microbatches of an exported value.

    Args:
      divisor: contributions are divided by it; the number of microbatches for a mean.
    """

    value: Value
    reduction: str
    divisor: int

    @classmethod
    def of(cls, value: Value, placement: TimePlacement) -> "Accumulator | None":
        """Returns how contributions are combined; None if every iteration computes a block, or all of the value."""
        place = placement.of(value)
        if isinstance(place, Partial):
            return cls(value, place.reduction, 1)
        mean = place is PER_MICROBATCH and jnp.issubdtype(value.dtype, jnp.inexact)
        return cls(value, "sum", placement.microbatches) if mean else None

    @property
    def initial(self) -> jax.Array:
        """The total before the first contribution."""
        return jnp.full(self.value.shape, identity(self.reduction, self.value.dtype), self.value.dtype)

    def add(self, total: jax.Array, contribution: jax.Array) -> jax.Array:
        """Returns the total with one more contribution."""
        part = contribution / self.divisor if self.divisor > 1 else contribution
        result: jax.Array = REDUCE[self.reduction](total, part)
        return result

    def masked(self, contribution: jax.Array, valid: jax.Array) -> jax.Array:
        """Returns the contribution where ``valid``, the identity of the reduction elsewhere."""
        neutral = jnp.asarray(identity(self.reduction, contribution.dtype), contribution.dtype)
        return jnp.where(valid, contribution, neutral)


@dataclass(frozen=True)
class MicrobatchLoop:
    """The plain loop: microbatches one after the other, totals as carries, everything else stacked."""

    step: SplitStep

    def run(self, whole: Runner) -> list[jax.Array]:
        """Returns the exported values, whole."""
        step = self.step
        blocks = step.microbatches_of_batch(whole)
        totals = [Accumulator.of(v, step.placement) for v in step.exported]

        def iteration(carry: Arrays, scanned: tuple[jax.Array, Arrays]) -> tuple[Arrays, Arrays]:
            number, block = scanned
            with time_axis_at(AXIS, number):
                inner = step.iteration(whole, block)
                inner.run(step.inside)
                results = [inner.local(v) for v in step.exported]
            current, added = iter(carry), []
            for v, total, x in zip(step.exported, totals, results, strict=True):
                if total:
                    with traced_from(step.producers[v.id]):
                        added.append(total.add(next(current), x))
            return tuple(added), tuple(x for x, total in zip(results, totals, strict=True) if total is None)

        start = tuple(total.initial for total in totals if total)
        sums, stacks = lax.scan(iteration, start, (jnp.arange(step.placement.microbatches), blocks))
        next_sum, next_stack = iter(sums), iter(stacks)
        return [
            next(next_sum) if total else step.joined(v, next(next_stack))
            for v, total in zip(step.exported, totals, strict=True)
        ]
