"""The step as a pipeline: a loop over ticks, in which all stages do the same, each for another microbatch.

What stages have is stacked, stage by stage, and the stack is split over the pipeline's axis. So a stage's layers are
run for all stages at once (``vmap``), and handing on is a roll by one place, which is a permute between neighbours.
In each tick (see ``Uniform``)

    forward    x = what the stage before made in the last tick; stage 0 starts a microbatch, from the prologue
               stash[tick] = x;   x = layers(x)
    backward   x = stash[tick of this microbatch's forward];   layers(x) again, for what the layers backward need
               d = what the stage behind made in the last tick; the last stage takes it from the epilogue
               d, gradients = layers backward(d);   stage 0 goes on with the rest of the microbatch

Ticks in which only some stages have a microbatch run on whatever is there, and what they add to sums is masked.
There is no conditional in it, and nothing that devices do differently. The result is a step like any other,
whose other axes are planned as any other's; only that the stacks lie split over the axis is stated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Graph, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Placement, S
from meshdsl.lowering.position import taking_turns
from meshdsl.lowering.walk import Arrays
from meshdsl.pipeline.uniform import Uniform
from meshdsl.stated import state
from meshdsl.trace.rolls import roll_p
from meshdsl.turns.accumulate import Step, Sum, dealt
from meshdsl.turns.places import held
from meshdsl.turns.runner import AXIS, Runner, marked, scanned
from meshdsl.turns.stages import AFTER, HEAD, PROLOGUE, TAIL, Layers, Stages

Known = dict[tuple[int, Placement], jax.Array]


class PipelinedStep(Step):
    """A step whose layers are run stage by stage."""

    def __init__(self, graph: Graph, stages: Stages, uniform: Uniform) -> None:
        super().__init__(graph, stages.placing, [op for op, time in stages.times.items() if time == AFTER])
        self.stages, self.uniform = stages, uniform

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        return _Loop(self, whole).run()


@dataclass(frozen=True)
class _Tick:
    """What is done in some ticks: ``start`` to ``stop``."""

    start: int
    stop: int
    forward: bool
    head: bool
    backward: bool


def phases(uniform: Uniform) -> list[_Tick]:
    """The ticks of a step, as few loops as possible."""
    ahead, span = uniform.ahead, uniform.span
    done = ahead + uniform.microbatches
    ends = sorted({0, span, ahead, done, uniform.ticks})
    return [_Tick(a, b, a < span, ahead <= a < done, ahead <= a) for a, b in pairwise(ends)]


class _Now(NamedTuple):
    """What a tick comes to: the sums so far, and what is not added up."""

    sums: dict[int, jax.Array]
    stacks: dict[int, jax.Array]


class _Loop:
    """The loops over ticks, while they are traced.

    The state between ticks: what was handed on forward and backward, the stash, and the sums so far.
    """

    def __init__(self, step: PipelinedStep, whole: Runner) -> None:
        self.step, self.whole = step, whole
        self.stages, self.uniform, self.placing = step.stages, step.uniform, step.placing
        self.p, self.axis = self.stages.ranks, self.stages.axis
        self.forward, self.backward = self.stages.forward, self.stages.backward
        self.ranks = lax.iota(jnp.int32, self.p)
        self.blocks = [dealt(whole.get(v, B), self.placing.turns) for v in step.batch]
        self.stacks = {
            x.id: self._staged(whole.get(x, B))
            for layers in (self.forward, self.backward)
            for x, _ in layers.stacks
            if isinstance(x, Value) and self.placing.of(x) is B
        }
        self.sums = {v.id: Sum.of(v, self.placing) for v in step.exported}
        self.made = {v.id for layers in (self.forward, self.backward) for v in layers.made}
        self.times = {v.id: self._time(v) for v in step.exported if v.id not in self.made}

    def _time(self, v: Value) -> str:
        op = self.step.makers[v.id]
        if op in (self.forward.op, self.backward.op):
            return HEAD if op is self.forward.op else TAIL
        return TAIL if self.stages.times[op.id] == TAIL else HEAD

    def run(self) -> list[jax.Array]:
        """The exported values, whole."""
        handed, back = (self._nothing(layers) for layers in (self.forward, self.backward))
        stash = tuple(unused((self.uniform.slots, *x.shape), x.dtype) for x in handed)
        state = handed, back, tuple(self._split(x, 1) for x in stash), self._begin()
        stacks: list[dict[int, jax.Array]] = []
        for phase in phases(self.uniform):
            ticks = jnp.arange(phase.start, phase.stop, dtype=jnp.int32)
            state, found = lax.scan(partial(self._tick, phase), state, ticks)
            stacks.append(found)
        return [self._end(v, state[-1], stacks) for v in self.step.exported]

    def _nothing(self, layers: Layers) -> Arrays:
        """What is handed on before the first tick."""
        found = (unused((self.p, *self._shape(x.shape, at)), x.dtype) for x, at in self.stages.brought(layers))
        return tuple(map(self._split, found))

    def _shape(self, shape: tuple[int, ...], at: Any) -> tuple[int, ...]:
        return Layout(**{AXIS: at}).local_shape(shape, {AXIS: self.placing.turns})

    def _begin(self) -> dict[int, jax.Array]:
        """The sums before the first tick."""
        start = {}
        for v in self.step.exported:
            s = self.sums[v.id]
            if s and v.id in self.made:
                start[v.id] = self._staged(s.nothing)
            elif s:
                start[v.id] = s.nothing
        return start

    def _end(self, v: Value, sums: dict[int, jax.Array], stacks: Sequence[dict[int, jax.Array]]) -> jax.Array:
        """An exported value, whole."""
        if v.id in sums:
            return sums[v.id].reshape(v.shape)
        found = jnp.concatenate([each[v.id] for each in stacks if v.id in each])
        first = self.p - 1 if self.times[v.id] == TAIL else 0
        return self.step.joined(v, found[first : first + self.uniform.microbatches])

    def _tick(self, phase: _Tick, state: Any, t: jax.Array) -> Any:
        handed, back, stash, sums = state
        now = _Now(dict(sums), {})
        if phase.forward:
            with marked(self.forward.op):
                handed, stash = self._forwards(t, handed, stash, now)
        if phase.backward:
            with marked(self.backward.op):
                back = self._backwards(phase, t, back, stash, now)
        return (handed, back, stash, now.sums), now.stacks

    def _forwards(self, t: jax.Array, handed: Arrays, stash: Arrays, now: _Now) -> tuple[Arrays, Arrays]:
        with self._microbatch(t) as runner:
            runner.run(op for op in self.step.inside if self.stages.times.get(op.id) == PROLOGUE)
            start = tuple(runner.get(x, at) for x, at in self.stages.brought(self.forward))
        given = self._handed(handed, start, 0)
        slot = lax.rem(t, jnp.int32(self.uniform.slots))
        stash = tuple(
            self._split(lax.dynamic_update_index_in_dim(kept, x, slot, 0), 1)
            for kept, x in zip(stash, given, strict=True)
        )
        unit = t - self.ranks
        made, rows = jax.vmap(self._layers)(self._clipped(unit), given, self._own(self.forward))
        self._add_rows(self.forward, rows, unit, now)
        return tuple(map(self._split, made)), stash

    def _backwards(self, phase: _Tick, t: jax.Array, back: Arrays, stash: Arrays, now: _Now) -> Arrays:
        unit = t - self.uniform.ahead - (self.p - 1) + self.ranks
        slots = self.uniform.slots
        at = lax.rem(unit + self.ranks + jnp.int32(slots * self.p), jnp.int32(slots))
        given = tuple(self._split(jax.vmap(_pick, (1, 0))(kept, at)) for kept in stash)
        turn = self._clipped(unit)
        made, rows = jax.vmap(self._layers)(turn, given, self._own(self.forward))
        start = self._epilogue(t - self.uniform.ahead, made, now) if phase.head else None
        back = self._handed(back, start, self.p - 1)
        back, gradients = jax.vmap(self._layers_back)(turn, back, given, rows, self._own(self.backward))
        self._add_rows(self.backward, gradients, unit, now)
        self._rest(t - self.uniform.ahead - (self.p - 1), back, now)
        return tuple(map(self._split, back))

    def _epilogue(self, i: jax.Array, made: Arrays, now: _Now) -> Arrays:
        """What the layers backward start from, given what those of all stages made."""
        with self._microbatch(i) as runner:
            last = [self._of(x, self.p - 1) for x in made[: len(self.forward.last)]]
            runner.define(self.forward.last, last, [held(self.placing.of(v)) for v in self.forward.last])
            runner.run(op for op in self.step.inside if self.stages.times.get(op.id) in (PROLOGUE, HEAD))
            self._export(runner, HEAD, None, now)
            return tuple(runner.get(x, at) for x, at in self.stages.brought(self.backward))

    def _rest(self, i: jax.Array, back: Arrays, now: _Now) -> None:
        with self._microbatch(i) as runner:
            first = [self._of(x, 0) for x in back[: len(self.backward.last)]]
            runner.define(self.backward.last, first, [held(self.placing.of(v)) for v in self.backward.last])
            runner.run(op for op in self.step.inside if self.stages.times.get(op.id) in (PROLOGUE, TAIL))
            self._export(runner, TAIL, (i >= 0) & (i < self.uniform.microbatches), now)

    @contextmanager
    def _microbatch(self, i: jax.Array) -> Iterator[Runner]:
        """What a microbatch starts from; one that there is not is another one, whose results are masked."""
        at = self._clipped(i)
        blocks = [lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in self.blocks]
        with taking_turns(AXIS, at):
            yield self.step.turn(self.whole, blocks)

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

    def _add_rows(self, layers: Layers, rows: Arrays, unit: jax.Array, now: _Now) -> None:
        """Add what the layers of each stage made for its microbatch to the sums."""
        for v, x in zip(layers.made, rows, strict=True):
            s = self.sums.get(v.id)
            if s:
                valid = _column((unit >= 0) & (unit < self.uniform.microbatches), x.ndim)
                now.sums[v.id] = self._split(s.add(now.sums[v.id], s.masked(x, valid)))

    def _layers(self, turn: jax.Array, given: Arrays, stacks: Arrays) -> tuple[Arrays, Arrays]:
        """A stage forward: what it hands on, and the stacks that it makes."""
        return self._run(self.forward, turn, given, stacks, self._consts(self.forward, given))

    def _layers_back(
        self, turn: jax.Array, back: Arrays, given: Arrays, rows: Arrays, stacks: Arrays
    ) -> tuple[Arrays, Arrays]:
        """A stage backward: likewise; ``given`` and ``rows`` are what it was given forward, and made."""
        made = dict(zip((v.id for v in self.forward.made), rows, strict=True))
        own = iter(stacks)
        found = tuple(made[x.id] if x.id in made else next(own) for x, _ in self.backward.stacks)
        known = self._consts(self.forward, given) | self._consts(self.backward, back)
        return self._run(self.backward, turn, back, found, known)

    def _run(
        self, layers: Layers, turn: jax.Array, given: Arrays, stacks: Arrays, known: Known
    ) -> tuple[Arrays, Arrays]:
        runner, carries = Runner(self.placing, self.whole.arrays | known), len(layers.last)
        with taking_turns(AXIS, turn):
            closed = tuple(runner.natural(x) for x, _ in layers.consts)
            found = scanned(runner, layers.op, closed, given[:carries], stacks, layers.length // self.p)
        return (*found[:carries], *given[carries:]), found[carries:]

    def _consts(self, layers: Layers, given: Arrays) -> Known:
        """The consts among what a microbatch brings along."""
        consts = self.stages.consts(layers)
        return {(x.id, held(self.placing.of(x))): y for x, y in zip(consts, given[len(layers.last) :], strict=True)}

    def _own(self, layers: Layers) -> Arrays:
        """What each stage has of the stacks that are the same for all microbatches."""
        return tuple(self.stacks[x.id] for x, _ in layers.stacks if isinstance(x, Value) and x.id in self.stacks)

    def _handed(self, before: Arrays, start: Arrays | None, first: int) -> Arrays:
        """What every stage takes from its neighbour, the first one from ``start``."""
        shift = 1 if first == 0 else self.p - 1
        moved = [self._split(roll_p.bind(self._split(x), axis=0, shift=shift)) for x in before]
        if start is not None:
            moved = [
                jnp.where(_column(self.ranks == first, x.ndim), y[None], x) for x, y in zip(moved, start, strict=True)
            ]
        return tuple(map(self._split, moved))

    def _of(self, x: jax.Array, stage: int) -> jax.Array:
        """What one stage has, as a sum in which the others are nothing."""
        mine = _column(self.ranks == stage, x.ndim)
        return jnp.any(x & mine, 0) if x.dtype == jnp.bool_ else jnp.where(mine, x, 0).sum(0, dtype=x.dtype)

    def _clipped(self, i: jax.Array) -> jax.Array:
        return jnp.clip(i, 0, self.uniform.microbatches - 1)

    def _split(self, x: jax.Array, dim: int = 0) -> jax.Array:
        """A stack of what the stages have, each device holding its own."""
        made: jax.Array = state(x, Layout(**{self.axis: S(dim)}))
        return made

    def _staged(self, x: jax.Array) -> jax.Array:
        """A stack of layers as a stack of stages."""
        return self._split(x.reshape(self.p, x.shape[0] // self.p, *x.shape[1:]))


def unused(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What is there before anything is; no result depends on it."""
    return jnp.zeros(shape, dtype)


def _pick(x: jax.Array, at: jax.Array) -> jax.Array:
    found: jax.Array = lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
    return found


def _column(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(-1, *[1] * (rank - 1))
