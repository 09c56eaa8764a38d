"""Data sinking: several steps in one dispatch, as a loop on the devices.

    losses = []                                    state, losses = sunk(*state, batches)
    for batch in batches:               -->
        *state, loss = sharded(*state, batch)

The loop's body is the planned step, so that an iteration has exactly the planned collectives, and the state stays where
the plan has it. State that the step returns as it came does not change in the loop, and collectives on it are tied to
the iteration, as those of loops inside of steps are.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.api.stages import CallStages
from meshdsl.errors import ArgumentError
from meshdsl.lowering.keep_collectives import gathered_inside, read_by, tie_to_iteration
from meshdsl.lowering.verify import ExpectedCommunication, VerifyReport, verify_here
from meshdsl.plan.types import Array, Collective
from meshdsl.trace.objects import NO_OBJECTS
from meshdsl.trace.static_leaves import hide


class SunkStep:
    """``step(*state, batch) -> (*state, loss)`` over several batches: ``sunk(*state, batches) -> (*state, losses)``.

    Args:
      stages: of the step; it is lowered and compiled at the first call.
      count: number of batches; they are stacked, in a first dim of their arrays.
      batch: number of arrays of a batch, the step's last.

    Raises:
      ArgumentError: the step changes objects in place, or returns state in another layout than it takes.
    """

    def __init__(self, stages: CallStages, count: int, batch: int) -> None:
        self.executable, self.count = stages.executable, count
        inputs, outputs = (list(each) for each in (self.executable.shardings, self.executable.results))
        self._state = len(inputs) - batch
        if stages.traced.held.inputs:
            raise ArgumentError(
                "steps that change objects in place run one at a time: give a step that returns its state, or no --sink"
            )
        before, after = inputs[: self._state], outputs[:-1]
        plan = self.executable.plan
        for x, old, new, at in zip(plan.inputs, before, after, plan.outputs, strict=False):
            if not new.is_equivalent_to(old, len(x.shape)):
                raise ArgumentError(_moved(x, at))
        self.shardings = [_stacked(at) for at in inputs[self._state :]]
        """Of the batches."""

    def __call__(self, *args: Any) -> Any:
        """Runs the steps; the state is donated as in the step."""
        leaves = jax.tree.leaves(hide(args))
        return self.executable.finish(self.compiled(*leaves), leaves, NO_OBJECTS)

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled loop, over flat arrays."""
        each = self.executable
        values = zip(each.program.graph.inputs, (*each.shardings[: self._state], *self.shardings), strict=True)
        shapes = [
            jax.ShapeDtypeStruct(x.shape if i < self._state else (self.count, *x.shape), x.dtype, sharding=at)
            for i, (x, at) in enumerate(values)
        ]
        places = (*each.results[:-1], NamedSharding(each.devices, PartitionSpec()))
        with each.settings.lowering():
            return jax.jit(self._steps, out_shardings=places, donate_argnums=each.donated).lower(*shapes).compile()

    def compile(self, single: bool = False) -> list[jax.stages.Compiled]:
        """Returns the compiled loop, and if asked the compiled step, whose first calls then do not compile."""
        return [self.compiled, *([self.executable.compiled] if single else [])]

    def verify(self) -> VerifyReport:
        """Compares the compiled collectives with those of the plan, so many times."""
        expected = self.executable.expected
        every = [replace(cast(Collective, c), trips=c.trips * self.count) for c in expected.collectives]
        planned = ExpectedCommunication(every, expected.memory, expected.flops * self.count)
        platform = self.executable.devices.devices.flat[0].platform
        return verify_here(planned, self.compiled, self.executable.plan.mesh, platform)

    def _steps(self, *leaves: Any) -> tuple[Any, ...]:
        graph, count = self.executable.program.graph, self._state
        changing = [i for i, x in enumerate(graph.inputs) if i >= count or graph.returned[i] is not x]
        held, carried = gathered_inside(graph, changing, self.executable.plan.solution), read_by(graph, changing)

        def body(state: Sequence[Any], batch: Sequence[Any]) -> Any:
            *after, loss = self.executable.function(*tie_to_iteration((*state, *batch), held, carried))
            return tuple(after), loss

        state, losses = jax.lax.scan(body, leaves[:count], leaves[count:], length=self.count)
        return (*state, losses)


def _stacked(at: NamedSharding) -> NamedSharding:
    return NamedSharding(at.mesh, PartitionSpec(None, *at.spec))


def _moved(x: Array, after: Array) -> str:
    return (
        f"several steps in one dispatch need the state where it was: {x.path} is {x.layout}, returned {after.layout}\n"
        "pin both, with layouts= and outputs=, or give no --sink"
    )
