"""The step as a pipeline: loops over ticks, in which all stages do the same, each for another microbatch.

In each tick (``Rota`` says on what)

    forward    x = inputs[slot], what the stage before handed on; the first stage starts a microbatch, from the prologue
               x = layers(x)
    backward   x = inputs[slot of this microbatch];   layers(x) again, for what the layers backward need
               d = what the stage behind handed back; the last stage takes it from the epilogue
               d, gradients = layers backward(d);   the first stage goes on with the rest of the microbatch
    weights    where the gradients of weights are done on their own: gradients = second half of layers backward(cuts)
    handing on inputs[slot] = x of the stage before, for the next tick

Ticks in which only some stages have a microbatch run on whatever is there, and what they add to sums is masked.
There is no conditional in it, and nothing that devices do differently. The result is a step like any other,
whose other axes are planned as any other's; only that stacks by stage lie split over the axis is stated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.ir import Graph, Value
from meshdsl.layouts.placement import B
from meshdsl.lowering.position import taking_turns
from meshdsl.lowering.walk import Arrays
from meshdsl.pipeline import costs
from meshdsl.pipeline.costs import BACKWARD, FORWARD, STASH, WEIGHTS
from meshdsl.turns.accumulate import Step, Sum, dealt
from meshdsl.turns.lanes import Lanes
from meshdsl.turns.layers import Layers
from meshdsl.turns.places import held
from meshdsl.turns.rota import Backward, Forward, Head, Rota, Row, Units
from meshdsl.turns.runner import AXIS, Runner, marked, within
from meshdsl.turns.stages import AFTER, HEAD, PROLOGUE, TAIL, Stages

Stacks = dict[int, jax.Array]


class PipelinedStep(Step):
    """A step whose layers are run stage by stage."""

    def __init__(self, graph: Graph, stages: Stages, rota: Rota) -> None:
        super().__init__(graph, stages.placing, [op for op, time in stages.times.items() if time == AFTER])
        self.stages, self.rota = stages, rota

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        return _Loops(self, whole).run()


class _State(NamedTuple):
    """What is kept from tick to tick: what stages hand back, what waits, and the sums so far."""

    back: Arrays
    inputs: Arrays
    results: Arrays
    gradients: Arrays
    cuts: Arrays
    sums: Stacks


class _Now(NamedTuple):
    """What a tick comes to: the sums so far, and what is not added up."""

    sums: Stacks
    stacks: Stacks


class _Loops:
    """The loops over ticks, while they are traced."""

    def __init__(self, step: PipelinedStep, whole: Runner) -> None:
        self.step, self.whole, self.stages, self.rota = step, whole, step.stages, step.rota
        self.lanes = Lanes(step.stages, step.rota, whole)
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
        state = self._empty()
        stacks: list[Stacks] = []
        for loop in self.rota.loops:
            state, found = lax.scan(self._round, state, self.rota.rows(loop))
            stacks.append({v: x.reshape(-1, *x.shape[2:]) for v, x in found.items()})
        return [self._end(v, state.sums, stacks) for v in self.step.exported]

    def _empty(self) -> _State:
        """What there is before the first tick."""
        lanes, rooms, first, back = self.lanes, self.rota.rooms, self.stages.forward, self.stages.scans[1:]
        with within(FORWARD if rooms.results.count else STASH):
            inputs = lanes.room(first, rooms.inputs.count)
        with within(STASH):
            results = lanes.room_for_results()
        handed = [x for layers in back for x in lanes.nothing(layers)]
        kept = [x for layers in back if self.rota.inbox for x in lanes.room(layers, rooms.gradients.count)]
        return _State(tuple(handed), inputs, results, tuple(kept), lanes.room_for_cuts(), self._begin())

    def _begin(self) -> Stacks:
        """The sums before the first tick."""
        started = ((v, s.nothing) for v in self.step.exported if (s := self.sums[v.id]))
        return {v.id: self.lanes.dealt(x) if v.id in self.made else x for v, x in started}

    def _end(self, v: Value, sums: Stacks, stacks: list[Stacks]) -> jax.Array:
        """An exported value, whole."""
        if v.id in sums:
            return self.lanes.dealing.gathered(sums[v.id]) if v.id in self.made else sums[v.id]
        found = jnp.concatenate([each[v.id] for each in stacks if v.id in each])
        return self.step.joined(v, found[np.array(self._places(self.times[v.id]))])

    def _places(self, time: str) -> list[int]:
        """Where the microbatches are in what is stacked tick by tick."""
        return self.rota.places("H", -1) if time == HEAD else self.rota.places(self.rota.table.turns, 0)

    def _round(self, state: _State, rows: tuple[Row, ...]) -> tuple[_State, Stacks]:
        """One round of a loop: its parts, tick by tick."""
        stacks: list[Stacks] = []
        for part in rows:
            state, found = lax.scan(self._tick, state, part)
            stacks.append(found)
        keys = dict.fromkeys(v for found in stacks for v in found)
        return state, {v: jnp.concatenate([found[v] for found in stacks if v in found]) for v in keys}

    def _tick(self, state: _State, row: Row) -> tuple[_State, Stacks]:
        now, made = _Now(dict(state.sums), {}), tuple[jax.Array, ...]()
        if row.got is not None:
            with marked(self.stages.backward.op), within(BACKWARD):
                state = state._replace(gradients=self._handed(state.back, state.gradients, row.got, -1))
        if row.forward:
            with marked(self.stages.forward.op), within(FORWARD):
                state, made = self._forwards(row.forward, state, now)
        if row.backward:
            with marked(self.stages.backward.op), within(BACKWARD):
                state = self._backwards(row.backward, row.head, state, now)
        elif row.head:
            self._epilogue(row.head, made, now)
        if row.weights:
            with marked(self.stages.backward.op), within(WEIGHTS):
                self._weights(row.weights, state, now)
        if row.forward:
            with marked(self.stages.forward.op), within(FORWARD):
                state = state._replace(inputs=self._handed(made, state.inputs, row.forward.to, 1))
        return state._replace(sums=now.sums), now.stacks

    def _handed(self, made: Arrays, room: Arrays, to: Sequence[jax.Array | None], way: int) -> Arrays:
        """The room with what stages hand on, one ``way`` or the other."""
        for shift, slot in zip(self.rota.shifts, to, strict=True):
            if slot is not None:
                room = self.lanes.put(room, self.lanes.handed(made, way * shift), slot)
        return room

    def _forwards(self, row: Forward, state: _State, now: _Now) -> tuple[_State, Arrays]:
        with self._microbatch(row.begun, (PROLOGUE,)) as runner:
            start = tuple(runner.get(x, at) for x, at in self.stages.brought(self.stages.forward))
        given = self.lanes.begun(self.lanes.get(state.inputs, row.units.slot), start, row.begins)
        made, rows = self.lanes.run(row.units, given)
        self._add_rows(self.stages.forward, rows, row.units, now)
        if self.rota.rooms.results.count:
            kept = self.lanes.put(state.results, self.lanes.kept(made, rows), row.result)
            return state._replace(results=kept), made
        return state._replace(inputs=self.lanes.put(state.inputs, given, row.units.slot)), made

    def _backwards(self, row: Backward, head: Head | None, state: _State, now: _Now) -> _State:
        given, made, rows = self._again(row, state)
        back = self._returned(row, state)
        if head:
            back = self.lanes.begun(back, self._epilogue(head, made, now), head.begins)
        if self.rota.table.split:
            back, cut = self.lanes.run_first(row.units, back, given, rows)
            state = state._replace(cuts=self.lanes.put(state.cuts, cut, row.cut))
        else:
            back, gradients = self.lanes.run_back(row.units, back, given, rows)
            self._add_rows(self.stages.backward, gradients, row.units, now)
        self._rest(row, back, now)
        return state._replace(back=back)

    def _again(self, row: Backward, state: _State) -> tuple[Arrays, Arrays, Arrays]:
        """What stages were given forward, what they made of it, and the stacks of their layers: run again, or kept."""
        if self.rota.rooms.results.count:
            made, rows = self.lanes.found(row.units, self.lanes.get(state.results, row.result))
            return made, made, rows
        given = self.lanes.get(state.inputs, row.units.slot)
        return given, *self.lanes.run(row.units, given)

    def _returned(self, row: Backward, state: _State) -> Arrays:
        """What stages were handed back: from where it waits, or as it comes."""
        if self.rota.inbox:
            return self.lanes.get(state.gradients, row.gradient)
        return self.lanes.handed(state.back, -self.rota.shifts[0])

    def _weights(self, units: Units, state: _State, now: _Now) -> None:
        rows = self.lanes.run_second(units, self.lanes.get(state.cuts, units.slot))
        self._add_rows(self.stages.backward, rows, units, now)

    def _epilogue(self, row: Head, made: Arrays, now: _Now) -> Arrays:
        """What the layers backward start from, if there are any, given what those of all stages made."""
        ends = self._ends(self.stages.forward, made, self.rota.last)
        with within(costs.HEAD), self._microbatch(row.microbatch, (PROLOGUE, HEAD), ends) as runner:
            self._export(runner, HEAD, row.valid, now)
            brought = (each for layers in self.stages.scans[1:] for each in self.stages.brought(layers))
            return tuple(runner.get(x, at) for x, at in brought)

    def _rest(self, row: Backward, back: Arrays, now: _Now) -> None:
        """What the gradients of the layers lead to."""
        ends = self._ends(self.stages.backward, back, self.rota.first)
        with self._microbatch(row.ended, (PROLOGUE, TAIL), ends) as runner:
            self._export(runner, TAIL, row.has_ended, now)

    def _ends(self, layers: Layers, made: Arrays, rank: int) -> dict[Value, jax.Array]:
        """What one rank's carries came to, and what it was brought from past the layers."""
        past = [] if layers is self.stages.forward else [x for x in self.stages.consts(layers) if x in self.stages.past]
        brought = dict(zip(self.stages.consts(layers), made[len(layers.last) :], strict=True))
        ends = (*zip(layers.last, made, strict=False), *((v, brought[v]) for v in past))
        return {v: self.lanes.of(x, rank) for v, x in ends}

    @contextmanager
    def _microbatch(
        self, at: jax.Array, times: tuple[str, ...], ends: dict[Value, jax.Array] | None = None
    ) -> Iterator[Runner]:
        """What is known of a microbatch, from the batch and from what layers made, at some times."""
        blocks = [lax.dynamic_index_in_dim(x, at, 0, keepdims=False) for x in self.blocks]
        with taking_turns(AXIS, at):
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

    def _add_rows(self, layers: Layers, rows: Arrays, units: Units, now: _Now) -> None:
        """Add what the layers of each stage made for its microbatch to the sums."""
        for v, x in zip(layers.made, rows, strict=True):
            s = self.sums.get(v.id)
            if s:
                now.sums[v.id] = self.lanes.added(s, now.sums[v.id], x, units)
