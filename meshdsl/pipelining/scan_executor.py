"""Pipelines of equal stages: the layer scan of a step, split over the ranks of an axis and run for all ranks at once.

What stages hold is stacked by rank and split over the pipeline's axis. So one ``vmap`` over the ranks runs every
stage's layers, and sending to the next stage is a roll of the stack (a collective-permute), as in GSPMD's pipelining
(Xu et al. 2021, section 3.3). With several chunks of layers per rank (interleaved schedules), a rank picks the one that
the timetable says.

    prologue  all ranks compute the embedding of the microbatch that starts; only the first stage uses it
    forward   x = vmap(layers)(x)
    backward  x = vmap(layers)(inputs[slot]) again, or stashed activations;   g, grads = vmap(transposed layers)(g)
    head      all ranks compute it from the last stage's output, a masked sum over the ranks

The result is a step like any other. Its other mesh axes are planned as usual; only the stacks by rank are constrained.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.ir.graph import Atom, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Placement
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.registry import time_axis_at
from meshdsl.pipelining.accumulate import Accumulator, SplitStep
from meshdsl.pipelining.interpreter import AXIS, Runner, traced_from, traced_in
from meshdsl.pipelining.layer_scan import LayerScan
from meshdsl.pipelining.scan_stage_work import StageUnit, StageWork
from meshdsl.pipelining.scan_stages import HEAD, PROLOGUE, TAIL, LayerAssignment, Stages
from meshdsl.pipelining.stage_buffers import Ranks, pick
from meshdsl.pipelining.tick_executor import Stacks, StageLinks, TickExecutor, TickResults, TickState, Totals, joined
from meshdsl.pipelining.tick_loops import Backward, Forward, Head, Loop, TickTable, TickUnits
from meshdsl.pipelining.time_axis import local_placement
from meshdsl.schedules import simulate
from meshdsl.schedules.simulate import FORWARD

# ---- All stages at once ----------------------------------------------------------------------------------------------


class VmappedStages:
    """The stages of all ranks, side by side.

    Stacks have a leading dim of ranks. Parameters and their gradients have one of chunks before it, buffers one of
    slots after it.
    """

    def __init__(self, stages: Stages, table: TickTable, whole: Runner) -> None:
        self.ranks = Ranks(stages.axis, table.ranks)
        self.stages, self.slots = stages, table.slots
        self.placement, self.chunks = stages.placement, table.lockstep.chunks
        self.assignment = LayerAssignment(stages.layers, tuple(zip(*table.lockstep.placement, strict=True)))
        used = None if self.assignment.is_even else self.ranks.split(jnp.asarray(self.assignment.used), 1)
        self.used = used
        self.work = StageWork(stages, whole, self.assignment.places_per_stage)
        shared = {x.id: x for layers in stages.scans for x, _ in layers.stacks if self.placement.of(x) is B}
        self.stacks = {i: self.scatter(whole.get(x, B)) for i, x in shared.items()}

    def scatter(self, x: jax.Array) -> jax.Array:
        """Returns a stack of layers by chunk and rank."""
        return self.ranks.split(self.assignment.scatter(x), 1)

    # Buffers.

    def sent(self, layers: LayerScan) -> Arrays:
        """Returns uninitialized arrays, as stages send them in the direction of a scan."""
        return tuple(self._uninitialized(x, at=at) for x, at in self.stages.sent(layers))

    def buffers(self, layers: LayerScan, slots: int) -> Arrays:
        """Returns uninitialized buffers for what stages receive in the direction of a scan."""
        return tuple(self._uninitialized(x, slots, at=at) for x, at in self.stages.sent(layers))

    def activation_buffers(self) -> Arrays:
        """Returns uninitialized buffers for stashed activations; none if stages are recomputed."""
        slots = self.slots.activations.count
        if not slots:
            return ()
        places = self.assignment.places_per_stage
        activations = (self._uninitialized(v, slots, places) for v in self.work.activations.values())
        return (*activations, *self.buffers(self.stages.forward, slots))

    def residual_buffers(self) -> Arrays:
        """Returns uninitialized buffers for the residuals of a split backward; none if it is not split."""
        slots = self.slots.residuals.count
        if not slots:
            return ()
        per_layer, once = self.work.residuals
        stacks = (self._uninitialized(v, slots, self.assignment.places_per_stage) for v in per_layer)
        return (*stacks, *(self._uninitialized(x, slots) for x in once))

    def _uninitialized(self, x: Atom, *leading: int, at: Placement | None = None) -> jax.Array:
        placement = local_placement(self.placement.of(x)) if at is None else at
        shape = Layout(**{AXIS: placement}).local_shape(x.shape, {AXIS: self.placement.microbatches})
        return self.ranks.uninitialized((*leading, *shape), x.dtype)

    # The first and the last stage.

    def replaced_where(self, chosen: jax.Array, received: Arrays, start: Arrays) -> Arrays:
        """Returns ``start`` on the chosen ranks, what they received on the others."""
        pairs = zip(received, start, strict=True)
        return tuple(self.ranks.split(jnp.where(_expanded(chosen, x.ndim), y[None], x)) for x, y in pairs)

    def of_rank(self, x: jax.Array, rank: int) -> jax.Array:
        """Returns the array of one rank, as a sum over the ranks in which the others are zero."""
        mine = _expanded(lax.iota(jnp.int32, self.ranks.count) == rank, x.ndim)
        return jnp.any(x & mine, 0) if x.dtype == jnp.bool_ else jnp.where(mine, x, 0).sum(0, dtype=x.dtype)

    # The work; see ``StageWork``.

    def forward(self, units: TickUnits, received: Arrays) -> tuple[Arrays, Arrays]:
        """Runs all stages forward; returns what they send, and the stacks that their layers compute."""
        own = self._own(self.stages.forward, units)
        sent, rows = jax.vmap(self.work.forward)(self._unit(units), received, own)
        return tuple(map(self.ranks.split, sent)), rows

    def backward(self, units: TickUnits, gradients: Arrays, received: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        """Runs all stages backward; returns what they send back, and their weight gradients."""
        own = self._own(self.stages.backward, units)
        sent, rows = jax.vmap(self.work.backward)(self._unit(units), gradients, received, rows, own)
        return tuple(map(self.ranks.split, sent)), rows

    def restored(self, units: TickUnits, stash: Arrays) -> tuple[Arrays, Arrays]:
        """Returns what the stages sent forward, and the stacks of their layers, from stashed activations."""
        return jax.vmap(self.work.restored)(self._unit(units), stash, self._own(self.stages.forward, units))

    def input_gradient(
        self, units: TickUnits, gradients: Arrays, received: Arrays, rows: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Runs the first half of all backwards; returns what the stages send back, and residuals."""
        own = self._own(self.stages.backward, units)
        sent, residuals = jax.vmap(self.work.input_gradient)(self._unit(units), gradients, received, rows, own)
        return tuple(map(self.ranks.split, sent)), residuals

    def weight_gradient(self, units: TickUnits, residuals: Arrays) -> Arrays:
        """Runs the second half of all backwards; returns weight gradients."""
        own = self._own(self.stages.backward, units)
        return jax.vmap(self.work.weight_gradient)(self._unit(units), residuals, own)

    def _unit(self, units: TickUnits) -> StageUnit:
        return StageUnit(units.microbatch, None if self.used is None else self._chunk(self.used, units))

    def _own(self, layers: LayerScan, units: TickUnits) -> Arrays:
        return tuple(self._chunk(self.stacks[x.id], units) for x, _ in layers.stacks if x.id in self.stacks)

    def _chunk(self, x: jax.Array, units: TickUnits) -> jax.Array:
        """Returns every rank's current chunk of a stack by chunk and rank."""
        return x[0] if self.chunks == 1 else self.ranks.split(jax.vmap(pick, (1, 0))(x, units.chunk))

    def accumulated(self, total: Accumulator, current: jax.Array, rows: jax.Array, units: TickUnits) -> jax.Array:
        """Returns totals by chunk and rank, with the contributions of ranks whose unit is valid."""
        chunks = lax.broadcasted_iota(jnp.int32, (self.chunks, self.ranks.count), 0)
        mine = units.valid if self.chunks == 1 else (chunks == units.chunk) & units.valid
        mine = jnp.broadcast_to(mine, chunks.shape)
        contribution = total.masked(rows[None], mine.reshape(*mine.shape, *[1] * (rows.ndim - 1)))
        return self.ranks.split(total.add(current, contribution), 1)


def _expanded(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(-1, *[1] * (rank - 1))


# ---- The backend of the tick loops -----------------------------------------------------------------------------------


class ScanBackend:
    """Prologue, stages, head and tail of a pipelined layer scan (``tick_executor.StageBackend``)."""

    def __init__(self, step: SplitStep, stages: Stages, table: TickTable, whole: Runner) -> None:
        self.step, self.whole, self.stages, self.table = step, whole, stages, table
        self.vmapped = VmappedStages(stages, table, whole)
        self.links = StageLinks(self.vmapped.ranks, table)
        self.batch = step.microbatches_of_batch(whole)
        self.accumulators = {v.id: Accumulator.of(v, step.placement) for v in step.exported}
        self.stacked = {v.id for layers in stages.scans for v in layers.stacked_results}
        self.times = {v.id: self._time(v) for v in step.exported if v.id not in self.stacked}

    def _time(self, v: Value) -> str:
        op = self.step.producers[v.id]
        if op in [layers.op for layers in self.stages.scans]:
            return HEAD if op is self.stages.forward.op else TAIL
        return TAIL if self.stages.times[op.id] == TAIL else HEAD

    # Buffers and totals.

    def buffers(self, slots: int) -> Arrays:
        """Returns uninitialized buffers of stage inputs."""
        return self.vmapped.buffers(self.stages.forward, slots)

    def activation_buffers(self) -> Arrays:
        """Returns uninitialized buffers of stashed activations."""
        return self.vmapped.activation_buffers()

    def gradients(self) -> Arrays:
        """Returns uninitialized gradients; none in an evaluation."""
        return tuple(x for layers in self.stages.scans[1:] for x in self.vmapped.sent(layers))

    def gradient_buffers(self, slots: int) -> Arrays:
        """Returns uninitialized buffers of received gradients; none in an evaluation."""
        return tuple(x for layers in self.stages.scans[1:] for x in self.vmapped.buffers(layers, slots))

    def residual_buffers(self) -> Arrays:
        """Returns uninitialized buffers of residuals."""
        return self.vmapped.residual_buffers()

    def totals(self) -> Totals:
        """Returns the totals before the first tick, by value id."""
        found = ((v.id, total.initial) for v in self.step.exported if (total := self.accumulators[v.id]))
        return {i: self.vmapped.scatter(x) if i in self.stacked else x for i, x in found}

    def for_parts(self, loop: Loop) -> Sequence["ScanBackend"]:
        """Returns this backend for every part."""
        return [self] * len(loop.parts)

    @contextmanager
    def traced_in(self, part: str) -> Iterator[None]:
        """Operations traced in this context belong to a part of the tick, and to the scan of that direction."""
        layers = self.stages.forward if part is FORWARD else self.stages.backward
        with traced_from(layers.op), traced_in(part):
            yield

    # The parts of a tick.

    def forward(self, row: Forward, state: TickState, results: TickResults) -> tuple[TickState, Arrays]:
        """Runs all stages forward, the first one from the prologue."""
        ranks = self.vmapped.ranks
        with self._microbatch(row.started, (PROLOGUE,), {}) as runner:
            start = tuple(runner.get(x, at) for x, at in self.stages.sent(self.stages.forward))
        received = self.vmapped.replaced_where(row.starts, ranks.get(state.inputs, row.units.slot), start)
        sent, rows = self.vmapped.forward(row.units, received)
        self._accumulate(self.stages.forward, rows, row.units, results)
        if self.table.slots.activations.count:
            stashed = self.vmapped.work.stashed(sent, rows)
            return state._replace(activations=ranks.put(state.activations, stashed, row.stash)), sent
        return state._replace(inputs=ranks.put(state.inputs, received, row.units.slot)), sent

    def backward(self, row: Backward, head: Head | None, state: TickState, results: TickResults) -> TickState:
        """Runs all stages backward, the last one from the head; then the tail of the microbatch that is through."""
        ranks = self.vmapped.ranks
        if self.table.slots.activations.count:
            sent, rows = self.vmapped.restored(row.units, ranks.get(state.activations, row.stash))
            received = sent
        else:
            received = ranks.get(state.inputs, row.units.slot)
            sent, rows = self.vmapped.forward(row.units, received)
        gradients = self.links.received_gradients(row, state)
        if head:
            gradients = self.vmapped.replaced_where(head.is_last, gradients, self._run_head(head, sent, results))
        if self.table.lockstep.split:
            gradients, residuals = self.vmapped.input_gradient(row.units, gradients, received, rows)
            state = state._replace(residuals=ranks.put(state.residuals, residuals, row.residuals))
        else:
            gradients, weights = self.vmapped.backward(row.units, gradients, received, rows)
            self._accumulate(self.stages.backward, weights, row.units, results)
        ends = self._final_values(self.stages.backward, gradients, self.table.first_rank)
        with self._microbatch(row.finished, (PROLOGUE, TAIL), ends) as runner:
            self._export(runner, TAIL, row.has_finished, results)
        return state._replace(sent_back=gradients)

    def head(self, row: Head, sent: Arrays, results: TickResults) -> None:
        """Runs the head of an evaluation."""
        self._run_head(row, sent, results)

    def weights(self, units: TickUnits, state: TickState, results: TickResults) -> None:
        """Runs the second halves of split backwards."""
        rows = self.vmapped.weight_gradient(units, self.vmapped.ranks.get(state.residuals, units.slot))
        self._accumulate(self.stages.backward, rows, units, results)

    def _run_head(self, row: Head, sent: Arrays, results: TickResults) -> Arrays:
        """Exports what the head computes; returns the gradients that the last stage starts from, if any."""
        ends = self._final_values(self.stages.forward, sent, self.table.last_rank)
        with traced_in(simulate.HEAD), self._microbatch(row.microbatch, (PROLOGUE, HEAD), ends) as runner:
            self._export(runner, HEAD, row.valid, results)
            gradients = (pair for layers in self.stages.scans[1:] for pair in self.stages.sent(layers))
            return tuple(runner.get(x, at) for x, at in gradients)

    def _final_values(self, layers: LayerScan, sent: Arrays, rank: int) -> dict[Value, jax.Array]:
        """Returns the final carries of a scan from the rank of its last stage, and skips that came along with them."""
        stages = self.stages
        skips = [] if layers is stages.forward else [x for x in stages.consts(layers) if x in stages.skips]
        consts = dict(zip(stages.consts(layers), sent[len(layers.final_carries) :], strict=True))
        ends = (*zip(layers.final_carries, sent, strict=False), *((v, consts[v]) for v in skips))
        return {v: self.vmapped.of_rank(x, rank) for v, x in ends}

    @contextmanager
    def _microbatch(self, at: jax.Array, times: tuple[str, ...], ends: Mapping[Value, jax.Array]) -> Iterator[Runner]:
        """Yields the environment of a microbatch after the operations of these times.

        Args:
          ends: final values of the scans that these operations use.
        """
        blocks = [lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in self.batch]
        with time_axis_at(AXIS, at):
            runner = self.step.iteration(self.whole, blocks)
            for v, x in ends.items():
                runner.arrays[v.id, local_placement(self.step.placement.of(v))] = x
            runner.run(op for op in self.step.inside if self.stages.times.get(op.id) in times)
            yield runner

    def _export(self, runner: Runner, time: str, valid: jax.Array | None, results: TickResults) -> None:
        """Adds exported values of a time to the totals, or to the stacks of this tick."""
        for v in self.step.exported:
            if self.times.get(v.id) == time:
                x, total = runner.local(v), self.accumulators[v.id]
                with traced_from(self.step.producers[v.id]):
                    if total:
                        contribution = x if valid is None else total.masked(x, valid)
                        results.totals[v.id] = total.add(results.totals[v.id], contribution)
                    else:
                        results.stacks[v.id] = x

    def _accumulate(self, layers: LayerScan, rows: Arrays, units: TickUnits, results: TickResults) -> None:
        """Adds the stacks that the layers of each stage computed to the totals."""
        for v, x in zip(layers.stacked_results, rows, strict=True):
            total = self.accumulators.get(v.id)
            if total:
                results.totals[v.id] = self.vmapped.accumulated(total, results.totals[v.id], x, units)

    # After the last tick.

    def exported(self, totals: Totals, stacks: Sequence[Stacks]) -> list[jax.Array]:
        """Returns the exported values, whole."""
        return [self._exported(v, totals, stacks) for v in self.step.exported]

    def _exported(self, v: Value, totals: Totals, stacks: Sequence[Stacks]) -> jax.Array:
        if v.id in totals:
            return self.vmapped.assignment.gather(totals[v.id]) if v.id in self.stacked else totals[v.id]
        by_tick, table = joined(stacks, v.id), self.table
        head = self.times[v.id] == HEAD
        order = (
            table.order_of_microbatches("H", -1) if head else table.order_of_microbatches(table.lockstep.turnaround, 0)
        )
        return self.step.joined(v, by_tick[np.array(order)])


# ---- The pipelined step ----------------------------------------------------------------------------------------------


class ScanPipeline:
    """The pipeline of a layer scan, as the loop inside a step (``accumulate.StepLoop``)."""

    def __init__(self, step: SplitStep, stages: Stages, table: TickTable) -> None:
        self.step, self.stages, self.table = step, stages, table

    def run(self, whole: Runner) -> list[jax.Array]:
        """Returns the exported values of the step, whole."""
        backend = ScanBackend(self.step, self.stages, self.table, whole)
        return TickExecutor(self.table, backend.links, backend).run()
