"""The work of each stage that ``md.stage`` cuts: one branch function per stage and direction, over packed buffers.

A branch receives, in buffers that are equal for all stages (``stage_buffers.Packing``), what came through the cut
before its stage, and backward also the gradients that came through the cut after it. It returns what it sends, its
contributions to totals (gradients, the loss), and what it exports per example. Everything else it computes itself:
backward, that is its forward again, as far as it is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Atom, Graph, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, Split
from meshdsl.layouts.roundness import POWERS_OF_TWO
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.collectives import identity
from meshdsl.lowering.local.registry import position, time_axis_at
from meshdsl.pipelining.accumulate import Accumulator, SplitStep
from meshdsl.pipelining.cut_stages import StagePartition
from meshdsl.pipelining.interpreter import AXIS, Environment, Runner
from meshdsl.pipelining.stage_buffers import (
    PackedRows,
    Packing,
    from_example_rows,
    row_length,
    to_example_rows,
    to_rows,
)
from meshdsl.pipelining.stage_cost import StageTimer, matrix_flops
from meshdsl.pipelining.time_axis import TimePlace, TimePlacement
from meshdsl.planner.liveness.peak import peak_inside
from meshdsl.schedules.simulate import TaskCost
from meshdsl.trace.annotate import annotate
from meshdsl.trace.passes import run_passes
from meshdsl.trace.read_jaxpr import read_jaxpr

# ---- Arguments and results of a branch -------------------------------------------------------------------------------


class BranchInputs(NamedTuple):
    """What a branch reads.

    Args:
      microbatch: its number.
      examples: numbers, within the microbatch, of the examples that this device has.
      batch: the batch by microbatch.
      whole: values that are independent of the batch.
      received: buffers from the cut before the stage.
      gradients: buffers from the cut after it; empty forward.
    """

    microbatch: jax.Array
    examples: jax.Array
    batch: Arrays
    whole: Environment
    received: Arrays
    gradients: Arrays


class BranchResults(NamedTuple):
    """What a branch computes, in buffers: what it sends, contributions to totals, and exports per example."""

    sent: Arrays
    totals: Arrays
    stacks: Arrays


def reduction_of(v: Value, placement: TimePlacement) -> str:
    """Returns how contributions of iterations to a value are combined; empty if each iteration computes a block of it.

    A value of which only the last iteration's counts is a sum to which the others contribute nothing.
    """
    if isinstance(placement.of(v), Split):
        return ""
    total = Accumulator.of(v, placement)
    return total.reduction if total else "max" if v.dtype == jnp.bool_ else "sum"


def _example_dim(place: TimePlace) -> int:
    assert isinstance(place, Split)
    return int(place.dim)


# ---- One direction ---------------------------------------------------------------------------------------------------


class StageSide:
    """All stages in one direction: what each sends, adds and exports, and where these lie in the buffers.

    Args:
      ranks: rows in which whole arrays are packed.
    """

    def __init__(self, step: SplitStep, partition: StagePartition, ranks: int, is_backward: bool) -> None:
        self.step, self.partition, self.ranks, self.is_backward = step, partition, ranks, is_backward
        stages = range(partition.last_stage + 1)
        self.cuts = [partition.sent(cut.backward if is_backward else cut.forward) for cut in partition.cuts]
        mine = [v for v in step.exported if partition.is_backward(v) == is_backward]
        self.reductions = {v.id: how for v in mine if (how := reduction_of(v, step.placement))}
        of_stage = [[v for v in mine if partition.stage(v) == k] for k in stages]
        self.totals = [[v for v in each if v.id in self.reductions] for each in of_stage]
        self.stacks = [[v for v in each if v.id not in self.reductions] for each in of_stage]
        self.sending = Packing([[self._example_rows(v) for _, v in cut] for cut in self.cuts])
        self.adding = Packing([[self._whole_rows(v) for v in each] for each in self.totals])
        self.stacking = Packing([[self._example_rows(v) for v in each] for each in self.stacks])

    def _example_rows(self, v: Value) -> PackedRows:
        return PackedRows(row_length(v.shape, self.step.batch[0].shape[0]), v.dtype)

    def _whole_rows(self, v: Value) -> PackedRows:
        return PackedRows(row_length(v.shape, self.ranks), v.dtype, self.reductions[v.id])

    def receive(self, stage: int, buffers: Arrays, runner: Runner) -> None:
        """Binds what a stage received through its cut in this direction, if it has one."""
        cut = stage if self.is_backward else stage - 1
        if buffers and 0 <= cut < len(self.cuts):
            for (_, v), x in zip(self.cuts[cut], self.sending.unpack(cut, buffers), strict=True):
                place = self.step.placement.of(v)
                runner.arrays[v.id, place] = from_example_rows(x, _example_dim(place), v.shape)  # type: ignore[index]

    def results(self, stage: int, runner: Runner, rows: int) -> BranchResults:
        """Computes the results of a stage for ``rows`` examples."""

        def by_example(x: Atom) -> jax.Array:
            return to_example_rows(runner.local(x), _example_dim(runner.placement.of(x)), rows)

        cut = stage - 1 if self.is_backward else stage
        leaves = [x for x, _ in self.cuts[cut]] if 0 <= cut < len(self.cuts) else []
        sent = [by_example(x) for x in leaves]
        totals = [to_rows(self._contribution(v, runner), self.ranks) for v in self.totals[stage]]
        stacks = [by_example(v) for v in self.stacks[stage]]
        return BranchResults(
            self.sending.pack(cut, sent, rows) if leaves else self.sending.neutral(rows),
            self.adding.pack(stage, totals, self.ranks),
            self.stacking.pack(stage, stacks, rows),
        )

    def _contribution(self, v: Value, runner: Runner) -> jax.Array:
        x, total = runner.local(v), Accumulator.of(v, self.step.placement)
        if total is None:
            is_last = position(AXIS) == runner.placement.microbatches - 1
            return jnp.where(is_last, x, jnp.asarray(identity(self.reductions[v.id], v.dtype), v.dtype))
        return x / total.divisor if total.divisor > 1 else x

    def idle(self, rows: int) -> BranchResults:
        """Returns the results of a rank without a microbatch."""
        return BranchResults(self.sending.neutral(rows), self.adding.neutral(self.ranks), self.stacking.neutral(rows))

    def exported_stacks(self, stage: int, buffers: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """Yields what a stage exports per example, of all microbatches, from its buffers by microbatch."""
        rows = [x.reshape(-1, x.shape[-1]) for x in buffers]
        for v, x in zip(self.stacks[stage], self.stacking.unpack(stage, rows), strict=True):
            yield from_example_rows(x, _example_dim(self.step.placement.of(v)), v.shape)


# ---- Branches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branch:
    """The traced work of one stage on one microbatch.

    Args:
      reads: ids of the values it uses that are independent of the batch.
      graph: its operations.
    """

    reads: frozenset[int]
    graph: Graph


class Branches:
    """The branch functions of all stages in both directions."""

    def __init__(self, step: SplitStep, partition: StagePartition, ranks: int) -> None:
        self.step, self.partition = step, partition
        self.examples = step.batch[0].shape[0] // step.placement.microbatches
        self.forward, self.backward = (StageSide(step, partition, ranks, back) for back in (False, True))

    @property
    def sides(self) -> tuple[StageSide, ...]:
        """The directions that occur: forward, and backward unless the step is an evaluation."""
        return (self.forward,) if self.partition.forward_only else (self.forward, self.backward)

    def run(self, side: StageSide, stage: int, given: BranchInputs) -> BranchResults:
        """Runs a stage on a microbatch, or on the share of its examples that this device has."""
        rows = given.examples.shape[0]
        shares, placement = self.examples // rows, self.step.placement
        runner = Runner(replace(placement, microbatches=placement.microbatches * shares), given.whole)
        runner.add_producers(self.step.graph)
        with time_axis_at(AXIS, given.microbatch * shares + given.examples[0] // rows):
            for v, block in zip(self.step.batch, given.batch, strict=True):
                runner.arrays[v.id, Split(0)] = jax.lax.dynamic_index_in_dim(block, given.microbatch, 0, False)
            self.forward.receive(stage, given.received, runner)
            self.backward.receive(stage, given.gradients, runner)
            return side.results(stage, runner, rows)

    @cached_property
    def traced(self) -> list[list[Branch]]:
        """Per direction and stage, its work on a whole microbatch."""
        return [[self._traced(side, stage) for stage in range(self.partition.last_stage + 1)] for side in self.sides]

    def _traced(self, side: StageSide, stage: int) -> Branch:
        known = [v for op in self.step.before for v in op.outputs]
        known += [v for v in self.step.graph.inputs if self.step.placement.of(v) is B]
        reads = set[tuple[int, Placement]]()

        def run(number: jax.Array, examples: jax.Array, arrays: Arrays, *buffers: Arrays) -> BranchResults:
            batch, whole = arrays[: len(self.step.batch)], arrays[len(self.step.batch) :]
            recording = _RecordingEnvironment({(v.id, B): x for v, x in zip(known, whole, strict=True)}, reads)
            return self.run(side, stage, BranchInputs(number, examples, batch, recording, *buffers))

        count = self.step.placement.microbatches
        batch = [jax.ShapeDtypeStruct((count, self.examples, *v.shape[1:]), v.dtype) for v in self.step.batch]
        arrays = (*batch, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in known))
        received, gradients = (
            tuple(jax.ShapeDtypeStruct((self.examples, row.length), row.dtype) for row in each.sending.columns)
            for each in (self.forward, self.backward)
        )
        examples = jax.ShapeDtypeStruct((self.examples,), jnp.int32)
        buffers = received, gradients if side.is_backward else ()
        closed = jax.make_jaxpr(run)(jnp.int32(0), examples, arrays, *buffers)
        return Branch(frozenset(i for i, _ in reads), annotate(run_passes(read_jaxpr(closed), POWERS_OF_TWO)))

    @cached_property
    def flops(self) -> list[list[float]]:
        """Per direction and stage, FLOPs of its matrix products."""
        return [[matrix_flops(branch.graph) for branch in side] for side in self.traced]

    def task_costs(self, mesh: Mesh) -> tuple[TaskCost, ...]:
        """Returns what the tasks of every stage cost on one device."""
        found = []
        for stage in zip(*self.traced, strict=True):
            forward, *backward = (StageTimer(branch.graph, mesh).seconds(branch.graph.ops) for branch in stage)
            workspace = max(peak_inside(branch.graph, mesh) for branch in stage)
            found.append(TaskCost(forward, sum(backward), workspace))
        return tuple(found)


class _RecordingEnvironment(Environment):
    """An environment that records which of its initial arrays are used."""

    def __init__(self, arrays: Environment, reads: set[tuple[int, Placement]]) -> None:
        super().__init__(arrays)
        self.known, self.reads = set(arrays), reads

    def __getitem__(self, key: tuple[int, Placement]) -> jax.Array:
        if key in self.known:
            self.reads.add(key)
        return super().__getitem__(key)
