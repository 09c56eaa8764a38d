"""The step as a pipeline: loops over ticks, in which all stages do the same, each for another microbatch.

In each tick (``Uniform`` says which)

    forward    x = what the stage before made in the last tick; stage 0 starts a microbatch, from the prologue
               stash[tick] = x;   x = layers(x)
    backward   x = stash[tick of this microbatch's forward];   layers(x) again, for what the layers backward need
               d = what the stage behind made in the last tick; the last stage takes it from the epilogue
               d, gradients = layers backward(d);   stage 0 goes on with the rest of the microbatch

Ticks in which only some stages have a microbatch run on whatever is there, and what they add to sums is masked.
There is no conditional in it, and nothing that devices do differently. The result is a step like any other,
whose other axes are planned as any other's; only that stacks by stage lie split over the axis is stated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.ir import Graph, Value
from meshdsl.layouts.placement import B
from meshdsl.lowering.position import taking_turns
from meshdsl.lowering.walk import Arrays
from meshdsl.pipeline import costs
from meshdsl.pipeline.costs import BACKWARD, FORWARD
from meshdsl.pipeline.uniform import Uniform
from meshdsl.turns.accumulate import Step, Sum, dealt
from meshdsl.turns.lanes import Lanes
from meshdsl.turns.places import held
from meshdsl.turns.runner import AXIS, Runner, marked, within
from meshdsl.turns.stages import AFTER, HEAD, PROLOGUE, TAIL, Layers, Stages
from meshdsl.turns.ticks import Loop, Ticks, Unit, loops, unit

Stacks = dict[int, jax.Array]


class PipelinedStep(Step):
    """A step whose layers are run stage by stage."""

    def __init__(self, graph: Graph, stages: Stages, uniform: Uniform) -> None:
        super().__init__(graph, stages.placing, [op for op, time in stages.times.items() if time == AFTER])
        self.stages, self.uniform = stages, uniform

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        return _Loops(self, whole).run()


class _State(NamedTuple):
    """What is kept from tick to tick: what stages hand on, the stash, and the sums so far."""

    handed: Arrays
    back: Arrays
    stash: Arrays
    sums: Stacks


class _Now(NamedTuple):
    """What a tick comes to: the sums so far, and what is not added up."""

    sums: Stacks
    stacks: Stacks


class _Loops:
    """The loops over ticks, while they are traced."""

    def __init__(self, step: PipelinedStep, whole: Runner) -> None:
        self.step, self.whole, self.stages, self.uniform = step, whole, step.stages, step.uniform
        self.lanes, self.last = Lanes(step.stages, step.uniform, whole), step.stages.ranks - 1
        self.blocks = [dealt(whole.get(v, B), step.placing.turns) for v in step.batch]
        self.sums = {v.id: Sum.of(v, step.placing) for v in step.exported}
        self.made = {v.id for layers in self.stages.scans for v in layers.made}
        self.times = {v.id: self._time(v) for v in step.exported if v.id not in self.made}

    def _time(self, v: Value) -> str:
        op = self.step.makers[v.id]
        if op in [layers.op for layers in self.stages.scans]:
            return HEAD if op is self.stages.forward.op else TAIL
        return TAIL if self.stages.times[op.id] == TAIL else HEAD

    def run(self) -> list[jax.Array]:
        """The exported values, whole."""
        handed, *back = map(self.lanes.nothing, self.stages.scans)
        state = _State(handed, back[0] if back else (), self.lanes.stash() if back else (), self._begin())
        stacks: list[Stacks] = []
        for loop in loops(self.uniform):
            state, found = lax.scan(partial(self._round, loop), state, jnp.arange(loop.times, dtype=jnp.int32))
            stacks.append({v: x.reshape(-1, *x.shape[2:]) for v, x in found.items()})
        return [self._end(v, state.sums, stacks) for v in self.step.exported]

    def _begin(self) -> Stacks:
        """The sums before the first tick."""
        started = ((v, s.nothing) for v in self.step.exported if (s := self.sums[v.id]))
        return {v.id: self.lanes.dealt(x) if v.id in self.made else x for v, x in started}

    def _end(self, v: Value, sums: Stacks, stacks: list[Stacks]) -> jax.Array:
        """An exported value, whole."""
        if v.id in sums:
            return self.lanes.dealing.gathered(sums[v.id]) if v.id in self.made else sums[v.id]
        found = jnp.concatenate([each[v.id] for each in stacks if v.id in each])
        return self.step.joined(v, found[self._rows(self.times[v.id])])

    def _rows(self, time: str) -> Any:
        """Where the microbatches are in what is stacked tick by tick."""
        p, v, m = self.uniform.ranks, self.uniform.chunks, self.uniform.microbatches
        if time == HEAD:
            return slice(m)
        if v == 1:
            return slice(p - 1, p - 1 + m)
        at = np.arange(m)
        return at // p * (p * v) + at % p + v * p - 1

    def _round(self, loop: Loop, state: _State, number: jax.Array) -> tuple[_State, Stacks]:
        """One round of a loop: its parts, tick by tick."""
        stacks: list[Stacks] = []
        for part in loop.parts:
            ticks = number * loop.every + jnp.arange(part.start, part.start + part.count, dtype=jnp.int32)
            state, found = lax.scan(partial(self._tick, part), state, ticks)
            stacks.append(found)
        keys = dict.fromkeys(v for found in stacks for v in found)
        return state, {v: jnp.concatenate([found[v] for found in stacks if v in found]) for v in keys}

    def _tick(self, part: Ticks, state: _State, t: jax.Array) -> tuple[_State, Stacks]:
        handed, back, stash, sums = state
        now = _Now(dict(sums), {})
        if part.forward:
            with marked(self.stages.forward.op), within(FORWARD):
                given, handed = self._forwards(t, handed, now)
                stash = self.lanes.kept(stash, given, t)
        if part.backward:
            with marked(self.stages.backward.op), within(BACKWARD):
                back = self._backwards(part, t - self.uniform.ahead, back, stash, now)
        elif part.head:
            self._epilogue(self._unit(t - self.uniform.ahead, self.last, back=True), handed, now)
        return _State(handed, back, stash, now.sums), now.stacks

    def _forwards(self, t: jax.Array, handed: Arrays, now: _Now) -> tuple[Arrays, Arrays]:
        """What the stages are given, and what they make of it."""
        first = self._unit(t, 0)
        with self._microbatch(first, (PROLOGUE,)) as runner:
            start = tuple(runner.get(x, at) for x, at in self.stages.brought(self.stages.forward))
        given = self.lanes.handed(handed, start, 0, first.chunk == 0)
        made, rows = self.lanes.run(every := self._unit(t - self.lanes.ranks, self.lanes.ranks), given)
        self._add_rows(self.stages.forward, rows, every, now)
        return given, made

    def _backwards(self, part: Ticks, t: jax.Array, back: Arrays, stash: Arrays, now: _Now) -> Arrays:
        """``t`` counts from the first backward."""
        every = self._unit(t - self.last + self.lanes.ranks, self.lanes.ranks, back=True)
        given = self.lanes.found(stash, every.tick)
        made, rows = self.lanes.run(every, given)
        start = self._epilogue(self._unit(t, self.last, back=True), made, now) if part.head else None
        back = self.lanes.handed(back, start, self.last, jnp.bool_(True))
        back, gradients = self.lanes.run_back(every, back, given, rows)
        self._add_rows(self.stages.backward, gradients, every, now)
        self._rest(self._unit(t - self.last, 0, back=True), back, now)
        return back

    def _unit(self, number: jax.Array, rank: jax.Array | int, back: bool = False) -> Unit:
        return unit(self.uniform, number, rank, back)

    def _epilogue(self, last: Unit, made: Arrays, now: _Now) -> Arrays:
        """What the layers backward start from, if there are any, given what those of all stages made.

        Every unit here is valid.
        """
        ends = self._ends(self.stages.forward, made, self.last)
        with within(costs.HEAD), self._microbatch(last, (PROLOGUE, HEAD), ends) as runner:
            self._export(runner, HEAD, None, now)
            brought = (each for layers in self.stages.scans[1:] for each in self.stages.brought(layers))
            return tuple(runner.get(x, at) for x, at in brought)

    def _rest(self, first: Unit, back: Arrays, now: _Now) -> None:
        """What the gradients of the layers lead to."""
        ends = self._ends(self.stages.backward, back, 0)
        with self._microbatch(first, (PROLOGUE, TAIL), ends) as runner:
            self._export(runner, TAIL, first.valid & (first.chunk == 0), now)

    def _ends(self, layers: Layers, made: Arrays, stage: int) -> dict[Value, jax.Array]:
        """What one stage's carries came to."""
        return {v: self.lanes.of(x, stage) for v, x in zip(layers.last, made, strict=False)}

    @contextmanager
    def _microbatch(
        self, at: Unit, times: tuple[str, ...], ends: dict[Value, jax.Array] | None = None
    ) -> Iterator[Runner]:
        """What is known of a microbatch, from the batch and from what layers made, at some times."""
        blocks = [lax.dynamic_index_in_dim(x, at.microbatch, 0, keepdims=False) for x in self.blocks]
        with taking_turns(AXIS, at.microbatch):
            runner = self.step.turn(self.whole, blocks)
            for v, x in (ends or {}).items():
                runner.arrays[v.id, held(self.step.placing.of(v))] = x
            runner.run(op for op in self.step.inside if self.stages.times.get(op.id) in times)
            yield runner

    def _export(self, runner: Runner, time: str, valid: jax.Array | None, now: _Now) -> None:
        """Add what is exported at a time to the sums, and to the stacks of this tick."""
        for v in self.step.exported:
            if self.times.get(v.id) == time:
                found, s = runner.natural(v), self.sums[v.id]
                with marked(self.step.makers[v.id]):
                    if s:
                        now.sums[v.id] = s.add(now.sums[v.id], found if valid is None else s.masked(found, valid))
                    else:
                        now.stacks[v.id] = found

    def _add_rows(self, layers: Layers, rows: Arrays, every: Unit, now: _Now) -> None:
        """Add what the layers of each stage made for its microbatch to the sums."""
        for v, x in zip(layers.made, rows, strict=True):
            s = self.sums.get(v.id)
            if s:
                now.sums[v.id] = self.lanes.added(s, now.sums[v.id], x, every)
