"""What each stage of a step that ``md.stage`` cuts does with one microbatch, as functions of arrays in buffers.

A stage's branch is given what came through the cut in front of it, and on the way back what came through the one
behind; it makes what it hands on, what it adds to sums (gradients, the loss), and what it has per example. Everything
else it makes itself: on the way back it computes its forward again, as far as it is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshdsl.ir.graph import Graph, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, Split
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.collectives import identity
from meshdsl.lowering.local.registry import position, run_exchanges
from meshdsl.pipelining.accumulate import Step, Sum
from meshdsl.pipelining.cut_stages import StagePartition
from meshdsl.pipelining.interpreter import AXIS, Runner
from meshdsl.pipelining.stage_buffers import PackedRows, Packing, examples, in_rows, of_examples, row_length
from meshdsl.pipelining.stage_cost import StageTimer, flops, room
from meshdsl.pipelining.time_axis import Place, TimePlacement
from meshdsl.schedules.simulate import TaskCost
from meshdsl.trace.annotate import annotate
from meshdsl.trace.passes import run_passes
from meshdsl.trace.read_jaxpr import read_jaxpr

Known = dict[tuple[int, Placement], jax.Array]


class Given(NamedTuple):
    """What a branch is given.

    Args:
      microbatch: its number.
      at: numbers of the examples that this device has, within the microbatch.
      blocks: the batch by microbatch.
      whole: what does not depend on the batch.
      came: through the cut in front. back: through the one behind.
    """

    microbatch: jax.Array
    at: jax.Array
    blocks: Arrays
    whole: Known
    came: Arrays
    back: Arrays


class Made(NamedTuple):
    """What a branch makes, in buffers: what it hands on, its share of sums, and what it has per example."""

    handed: Arrays
    sums: Arrays
    stacks: Arrays


def reduction_of(v: Value, placing: TimePlacement) -> str:
    """How what turns make of a value is put together, as ``Sum`` does it; empty if each turn makes a part of it.

    What that leaves to the last turn, the others add nothing to.
    """
    if isinstance(placing.of(v), Split):
        return ""
    s = Sum.of(v, placing)
    return s.reduction if s else "max" if v.dtype == jnp.bool_ else "sum"


class StageSide:
    """One way through all stages, forward or back.

    Args:
      ranks: rows in which whole arrays lie.
    """

    def __init__(self, step: Step, parts: StagePartition, ranks: int, back: bool) -> None:
        self.step, self.parts, self.ranks, self.back = step, parts, ranks, back
        self.turns, stages = step.placing.turns, range(parts.last + 1)
        self.cuts = [parts.handed(cut.backward if back else cut.forward) for cut in parts.cuts]
        mine = [v for v in step.exported if parts.is_back(v) == back]
        self.totals = {v.id: how for v in mine if (how := reduction_of(v, step.placing))}
        self.sums = [[v for v in mine if parts.stage(v) == k and v.id in self.totals] for k in stages]
        self.stacks = [[v for v in mine if parts.stage(v) == k and v.id not in self.totals] for k in stages]
        self.handing = Packing([[self._row(v) for _, v in cut] for cut in self.cuts])
        self.adding = Packing([[self._total(v) for v in each] for each in self.sums])
        self.stacking = Packing([[self._row(v) for v in each] for each in self.stacks])

    def _row(self, v: Value) -> PackedRows:
        """What is known per example."""
        return PackedRows(row_length(v.shape, self.step.batch[0].shape[0]), v.dtype)

    def _total(self, v: Value) -> PackedRows:
        return PackedRows(row_length(v.shape, self.ranks), v.dtype, self.totals[v.id])

    def entry(self, stage: int) -> int:
        """The cut by which a stage is entered; none if it is out of range."""
        return stage if self.back else stage - 1

    def exit(self, stage: int) -> int:
        """The cut by which a stage is left."""
        return stage - 1 if self.back else stage

    def enter(self, stage: int, buffers: Arrays, runner: Runner) -> None:
        """Let a stage know what came."""
        cut = self.entry(stage)
        if buffers and 0 <= cut < len(self.cuts):
            for (_, v), x in zip(self.cuts[cut], self.handing.unpack(cut, buffers), strict=True):
                place = self.step.placing.of(v)
                runner.arrays[v.id, place] = of_examples(x, _dim(place), v.shape)  # type: ignore[index]

    def made(self, stage: int, runner: Runner, rows: int) -> Made:
        """What a stage makes, with so many examples."""
        cut = self.exit(stage)
        leaves = [x for x, _ in self.cuts[cut]] if 0 <= cut < len(self.cuts) else []
        handed = [examples(runner.natural(x), _dim(runner.placing.of(x)), rows) for x in leaves]
        sums = [in_rows(self._share(v, runner), self.ranks) for v in self.sums[stage]]
        stacks = [examples(runner.natural(v), _dim(runner.placing.of(v)), rows) for v in self.stacks[stage]]
        return Made(
            self.handing.pack(cut, handed, rows) if leaves else self.handing.nothing(rows),
            self.adding.pack(stage, sums, self.ranks),
            self.stacking.pack(stage, stacks, rows),
        )

    def whole(self, stage: int, buffers: Sequence[jax.Array]) -> Iterator[jax.Array]:
        """What a stage has per example, of all microbatches: from its buffers by microbatch."""
        rows = [x.reshape(-1, x.shape[-1]) for x in buffers]
        for v, x in zip(self.stacks[stage], self.stacking.unpack(stage, rows), strict=True):
            yield of_examples(x, _dim(self.step.placing.of(v)), v.shape)

    def _share(self, v: Value, runner: Runner) -> jax.Array:
        found, s = runner.natural(v), Sum.of(v, self.step.placing)
        if s is None:
            last = position(AXIS) == runner.placing.turns - 1
            return jnp.where(last, found, jnp.asarray(identity(self.totals[v.id], v.dtype), v.dtype))
        return found / s.turns if s.turns > 1 else found

    def idle(self, rows: int) -> Made:
        """What a rank makes that has no microbatch."""
        return Made(self.handing.nothing(rows), self.adding.nothing(self.ranks), self.stacking.nothing(rows))


def _dim(place: Place) -> int:
    """The dim along which examples lie."""
    assert isinstance(place, Split)
    return int(place.dim)


class Branches:
    """What all stages do, both ways."""

    def __init__(self, step: Step, parts: StagePartition, ranks: int) -> None:
        self.step, self.parts, self.size = step, parts, step.batch[0].shape[0] // step.placing.turns
        self.forward, self.backward = (StageSide(step, parts, ranks, back) for back in (False, True))

    @property
    def sides(self) -> tuple[StageSide, ...]:
        """The ways that are gone."""
        return (self.forward,) if self.parts.forward_only else (self.forward, self.backward)

    def run(self, side: StageSide, stage: int, given: Given) -> Made:
        """What a stage does with a microbatch, or with as many of its examples as there are."""
        rows = given.at.shape[0]
        parted = self.size // rows
        runner = Runner(replace(self.step.placing, turns=self.step.placing.turns * parted), given.whole)
        runner.add(self.step.graph)
        with run_exchanges(AXIS, given.microbatch * parted + given.at[0] // rows):
            for v, block in zip(self.step.batch, given.blocks, strict=True):
                runner.arrays[v.id, Split(0)] = jax.lax.dynamic_index_in_dim(block, given.microbatch, 0, False)
            self.forward.enter(stage, given.came, runner)
            self.backward.enter(stage, given.back, runner)
            return side.made(stage, runner, rows)

    @cached_property
    def traced(self) -> list[list["Branch"]]:
        """Per side and stage, its work on a microbatch."""
        return [[self._traced(side, stage) for stage in range(self.parts.last + 1)] for side in self.sides]

    def _traced(self, side: StageSide, stage: int) -> "Branch":
        known = [v for op in self.step.before for v in op.outputs]
        known += [v for v in self.step.graph.inputs if self.step.placing.of(v) is B]
        read = set[tuple[int, Placement]]()

        def run(number: jax.Array, at: jax.Array, arrays: Arrays, *handed: Arrays) -> Made:
            blocks, whole = arrays[: len(self.step.batch)], arrays[len(self.step.batch) :]
            noting = _Noting({(v.id, B): x for v, x in zip(known, whole, strict=True)}, read)
            return self.run(side, stage, Given(number, at, blocks, noting, *handed))

        turns = self.step.placing.turns
        blocks = [jax.ShapeDtypeStruct((turns, self.size, *v.shape[1:]), v.dtype) for v in self.step.batch]
        arrays = (*blocks, *(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in known))
        came, back = (
            tuple(jax.ShapeDtypeStruct((self.size, row.length), row.dtype) for row in each.handing.columns)
            for each in (self.forward, self.backward)
        )
        at = jax.ShapeDtypeStruct((self.size,), jnp.int32)
        closed = jax.make_jaxpr(run)(jnp.int32(0), at, arrays, came, back if side.back else ())
        return Branch(frozenset(i for i, _ in read), annotate(run_passes(read_jaxpr(closed))))

    @cached_property
    def flops(self) -> list[list[float]]:
        """Per side and stage, FLOPs of its products."""
        return [[flops(branch.graph) for branch in side] for side in self.traced]

    def loads(self, mesh: Mesh) -> tuple[TaskCost, ...]:
        """What the work of every stage takes."""
        return tuple(_load(each, mesh) for each in zip(*self.traced, strict=True))


@dataclass(frozen=True)
class Branch:
    """One stage's work on one microbatch.

    Args:
      reads: ids of what it reads that does not depend on the batch.
      graph: its operations.
    """

    reads: frozenset[int]
    graph: Graph


def _load(ways: Sequence[Branch], mesh: Mesh) -> TaskCost:
    """What a stage takes forward, and back if anything goes back."""
    seconds = [StageTimer(branch.graph, mesh).seconds(branch.graph.ops) for branch in ways]
    return TaskCost(seconds[0], sum(seconds[1:]), max(room(branch.graph, mesh) for branch in ways))


class _Noting(dict[tuple[int, Placement], jax.Array]):
    """Arrays that note which of them are read."""

    def __init__(self, arrays: Known, read: set[tuple[int, Placement]]) -> None:
        super().__init__(arrays)
        self.known, self.read = set(arrays), read

    def __getitem__(self, key: tuple[int, Placement]) -> jax.Array:
        if key in self.known:
            self.read.add(key)
        return super().__getitem__(key)
