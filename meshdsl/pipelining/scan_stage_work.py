"""The work of one stage on one microbatch: forward, backward, or backward in two halves (zero bubble).

A stage runs its layers of the layer scan. Backward, it first restores what the transposed scan reads of the forward
one: by running the layers again from the stage input (full recomputation), or from stashed activations.

Zero-bubble schedules (Qi et al. 2023) split a layer's backward into the gradient of its input, which the previous stage
is waiting for, and the gradients of its weights, which fill bubbles. Both halves are operations of the one backward
that was traced, so no operation runs twice. Between them the *residuals* of the second half are kept:

    per layer   what the forward pass made and the weight gradients use, and what the first half computes
    once        what a microbatch carries along for all layers

The body of a user's shard_map is not cut: between the halves, its blocks would be on devices.

What depends on weights alone is recomputed where it is used.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.index import ops_named
from meshdsl.ir.rewrite import values
from meshdsl.layouts.placement import B, Placement
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.registry import time_axis_at
from meshdsl.pipelining.interpreter import AXIS, Environment, Runner, slice_placement
from meshdsl.pipelining.layer_scan import LayerScan, Stacks, Wanted, run_layers, stacks_of
from meshdsl.pipelining.scan_stages import Stages
from meshdsl.pipelining.time_axis import INVARIANT, TimePlacement, local_placement

# ---- Splitting the backward of a layer -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitBackward:
    """The operations of a layer's backward, by half."""

    layers: LayerScan
    placement: TimePlacement

    @cached_property
    def first(self) -> list[Op]:
        """Operations for the gradient of the layer's input, for everything else carried, and bodies of shard_maps."""
        carried = self.layers.body.returned[: len(self.layers.final_carries)]
        left = (v for op in ops_named(self.layers.body, "leave_shard_map") for v in op.outputs)
        return needed(self.layers.body, [*carried, *left])

    @cached_property
    def second(self) -> list[Op]:
        """Operations for what the layers stack: the gradients of their weights."""
        done = [op for op in self.first if any(self.placement.of(v) is not B for v in op.outputs)]
        return needed(self.layers.body, self._stacked, done)

    @cached_property
    def residuals(self) -> list[Value]:
        """Values that the second half uses and the first half computes or carries."""
        carried = {v.id for _, v in self.layers.carries}
        made = {v.id for op in self.first for v in op.outputs} | carried
        return [v for v in self._used if v.id in made]

    @cached_property
    def inputs(self) -> set[int]:
        """Ids of inputs of the body that the second half uses."""
        return {v.id for v in self._used} & {v.id for v in self.layers.body.inputs}

    @property
    def _stacked(self) -> list[Value]:
        return list(values(self.layers.body.returned[len(self.layers.final_carries) :]))

    @cached_property
    def _used(self) -> list[Value]:
        """Values that the second half uses and does not compute."""
        made = {v.id for op in self.second for v in op.outputs}
        used = (*(v for op in self.second for v in values(op.inputs)), *self._stacked)
        return list({v.id: v for v in used if v.id not in made}.values())


def needed(body: Graph, wanted: Iterable[Atom], done: Iterable[Op] = ()) -> list[Op]:
    """Returns the operations of a body that the wanted values depend on, except those that are ``done``."""
    known, ids = {op.id for op in done}, {v.id for v in values(wanted)}
    found: list[Op] = []
    for op in reversed(body.ops[:-1]):
        if op.id not in known and any(v.id in ids for v in op.outputs):
            ids |= {v.id for v in values(op.inputs)}
            found.append(op)
    return found[::-1]


# ---- The work --------------------------------------------------------------------------------------------------------


class StageUnit(NamedTuple):
    """One unit of work of a stage.

    Args:
      microbatch: its number.
      used: per place for a layer, False for padding; None if all stages have as many layers.
    """

    microbatch: jax.Array
    used: jax.Array | None


@dataclass(frozen=True)
class StageWork:
    """The functions that a stage runs on one unit of work.

    In their arguments, ``received`` is what the neighbouring stage sent (``Stages.sent``: carries, then consts of the
    microbatch), ``rows`` the stacks that the stage's layers computed forward, and ``own`` the stage's slices of stacks
    that are equal for all microbatches (``own_stacks``: parameters, mostly).

    Args:
      whole: the environment of values that are independent of the batch.
      length: places for layers in a stage.
    """

    stages: Stages
    whole: Runner
    length: int

    @cached_property
    def halves(self) -> SplitBackward:
        """The operations of a layer's backward, by half."""
        return SplitBackward(self.stages.backward, self.stages.placement)

    def own_stacks(self, layers: LayerScan) -> list[Value]:
        """Returns the body's inputs that are slices of stacks equal for all microbatches."""
        made = {v.id for v in self.stages.forward.stacked_results}
        return [v for x, v in layers.stacks if layers is self.stages.forward or x.id not in made]

    # Forward, and backward in one piece.

    def forward(self, unit: StageUnit, received: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        """Returns what the stage sends, and the stacks that its layers compute."""
        layers = self.stages.forward
        return self._run_all(layers, unit, received, self._consts(layers, received), self._own(layers, own))

    def backward(
        self, unit: StageUnit, gradients: Arrays, received: Arrays, rows: Arrays, own: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Returns the gradients that the stage sends, and the stacks of weight gradients."""
        layers = self.stages.backward
        stacks = self._forward_stacks(rows) | self._own(layers, own)
        return self._run_all(layers, unit, gradients, self._both_consts(gradients, received), stacks)

    # Stashed activations instead of recomputation.

    @cached_property
    def activations(self) -> dict[Value, Value]:
        """Per input of the backward body, the forward stack to stash; those of weights alone are recomputed."""
        made = {v.id for v in self.stages.forward.stacked_results} - {v.id for _, v in self._weight_only}
        return {x: v for x, v in self.stages.backward.stacks if x.id in made}

    @cached_property
    def _weight_only(self) -> list[tuple[Atom, Value]]:
        """Stacked results of the forward scan that depend on neither the batch nor the carries."""
        layers, placement = self.stages.forward, self.stages.placement
        found = []
        for x, v in layers.rows:
            if placement.of(v) in (B, INVARIANT):
                used = {y.id for op in needed(layers.body, [x]) for y in values(op.inputs)} | {
                    y.id for y in values([x])
                }
                if not any(carry.id in used for _, carry in layers.carries):
                    found.append((x, v))
        return found

    def stashed(self, sent: Arrays, rows: Arrays) -> Arrays:
        """Returns what the backward needs of this forward: activations by layer, and what the stage sent."""
        stacks = dict(zip(self.stages.forward.stacked_results, rows, strict=True))
        return (*(stacks[x] for x in self.activations), *sent)

    def restored(self, unit: StageUnit, stash: Arrays, own: Arrays) -> tuple[Arrays, Any]:
        """Returns what the stage sent forward and its ``rows``, None where unused, from ``stashed``."""
        layers, count = self.stages.forward, len(self.activations)
        wanted = [(x, slice_placement(self._held(v))) for x, v in self._weight_only]
        ops = needed(layers.body, [x for x, _ in wanted])
        _, recomputed = self._run(layers, unit, {}, ops, (), self._own(layers, own), wanted)
        stacks = dict(zip(self.activations, stash, strict=False))
        stacks.update(zip((v for _, v in self._weight_only), recomputed, strict=True))
        return stash[count:], tuple(stacks.get(v) for v in layers.stacked_results)

    # Backward in two halves.

    def input_gradient(
        self, unit: StageUnit, gradients: Arrays, received: Arrays, rows: Arrays, own: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Returns the gradients that the stage sends, and the residuals of the second half (``residuals``)."""
        layers, made = self.stages.backward, self._forward_stacks(rows)
        consts, stacks = self._both_consts(gradients, received), made | self._own(layers, own)
        wanted, carries = [(v, self._held(v)) for v in self.halves.residuals], len(layers.final_carries)
        sent, inside = self._run(layers, unit, consts, self.halves.first, gradients[:carries], stacks, wanted)
        forward = (made[v] for v in self._forward_residuals)
        once = (consts[x.id, self._held(x)] for x in self._microbatch_residuals)
        return (*sent, *gradients[carries:]), (*inside, *forward, *once)

    def weight_gradient(self, unit: StageUnit, residuals: Arrays, own: Arrays) -> Arrays:
        """Returns the stacks of weight gradients."""
        layers, (per_layer, once) = self.stages.backward, self.residuals
        consts = {(x.id, self._held(x)): y for x, y in zip(once, residuals[len(per_layer) :], strict=True)}
        stacks = dict(zip(per_layer, residuals, strict=False)) | self._own(layers, own)
        return self._run(layers, unit, consts, self.halves.second, (), stacks, self._rows(layers))[1]

    @property
    def residuals(self) -> tuple[list[Value], list[Value]]:
        """What the second half needs of the first: values per layer, and values once per microbatch."""
        return [*self.halves.residuals, *self._forward_residuals], self._microbatch_residuals

    @cached_property
    def _forward_residuals(self) -> list[Value]:
        made = {v.id for v in self.stages.forward.stacked_results}
        return [v for x, v in self.stages.backward.stacks if x.id in made and v.id in self.halves.inputs]

    @cached_property
    def _microbatch_residuals(self) -> list[Value]:
        consts = {x.id for layers in self.stages.scans for x in self.stages.consts(layers)}
        used = [x for x, v in self.stages.backward.consts if v.id in self.halves.inputs and isinstance(x, Value)]
        return [x for x in dict.fromkeys(used) if x.id in consts]

    # Running layers.

    def _run_all(
        self, layers: LayerScan, unit: StageUnit, received: Arrays, consts: Environment, stacks: Stacks
    ) -> tuple[Arrays, Arrays]:
        """Run all operations of each layer; consts of the microbatch are passed on."""
        carries, ops = len(layers.final_carries), layers.body.ops[:-1]
        made, rows = self._run(layers, unit, consts, ops, received[:carries], stacks, self._rows(layers))
        return (*made, *received[carries:]), rows

    def _run(
        self,
        layers: LayerScan,
        unit: StageUnit,
        consts: Environment,
        ops: Sequence[Op],
        start: Arrays,
        stacks: Stacks,
        wanted: Wanted,
    ) -> tuple[Arrays, Arrays]:
        runner = Runner(self.stages.placement, self.whole.arrays | consts)
        with time_axis_at(AXIS, unit.microbatch):
            return run_layers(runner, layers, ops, start, stacks, wanted, self.length, unit.used)

    def _held(self, x: Value) -> Placement:
        return local_placement(self.stages.placement.of(x))

    def _rows(self, layers: LayerScan) -> Wanted:
        return [(x, slice_placement(self._held(v))) for x, v in layers.rows]

    def _consts(self, layers: LayerScan, received: Arrays) -> Environment:
        """Returns the consts of the microbatch among what the stage received."""
        consts = self.stages.consts(layers)
        arrays = received[len(layers.final_carries) :]
        return {(x.id, self._held(x)): y for x, y in zip(consts, arrays, strict=True)}

    def _both_consts(self, gradients: Arrays, received: Arrays) -> Environment:
        return self._consts(self.stages.forward, received) | self._consts(self.stages.backward, gradients)

    def _forward_stacks(self, rows: Arrays) -> Stacks:
        """Returns the stacks that the layers computed forward, by input of the backward body."""
        made = (v.id for v in self.stages.forward.stacked_results)
        return stacks_of(self.stages.backward, dict(zip(made, rows, strict=True)))

    def _own(self, layers: LayerScan, own: Arrays) -> Stacks:
        return dict(zip(self.own_stacks(layers), own, strict=True))
