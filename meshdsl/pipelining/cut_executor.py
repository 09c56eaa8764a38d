"""Pipelines of different stages: parts that ``md.stage`` cuts, as branches of a switch on every device.

The tick loops are those of any timetable (``tick_executor``). The forward or backward work of all ranks in a tick is
one operation, ``Switch``: on each device, ``lax.switch`` runs the branch of its own stage (``cut_stage_work``). To the
planner it is a custom call with a rule: its stacks are split over the axis of the stages, and the examples of a
microbatch may be split over other axes, over which contributions to gradients are then partial. So no branch contains a
collective, and what stages send moves outside of the switch.

Compared with a pipelined layer scan:

    conditionals   the compiled program has some; devices of other axes are idle unless they split the batch
    buffers        every rank sends as much as the largest cut, per dtype
    weights        during the step, a stage's weights are packed on its devices, in buffers as long as those of the
                   largest stage; outside they are sharded as planned, over all devices, and exchanged once per step, as
                   are their gradients; weights that several stages use are whole on all of them
    plan           what a branch computes is not planned but predicted from its operations: a tick takes as long as the
                   largest of the stages that work in it, and needs the workspace of the largest of all

A rank without a microbatch runs an empty branch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from meshdsl.custom_rules.notation import RuleSpec
from meshdsl.custom_rules.primitive import FixedCost, RuledCall, custom_rule_p
from meshdsl.errors import PipelineError, nearest
from meshdsl.ir.graph import Graph, TracedProgram
from meshdsl.ir.rewrite import Table, filtered, substitute, with_ops
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Split
from meshdsl.layouts.sharding_rule import Dims
from meshdsl.lowering.interpreter import Arrays
from meshdsl.pins import UserPins
from meshdsl.pipelining.accumulate import REDUCE, SplitStep
from meshdsl.pipelining.cut_stage_work import Branch, Branches, BranchInputs, BranchResults, StageSide, reduction_of
from meshdsl.pipelining.cut_stages import AFTER, StagePartition, find_partition
from meshdsl.pipelining.interpreter import Environment, Runner, traced_from, traced_in
from meshdsl.pipelining.stage_buffers import PackedRows, Packing, Ranks, from_rows, pick, row_length, to_rows
from meshdsl.pipelining.stage_cost import StageTimer
from meshdsl.pipelining.stage_shard_maps import refuse_in_parts
from meshdsl.pipelining.tick_executor import (
    Stacks,
    StageLinks,
    TickExecutor,
    TickResults,
    TickState,
    Totals,
    joined,
    keys_of,
)
from meshdsl.pipelining.tick_loops import Backward, Forward, Head, Loop, TickTable, TickUnits
from meshdsl.pipelining.time_axis import PER_MICROBATCH, TimePlacement, analyze_time_axis
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import BACKWARD
from meshdsl.schedules.spec import Pipeline
from meshdsl.trace.annotate import BACKWARD as BACKWARD_PHASE

FORWARD_SIDE, BACKWARD_SIDE = 0, 1  # positions in ``Branches.sides``
StageOrder = NDArray[np.int32]  # by chunk and rank, the stage

# ---- Weights ---------------------------------------------------------------------------------------------------------


class StageWeights:
    """What branches use that is independent of the batch: packed by stage if one stage uses it, whole otherwise.

    Args:
      order: by chunk and rank, the stage.
      sides: per direction and stage, its traced work.
      whole: the environment of values that are independent of the batch.
    """

    def __init__(self, ranks: Ranks, order: StageOrder, sides: Sequence[Sequence[Branch]], whole: Runner) -> None:
        self.ranks, self.order, self.arrays = ranks, order, {i: x for (i, _), x in whole.arrays.items()}
        self.own = self._owned([set().union(*(branch.reads for branch in each)) for each in zip(*sides, strict=True)])
        reads = [set[int]().union(*(branch.reads for branch in side)) for side in sides]
        self.common = [sorted(ids.difference(*self.own)) for ids in reads]
        rows = [
            [PackedRows(row_length(self.arrays[i].shape, ranks.count), self.arrays[i].dtype) for i in each]
            for each in self.own
        ]
        self.packing = Packing(rows)
        self.packed = self._pack()

    def _owned(self, reads: Sequence[set[int]]) -> list[list[int]]:
        """Returns per stage the ids of values that it alone uses and that have several elements."""
        large = {i for i, x in self.arrays.items() if x.size > 1 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
        return [sorted(i for i in each & large if sum(i in other for other in reads) == 1) for each in reads]

    def _pack(self) -> Arrays:
        """Returns the buffers by chunk and rank."""
        rows = [[to_rows(self.arrays[i], self.ranks.count) for i in each] for each in self.own]
        buffers = [self.packing.pack(stage, each, self.ranks.count) for stage, each in enumerate(rows)]
        stacks = [jnp.stack([each[s] for s in self.order.ravel()]) for each in zip(*buffers, strict=True)]
        return tuple(self.ranks.split(x.reshape(*self.order.shape, *x.shape[1:]), 1) for x in stacks)

    def shared(self, side: int) -> Arrays:
        """Returns what several stages use in a direction, or is small."""
        return tuple(self.arrays[i] for i in self.common[side])

    def of_stage(self, stage: int, side: int, packed: Arrays, shared: Arrays) -> Environment:
        """Returns what a stage uses, from the packed buffers of its rank."""
        chunk = int(np.argwhere(self.order == stage)[0, 0])
        own = zip(self.own[stage], self.packing.unpack(stage, [x[chunk] for x in packed]), strict=True)
        found: Environment = {(i, B): from_rows(x, self.arrays[i].shape) for i, x in own}
        return found | {(i, B): x for i, x in zip(self.common[side], shared, strict=True)}


# ---- The switch ------------------------------------------------------------------------------------------------------


class _SwitchOperands(NamedTuple):
    """The operands of a switch after the stages, microbatches and example numbers."""

    batch: Sequence[jax.Array]
    shared: Sequence[jax.Array]
    packed: Sequence[jax.Array]
    buffers: Sequence[jax.Array]


class Switch:
    """The work of all ranks in one direction, as one operation.

    Args:
      splits_examples: whether other axes may split the examples of a microbatch.
    """

    def __init__(
        self,
        branches: Branches,
        side: StageSide,
        weights: StageWeights,
        batch: Arrays,
        splits_examples: bool,
    ) -> None:
        self.branches, self.side, self.weights, self.order, self.batch = branches, side, weights, weights.order, batch
        self.shared = weights.shared(int(side.is_backward))
        name = "stages back" if side.is_backward else "stages"
        self.call = RuledCall(name, self._local, self._rule(("examples",) if splits_examples else ()))

    def _rule(self, examples: tuple[str, ...]) -> RuleSpec:
        """Returns the rule: stacks are split by rank; contributions are partial over the axes that split examples."""
        ranks, side = ("ranks",), self.side
        sent: Dims = (ranks, examples, ())
        received = len(self.branches.forward.sending.columns)
        received += len(self.branches.backward.sending.columns) if side.is_backward else 0
        inputs: list[Dims] = [(ranks,), (ranks,), (examples,)]
        inputs += [((), examples, *[()] * (x.ndim - 2)) for x in self.batch]
        inputs += [((),) * x.ndim for x in self.shared]
        inputs += [((), ranks, (), ()) for _ in self.weights.packed] + [sent] * received
        outputs: list[Dims] = [sent] * len(side.sending.columns) + [(ranks, (), ())] * len(side.adding.columns)
        outputs += [sent] * len(side.stacking.columns)
        return RuleSpec(tuple(inputs), tuple(outputs), reduced=tuple((name, "sum") for name in examples))

    def __call__(self, units: TickUnits, received: Arrays, gradients: Arrays, cost: FixedCost) -> BranchResults:
        """Runs the branches of all ranks; those without a microbatch contribute nothing.

        Args:
          cost: what the ranks together take.
        """
        order = jnp.asarray(self.order)
        stage = order[0] if len(order) == 1 else jax.vmap(pick, (1, 0))(order, units.chunk)
        stage = jnp.where(units.valid, stage, self.order.size)
        examples = lax.iota(jnp.int32, self.branches.examples)
        operands = (*self.batch, *self.shared, *self.weights.packed, *received, *gradients)
        arrays = (stage, units.microbatch, examples, *operands)
        results = iter(custom_rule_p.bind(*arrays, ruled=replace(self.call, spent=cost)))
        side = self.side
        return BranchResults(
            *(tuple(next(results) for _ in p.columns) for p in (side.sending, side.adding, side.stacking))
        )

    def _local(
        self, stage: jax.Array, microbatch: jax.Array, examples: jax.Array, *operands: jax.Array
    ) -> list[jax.Array]:
        """Runs the ranks that a device holds: one, or all of them in a check on one device."""
        made = [self._rank(i, stage, microbatch, examples, operands) for i in range(stage.shape[0])]
        return [jnp.stack(each) for each in zip(*made, strict=True)]

    def _rank(
        self, i: int, stage: jax.Array, microbatch: jax.Array, examples: jax.Array, operands: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Runs a switch over the stages that rank ``i`` of this device may have, and an idle branch."""
        holds_all = stage.shape[0] == self.order.shape[1]
        stages = (self.order[:, i] if holds_all else self.order.ravel()).tolist()
        which = jnp.argmax(jnp.append(stage[i] == jnp.asarray(stages), True))
        branches: list[Callable[..., list[jax.Array]]] = [*(partial(self._branch, s) for s in stages), self._idle]
        remaining, parts = list(operands), []
        for count in (len(self.batch), len(self.shared), len(self.weights.packed)):
            parts.append(remaining[:count])
            remaining = remaining[count:]
        of_rank = _SwitchOperands(parts[0], parts[1], [x[:, i] for x in parts[2]], [x[i] for x in remaining])
        results: list[jax.Array] = lax.switch(which, branches, microbatch[i], examples, *of_rank)
        return results

    def _branch(self, stage: int, microbatch: jax.Array, examples: jax.Array, *operands: Any) -> list[jax.Array]:
        batch, shared, packed, buffers = map(tuple, operands)
        n = len(self.branches.forward.sending.columns)
        whole = self.weights.of_stage(stage, int(self.side.is_backward), packed, shared)
        given = BranchInputs(microbatch, examples, batch, whole, buffers[:n], buffers[n:])
        return jax.tree.leaves(self.branches.run(self.side, stage, given))

    def _idle(self, microbatch: jax.Array, examples: jax.Array, *operands: Any) -> list[jax.Array]:
        return jax.tree.leaves(self.side.idle(examples.shape[0]))


# ---- The backend of the tick loops -----------------------------------------------------------------------------------


class CutPipeline:
    """The pipeline of a step that ``md.stage`` cuts, as the loop inside it (``accumulate.StepLoop``).

    Args:
      splits_examples: whether other axes may split the examples of a microbatch.
    """

    def __init__(
        self, graph: Graph, partition: StagePartition, table: TickTable, axis: str, splits_examples: bool, mesh: Mesh
    ) -> None:
        deferred = [op.id for op in graph.ops if any(partition.times.get(v.id) == AFTER for v in op.outputs)]
        self.step = SplitStep(graph, partition.placement, deferred)
        self.partition, self.table, self.ranks = partition, table, Ranks(axis, table.ranks)
        self.branches = Branches(self.step, partition, table.ranks)
        self.task_costs = self.branches.task_costs(mesh)
        only_sums = all(reduction_of(v, partition.placement) in ("", "sum") for v in self.step.exported)
        self.splits_examples = splits_examples and only_sums

    def run(self, whole: Runner) -> list[jax.Array]:
        """Returns the exported values of the step, whole."""
        links = StageLinks(self.ranks, self.table)
        order = np.array(self.table.lockstep.placement, np.int32).T
        batch = self.step.microbatches_of_batch(whole)
        weights = StageWeights(self.ranks, order, self.branches.traced, whole)
        sides = self.branches.sides
        switches = [Switch(self.branches, side, weights, batch, self.splits_examples) for side in sides]
        return TickExecutor(self.table, links, CutBackend(self, links, order, switches)).run()

    def tick_costs(self, loop: Loop) -> list[list[FixedCost]]:
        """Returns, per part of a loop and direction, what the switch takes in a tick on average.

        All ranks take as long as the largest stage at work, and need the workspace of the largest stage.
        """
        workspace = self.ranks.count * max(cost.room for cost in self.task_costs)
        sides = []
        for side, kinds in enumerate(("F", "BI")):
            seconds = [cost.backward if side else cost.forward for cost in self.task_costs]
            flops = self.branches.flops[side] if side < len(self.branches.sides) else []
            sides.append(
                [
                    FixedCost(
                        self.ranks.count * mean(max((seconds[s] for s in stages), default=0.0) for stages in ticks),
                        mean(sum(flops[s] for s in stages) for stages in ticks),
                        workspace,
                    )
                    for ticks in self.table.working_stages(loop, kinds)
                ]
            )
        return [list(costs) for costs in zip(*sides, strict=True)]


@dataclass(frozen=True)
class CutBackend:
    """The stages of a cut step (``tick_executor.StageBackend``).

    Totals and stacks are keyed by direction and column of their buffers. The head is a part of the last stage.

    Args:
      order: by chunk and rank, the stage.
      switches: per direction.
      costs: per direction, what a switch takes in the current part of the loops.
    """

    pipeline: CutPipeline
    links: StageLinks
    order: StageOrder
    switches: Sequence[Switch]
    costs: Sequence[FixedCost] = ()

    # Buffers and totals.

    def buffers(self, slots: int) -> Arrays:
        """Returns uninitialized buffers of stage inputs."""
        return self._uninitialized(self.switches[FORWARD_SIDE].side, slots)

    def activation_buffers(self) -> Arrays:
        """Returns no buffers: parts are recomputed from their inputs."""
        return ()

    def gradients(self) -> Arrays:
        """Returns uninitialized gradients; none in an evaluation."""
        return tuple(x for switch in self.switches[BACKWARD_SIDE:] for x in self._uninitialized(switch.side))

    def gradient_buffers(self, slots: int) -> Arrays:
        """Returns uninitialized buffers of received gradients; none in an evaluation."""
        return tuple(x for switch in self.switches[BACKWARD_SIDE:] for x in self._uninitialized(switch.side, slots))

    def residual_buffers(self) -> Arrays:
        """Returns no buffers: the backward of a part is not split."""
        return ()

    def _uninitialized(self, side: StageSide, *slots: int) -> Arrays:
        rows, ranks = self.pipeline.branches.examples, self.pipeline.ranks
        return tuple(ranks.uninitialized((*slots, rows, row.length), row.dtype) for row in side.sending.columns)

    def totals(self) -> Totals:
        """Returns the totals before the first tick."""
        ranks, found = self.pipeline.ranks, {}
        for i, switch in enumerate(self.switches):
            initial = switch.side.adding.neutral(*self.order.shape, ranks.count)
            found.update({(i, column): ranks.split(x, 1) for column, x in enumerate(initial)})
        return found

    def for_parts(self, loop: Loop) -> Sequence["CutBackend"]:
        """Returns this backend with the costs of each part."""
        return [replace(self, costs=costs) for costs in self.pipeline.tick_costs(loop)]

    @contextmanager
    def traced_in(self, part: str) -> Iterator[None]:
        """Operations traced in this context belong to a part of the tick, and to the line of the first cut."""
        cut = self.pipeline.partition.cuts[0]
        with traced_from(cut.backward if part is BACKWARD and cut.backward else cut.forward), traced_in(part):
            yield

    # The parts of a tick.

    def forward(self, row: Forward, state: TickState, results: TickResults) -> tuple[TickState, Arrays]:
        """Runs all ranks forward."""
        received = self.pipeline.ranks.get(state.inputs, row.units.slot)
        return state, self._run(FORWARD_SIDE, row.units, received, (), results)

    def backward(self, row: Backward, head: Head | None, state: TickState, results: TickResults) -> TickState:
        """Runs all ranks backward, the last one with the head."""
        gradients = self.links.received_gradients(row, state)
        received = self.pipeline.ranks.get(state.inputs, row.units.slot)
        return state._replace(sent_back=self._run(BACKWARD_SIDE, row.units, received, gradients, results))

    def head(self, row: Head, sent: Arrays, results: TickResults) -> None:
        """Does nothing: the last stage has run the head."""

    def weights(self, units: TickUnits, state: TickState, results: TickResults) -> None:
        """Never runs: the backward of a part is not split."""

    def _run(self, side: int, units: TickUnits, received: Arrays, gradients: Arrays, results: TickResults) -> Arrays:
        """Runs the switch of a direction, adds its results to those of the tick, and returns what it sends."""
        ranks, switch = self.pipeline.ranks, self.switches[side]
        made = switch(units, received, gradients, self.costs[side])
        mine = (lax.broadcasted_iota(jnp.int32, self.order.shape, 0) == units.chunk)[..., None, None]
        for i, (column, x) in enumerate(zip(switch.side.adding.columns, made.totals, strict=True)):
            contribution = jnp.where(mine, x[None], column.neutral(1))
            total = REDUCE[column.reduction](results.totals[side, i], contribution)
            results.totals[side, i] = ranks.split(total, 1)
        sent = tuple(map(ranks.split, made.sent))
        results.stacks.update({(side, i): ranks.split(x) for i, x in enumerate(made.stacks)})
        return sent

    # After the last tick.

    def exported(self, totals: Totals, stacks: Sequence[Stacks]) -> list[jax.Array]:
        """Returns the exported values, whole."""
        by_tick = {key: joined(stacks, key) for key in keys_of(stacks)}
        found: dict[int, jax.Array] = {}
        for i, switch in enumerate(self.switches):
            side, table = switch.side, self.pipeline.table
            for stage in range(self.pipeline.partition.last_stage + 1):
                (chunk, rank), *_ = np.argwhere(self.order == stage).tolist()
                rows = [totals[i, column][chunk, rank] for column, _ in enumerate(side.adding.columns)]
                for v, x in zip(side.totals[stage], side.adding.unpack(stage, rows), strict=True):
                    found[v.id] = from_rows(x, v.shape)
                if side.stacks[stage]:
                    kinds, kind = ("BI", "B") if side.is_backward else ("F", "F")
                    ticks = np.array(table.order_of_microbatches(kinds, stage, kind))
                    rows = [by_tick[i, column][ticks, rank] for column, _ in enumerate(side.stacking.columns)]
                    for v, x in zip(side.stacks[stage], side.exported_stacks(stage, rows), strict=True):
                        found[v.id] = x
        return [found[v.id] for v in self.pipeline.step.exported]


# ---- The pipelined program -------------------------------------------------------------------------------------------


def pipeline_cuts(
    program: TracedProgram,
    pipeline: Pipeline,
    mesh: Mesh,
    batch: Sequence[int],
    user_pins: UserPins,
) -> TracedProgram:
    """Returns the program as a pipeline of the parts that ``md.stage`` cuts.

    Args:
      batch: positions of the inputs that are split into microbatches.
      user_pins: what the user fixed; resolved, and so checked, for this program.

    Raises PipelineError if there is no such axis or no cut, or if the parts cannot be stages; PinError as
    ``make_pins``.
    """
    axis, microbatches = pipeline.axis, pipeline.microbatches
    _check_cuts(program, axis, mesh)
    user_pins.resolve(program, mesh)
    ids, examples = [program.graph.inputs[i].id for i in batch], program.inputs[batch[0]].shape[0]
    placement = analyze_time_axis(program.graph, microbatches, ids, pipeline.per_microbatch)
    refuse_in_parts(program.name, [op for op in program.graph.ops if placement.is_per_microbatch(op)])
    graph, timer = _with_split_cuts(program.graph, placement), StageTimer(program.graph, mesh)
    seconds = {op.id: timer.seconds([op]) for op in graph.ops if placement.is_per_microbatch(op)}
    partition = find_partition(graph, placement, mesh.axis(axis), seconds, pipeline)
    pipelined = Pipelined(pipeline, axis, mesh.axis(axis), partition.forward_only, partition.sizes)
    independent = _examples_are_independent(program.graph, placement, ids, examples, pipeline)
    table = TickTable(pipelined.table, pipelined.buffer_slots)
    loop = CutPipeline(graph, partition, table, axis, independent, mesh)
    pipelined = replace(pipelined, loads=loop.task_costs)
    warnings: list[str] = []
    notes = [f"{pipelined}; {len(loop.step.inside)} of {len(graph.ops) - 1} operations run per microbatch"]
    notes += _notes_on_other_axes(mesh, axis, independent, loop.splits_examples)
    ignored = [op for op in graph.ops if op.name == "constrain" and placement.is_per_microbatch(op)]
    if ignored:
        warnings.append(f"layout constraints inside of stages are ignored, the first at {ignored[0].source}")
    return replace(
        program,
        graph=loop.step.retraced(loop, program.roundness),
        notes=[*program.notes, *notes, *warnings],
        warnings=[*program.warnings, *warnings],
        pipeline=pipelined,
    )


def _check_cuts(program: TracedProgram, axis: str, mesh: Mesh) -> None:
    """Raise PipelineError if the axis has one device, if there is no cut, or if a cut is recomputed."""
    if mesh.sizes_by_name.get(axis, 1) == 1:
        raise PipelineError(f"no axis {axis!r} with several devices{nearest(axis, mesh.names)}")
    cuts = [op for op in program.graph.ops if op.name == "stage"]
    if not cuts:
        raise PipelineError(
            f"Pipeline(axis={axis!r}) is for a step that md.stage cuts, and this one has no cut; a scan over layers "
            "needs no axis: pin its layers, with a rule such as layers:pipe"
        )
    recomputed = [op for op in cuts if not op.params["back"] and op.phase == BACKWARD_PHASE]
    if recomputed:
        raise PipelineError(
            f"md.stage at {recomputed[0].source} is recomputed in the backward pass; put jax.checkpoint inside of "
            "parts, not around the cuts between them"
        )


def _with_split_cuts(graph: Graph, placement: TimePlacement) -> Graph:
    """Returns the graph whose cuts send only values by example; others bypass the cuts."""
    table, ops = Table(), []
    for op in graph.ops:
        op = substitute(op, table)
        if op.name == "stage":
            sent = [isinstance(placement.of(v), Split) for v in op.outputs]
            table.update({v.id: x for v, x, s in zip(op.outputs, op.inputs, sent, strict=True) if not s})
            op = replace(op, inputs=filtered(op.inputs, sent), outputs=filtered(op.outputs, sent))
        if op.name != "stage" or op.outputs:
            ops.append(op)
    return with_ops(graph, ops)


def _examples_are_independent(
    graph: Graph, placement: TimePlacement, batch: Sequence[int], examples: int, pipeline: Pipeline
) -> bool:
    """Returns whether every example could be a microbatch of its own, so that any number of them is a block."""
    if PER_MICROBATCH in placement.places.values():
        return False
    try:
        single = analyze_time_axis(graph, examples, batch, pipeline.per_microbatch)
    except PipelineError:
        return False
    return single.places == placement.places and single.rows == placement.rows


def _notes_on_other_axes(mesh: Mesh, axis: str, independent: bool, split: bool) -> Iterator[str]:
    """Yields what other axes than that of the stages do for the stages' work.

    Args:
      independent: whether examples of a microbatch are independent.
      split: whether the other axes split them.
    """
    others = ", ".join(name for name, size in mesh.sizes_by_name.items() if name != axis and size > 1)
    if not others:
        return
    if split:
        yield f"{others} split the work of stages by examples only; each device holds the weights of its stages whole"
        return
    reason = "a maximum or minimum over all examples is needed" if independent else "examples depend on each other"
    yield f"{others} cannot split the work of stages: {reason}"
