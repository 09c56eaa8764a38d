"""Runs a tick table: the loops of a pipeline, whatever its stages are.

In every tick, all ranks of the pipeline's axis do the same operations, each for its own stage and microbatch:

    receive    gradients that the next stages sent in the tick before are buffered
    forward    x = inputs[slot], or the prologue on the first stage;  x = stage(x);  activations are stashed
    backward   g = gradients[slot], or the gradient of the head on the last stage;  g, grads = stage backward(g)
    weights    the second half of a backward, where the schedule splits it
    send       x goes to the next stage: one collective-permute per shift;  it is there in the next tick

There are three phases of ticks: warm-up (forward only), steady state (one forward, one backward) and cool-down
(backward only). A rank without a microbatch in a tick (the bubble) computes on what its buffers hold, and its
contributions are masked. No device diverges from the others, so stages may contain collectives over other axes.

``TickExecutor`` owns this skeleton. What a stage computes is a ``StageBackend``: equal layers of a scan, vmapped over
the ranks (``scan_executor``), or different stages in a switch (``cut_executor``).
"""

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.interpreter import Arrays
from meshdsl.pipelining.interpreter import traced_in
from meshdsl.pipelining.stage_buffers import Ranks
from meshdsl.pipelining.tick_loops import Backward, Forward, Head, Loop, TickRow, TickTable, TickUnits
from meshdsl.schedules.simulate import BACKWARD, FORWARD, STASH, WEIGHTS

Totals = dict[Any, jax.Array]  # by a key of the backend, sums over microbatches
Stacks = dict[Any, jax.Array]  # by a key of the backend, results stacked tick by tick


class TickState(NamedTuple):
    """The carry of the loops over ticks.

    Args:
      sent_back: gradients that stages sent in the last tick.
      inputs: buffer of stage inputs.
      activations: buffer of stashed activations; empty if stages are recomputed.
      gradients: buffer of received gradients; empty if each is used in the tick after it was sent.
      residuals: buffer between the halves of a split backward.
      totals: sums over microbatches so far.
    """

    sent_back: Arrays
    inputs: Arrays
    activations: Arrays
    gradients: Arrays
    residuals: Arrays
    totals: Totals


@dataclass
class TickResults:
    """What a tick adds: the totals after it, and results that are stacked over ticks."""

    totals: Totals
    stacks: Stacks = field(default_factory=dict)


class StageBackend(Protocol):
    """The stages of a pipeline, for the ranks of its axis."""

    def buffers(self, slots: int) -> Arrays:
        """Returns uninitialized buffers of stage inputs."""

    def activation_buffers(self) -> Arrays:
        """Returns uninitialized buffers of stashed activations."""

    def gradients(self) -> Arrays:
        """Returns uninitialized gradients, as stages send them."""

    def gradient_buffers(self, slots: int) -> Arrays:
        """Returns uninitialized buffers of received gradients."""

    def residual_buffers(self) -> Arrays:
        """Returns uninitialized buffers of residuals."""

    def totals(self) -> Totals:
        """Returns the totals before the first tick."""

    def for_parts(self, loop: Loop) -> "Sequence[StageBackend]":
        """Returns the backend to use in each part of a loop."""

    def traced_in(self, part: str) -> AbstractContextManager[Any]:
        """Operations traced in this context belong to a part of the tick, and to the user's line of the stages."""

    def forward(self, row: Forward, state: TickState, results: TickResults) -> tuple[TickState, Arrays]:
        """Returns the state with what the backward needs, and what the stages send forward."""

    def backward(self, row: Backward, head: Head | None, state: TickState, results: TickResults) -> TickState:
        """Returns the state with the gradients that the stages send back."""

    def head(self, row: Head, sent: Arrays, results: TickResults) -> None:
        """Run the head without a backward pass, from what the stages sent."""

    def weights(self, units: TickUnits, state: TickState, results: TickResults) -> None:
        """Run the second halves of split backwards."""

    def exported(self, totals: Totals, stacks: Sequence[Stacks]) -> list[jax.Array]:
        """Returns the exported values of the step, whole, from the totals and the stacks of each loop."""


# ---- Sending ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageLinks:
    """What stages send to each other over the ring of ranks."""

    ranks: Ranks
    table: TickTable

    def delivered(self, sent: Arrays, buffers: Arrays, slots: Sequence[jax.Array | None], direction: int) -> Arrays:
        """Returns the buffers with what stages sent, forward (1) or back (-1), in the receivers' slots."""
        for shift, slot in zip(self.table.shifts, slots, strict=True):
            if slot is not None:
                buffers = self.ranks.put(buffers, self.ranks.send(sent, direction * shift), slot)
        return buffers

    def received_gradients(self, row: Backward, state: TickState) -> Arrays:
        """Returns the gradients that the stages received: from their buffer, or as they arrive."""
        if self.table.buffers_gradients:
            return self.ranks.get(state.gradients, row.gradient)
        return self.ranks.send(state.sent_back, -self.table.shifts[0])


# ---- The loops -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TickExecutor:
    """The loops over the ticks of a table, while they are traced."""

    table: TickTable
    links: StageLinks
    stages: StageBackend

    def run(self) -> list[jax.Array]:
        """Returns the exported values of the step, whole."""
        state = self._initial()
        stacks: list[Stacks] = []
        for loop in self.table.loops:
            repetition = partial(self._repetition, self.stages.for_parts(loop))
            state, found = lax.scan(repetition, state, self.table.rows(loop))
            stacks.append({key: x.reshape(-1, *x.shape[2:]) for key, x in found.items()})
        return self.stages.exported(state.totals, stacks)

    def _initial(self) -> TickState:
        """Returns the state before the first tick."""
        stages, slots = self.stages, self.table.slots
        with traced_in(FORWARD if slots.activations.count else STASH):
            inputs = stages.buffers(slots.inputs.count)
        with traced_in(STASH):
            activations = stages.activation_buffers()
        sent_back = stages.gradients()
        gradients = stages.gradient_buffers(slots.gradients.count) if self.table.buffers_gradients else ()
        return TickState(sent_back, inputs, activations, gradients, stages.residual_buffers(), stages.totals())

    def _repetition(
        self, parts: Sequence[StageBackend], state: TickState, rows: tuple[TickRow, ...]
    ) -> tuple[TickState, Stacks]:
        """Runs one repetition of a loop: its parts, tick by tick."""
        stacks: list[Stacks] = []
        for stages, part in zip(parts, rows, strict=True):
            state, found = lax.scan(partial(self._tick, stages), state, part)
            stacks.append(found)
        return state, {key: joined(stacks, key) for key in keys_of(stacks)}

    def _tick(self, stages: StageBackend, state: TickState, row: TickRow) -> tuple[TickState, Stacks]:
        results, sent = TickResults(dict(state.totals)), tuple[jax.Array, ...]()
        if row.receive is not None:
            with stages.traced_in(BACKWARD):
                gradients = self.links.delivered(state.sent_back, state.gradients, row.receive, -1)
                state = state._replace(gradients=gradients)
        if row.forward:
            with stages.traced_in(FORWARD):
                state, sent = stages.forward(row.forward, state, results)
        if row.backward:
            with stages.traced_in(BACKWARD):
                state = stages.backward(row.backward, row.head, state, results)
        elif row.head:
            stages.head(row.head, sent, results)
        if row.weights:
            with stages.traced_in(WEIGHTS):
                stages.weights(row.weights, state, results)
        if row.forward:
            with stages.traced_in(FORWARD):
                state = state._replace(inputs=self.links.delivered(sent, state.inputs, row.forward.receive, 1))
        return state._replace(totals=results.totals), results.stacks


def keys_of(stacks: Sequence[Stacks]) -> list[Hashable]:
    """Returns the keys of several stacks, in the order in which they first occur."""
    return list(dict.fromkeys(key for found in stacks for key in found))


def joined(stacks: Sequence[Stacks], key: Hashable) -> jax.Array:
    """Returns what is stacked under a key, one after the other."""
    return jnp.concatenate([found[key] for found in stacks if key in found])
