"""The step as a pipeline: loops over ticks, in which all stages do the same, each for another microbatch.

In each tick (``TickTable`` says on what)

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

from meshdsl.ir.graph import Atom, Graph, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, Placement
from meshdsl.lowering.interpreter import Arrays
from meshdsl.lowering.local.registry import run_exchanges
from meshdsl.pipelining.accumulate import Step, Sum, dealt
from meshdsl.pipelining.interpreter import AXIS, Runner, marked, within
from meshdsl.pipelining.layer_scan import LayerScan
from meshdsl.pipelining.scan_stage_work import StageTurn, StageWork
from meshdsl.pipelining.scan_stages import AFTER, HEAD, PROLOGUE, TAIL, LayerAssignment, Stages
from meshdsl.pipelining.stage_buffers import Ranks, pick, unused
from meshdsl.pipelining.tick_loops import Backward, Forward, Head, TickRow, TickTable, TickUnits
from meshdsl.pipelining.time_axis import held
from meshdsl.schedules import simulate as costs
from meshdsl.schedules.simulate import BACKWARD, FORWARD, STASH, WEIGHTS

# ---- Lanes -----------------------------------------------------------------------------------------------------------
# What all stages of a pipeline do at once.
#
# What stages have is stacked, stage by stage, and the stack is split over the pipeline's axis. So a stage's layers are
# run for all stages at once (``vmap``), and handing on is a roll, which is a permute between devices. With several
# chunks of layers per rank, each rank has those that the table says, one of which it runs in a tick.


class VmappedStages(Ranks):
    """The stages of a pipeline side by side.

    Stacks have a dim of ranks in front, rooms one of slots after it; those that layers have or make have one of chunks
    in front of that of ranks.
    """

    def __init__(self, stages: Stages, rota: TickTable, whole: Runner) -> None:
        super().__init__(stages.axis, rota.ranks)
        self.stages, self.rota, self.whole = stages, rota, whole
        self.placing, self.v = stages.placing, rota.table.chunks
        self.dealing = LayerAssignment(stages.layers, tuple(zip(*rota.table.placement, strict=True)))
        self.used = None if self.dealing.even else self.split(jnp.asarray(self.dealing.used), 1)
        self.work = StageWork(stages, whole, self.dealing.most)
        given = {x.id: x for layers in stages.scans for x, _ in layers.stacks if self.placing.of(x) is B}
        self.stacks = {i: self.dealt(whole.get(x, B)) for i, x in given.items()}

    def dealt(self, x: jax.Array) -> jax.Array:
        """A stack of layers by chunk and rank."""
        return self.split(self.dealing.dealt(x), 1)

    def nothing(self, layers: LayerScan) -> Arrays:
        """What stages hand on before anything is."""
        return tuple(self._unused(x, self.p, at=at) for x, at in self.stages.brought(layers))

    def room(self, layers: LayerScan, slots: int) -> Arrays:
        """Room for what stages are handed."""
        return tuple(self._unused(x, self.p, slots, at=at) for x, at in self.stages.brought(layers))

    def room_for_results(self) -> Arrays:
        """Room for what backwards read of their forwards, if those are not run again."""
        slots = self.rota.rooms.results.count
        if not slots:
            return ()
        each = (self._unused(v, self.p, slots, self.dealing.most) for v in self.work.results.values())
        return (*each, *self.room(self.stages.forward, slots))

    def room_for_cuts(self) -> Arrays:
        """Room for what the second half of a backward reads of the first."""
        slots = self.rota.rooms.cuts.count
        if not slots:
            return ()
        each, once = self.work.cut
        stacks = (self._unused(v, self.p, slots, self.dealing.most) for v in each)
        return (*stacks, *(self._unused(x, self.p, slots) for x in once))

    def _unused(self, x: Atom, *front: int, at: Placement | None = None) -> jax.Array:
        place = held(self.placing.of(x)) if at is None else at
        shape = Layout(**{AXIS: place}).local_shape(x.shape, {AXIS: self.placing.turns})
        return self.split(unused((*front, *shape), x.dtype))

    def begun(self, given: Arrays, start: Arrays, begins: jax.Array) -> Arrays:
        """What the ranks are given, those that begin a microbatch what it starts from."""
        pairs = zip(given, start, strict=True)
        return tuple(self.split(jnp.where(_column(begins, x.ndim), y[None], x)) for x, y in pairs)

    def of(self, x: jax.Array, rank: int) -> jax.Array:
        """What one rank has, as a sum in which the others are nothing."""
        mine = _column(lax.iota(jnp.int32, self.p) == rank, x.ndim)
        return jnp.any(x & mine, 0) if x.dtype == jnp.bool_ else jnp.where(mine, x, 0).sum(0, dtype=x.dtype)

    def run(self, units: TickUnits, given: Arrays) -> tuple[Arrays, Arrays]:
        """All stages forward: what they hand on, and the stacks that their layers make."""
        own = self._own(self.stages.forward, units)
        made, rows = jax.vmap(self.work.forward)(self._turn(units), given, own)
        return tuple(map(self.split, made)), rows

    def run_back(self, units: TickUnits, back: Arrays, given: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        """All stages backward: likewise; ``given`` and ``rows`` are what they were given forward, and made."""
        own = self._own(self.stages.backward, units)
        made, rows = jax.vmap(self.work.backward)(self._turn(units), back, given, rows, own)
        return tuple(map(self.split, made)), rows

    def kept(self, made: Arrays, rows: Arrays) -> Arrays:
        """What is kept of what stages made forward."""
        return self.work.kept(made, rows)

    def found(self, units: TickUnits, kept: Arrays) -> tuple[Arrays, Arrays]:
        """What stages handed on, and the stacks that their layers made, from what was kept."""
        return jax.vmap(self.work.found)(self._turn(units), kept, self._own(self.stages.forward, units))

    def run_first(self, units: TickUnits, back: Arrays, given: Arrays, rows: Arrays) -> tuple[Arrays, Arrays]:
        """All stages through the first half of their backward: what they hand on, and what the second half reads."""
        own = self._own(self.stages.backward, units)
        made, cut = jax.vmap(self.work.first)(self._turn(units), back, given, rows, own)
        return tuple(map(self.split, made)), cut

    def run_second(self, units: TickUnits, cut: Arrays) -> Arrays:
        """All stages through the second half: the stacks that their layers make."""
        return jax.vmap(self.work.second)(self._turn(units), cut, self._own(self.stages.backward, units))

    def _turn(self, units: TickUnits) -> StageTurn:
        return StageTurn(units.microbatch, None if self.used is None else self._chunk(self.used, units))

    def _own(self, layers: LayerScan, units: TickUnits) -> Arrays:
        """What each stage has of stacks that are the same for all microbatches, for its chunk."""
        return tuple(self._chunk(self.stacks[x.id], units) for x, _ in layers.stacks if x.id in self.stacks)

    def _chunk(self, x: jax.Array, units: TickUnits) -> jax.Array:
        return x[0] if self.v == 1 else self.split(jax.vmap(pick, (1, 0))(x, units.chunk))

    def added(self, s: Sum, so_far: jax.Array, rows: jax.Array, units: TickUnits) -> jax.Array:
        """A sum by chunk and rank, with what the layers of each stage made."""
        chunks = lax.broadcasted_iota(jnp.int32, (self.v, self.p), 0)
        mine = units.valid if self.v == 1 else (chunks == units.chunk) & units.valid
        mine = jnp.broadcast_to(mine, chunks.shape)
        return self.split(s.add(so_far, s.masked(rows[None], mine.reshape(*mine.shape, *[1] * (rows.ndim - 1)))), 1)


def _column(x: jax.Array, rank: int) -> jax.Array:
    return x.reshape(-1, *[1] * (rank - 1))


# ---- Pipelined -------------------------------------------------------------------------------------------------------


Stacks = dict[int, jax.Array]


class PipelinedStep(Step):
    """A step whose layers are run stage by stage."""

    def __init__(self, graph: Graph, stages: Stages, rota: TickTable) -> None:
        super().__init__(graph, stages.placing, [op for op, time in stages.times.items() if time == AFTER])
        self.stages, self.rota = stages, rota

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        return _ScanLoops(self, whole).run()


class _ScanState(NamedTuple):
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


class _ScanLoops:
    """The loops over ticks, while they are traced."""

    def __init__(self, step: PipelinedStep, whole: Runner) -> None:
        self.step, self.whole, self.stages, self.rota = step, whole, step.stages, step.rota
        self.lanes = VmappedStages(step.stages, step.rota, whole)
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

    def _empty(self) -> _ScanState:
        """What there is before the first tick."""
        lanes, rooms, first, back = self.lanes, self.rota.rooms, self.stages.forward, self.stages.scans[1:]
        with within(FORWARD if rooms.results.count else STASH):
            inputs = lanes.room(first, rooms.inputs.count)
        with within(STASH):
            results = lanes.room_for_results()
        handed = [x for layers in back for x in lanes.nothing(layers)]
        kept = [x for layers in back if self.rota.inbox for x in lanes.room(layers, rooms.gradients.count)]
        return _ScanState(tuple(handed), inputs, results, tuple(kept), lanes.room_for_cuts(), self._begin())

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

    def _round(self, state: _ScanState, rows: tuple[TickRow, ...]) -> tuple[_ScanState, Stacks]:
        """One round of a loop: its parts, tick by tick."""
        stacks: list[Stacks] = []
        for part in rows:
            state, found = lax.scan(self._tick, state, part)
            stacks.append(found)
        keys = dict.fromkeys(v for found in stacks for v in found)
        return state, {v: jnp.concatenate([found[v] for found in stacks if v in found]) for v in keys}

    def _tick(self, state: _ScanState, row: TickRow) -> tuple[_ScanState, Stacks]:
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

    def _forwards(self, row: Forward, state: _ScanState, now: _Now) -> tuple[_ScanState, Arrays]:
        with self._microbatch(row.begun, (PROLOGUE,)) as runner:
            start = tuple(runner.get(x, at) for x, at in self.stages.brought(self.stages.forward))
        given = self.lanes.begun(self.lanes.get(state.inputs, row.units.slot), start, row.begins)
        made, rows = self.lanes.run(row.units, given)
        self._add_rows(self.stages.forward, rows, row.units, now)
        if self.rota.rooms.results.count:
            kept = self.lanes.put(state.results, self.lanes.kept(made, rows), row.result)
            return state._replace(results=kept), made
        return state._replace(inputs=self.lanes.put(state.inputs, given, row.units.slot)), made

    def _backwards(self, row: Backward, head: Head | None, state: _ScanState, now: _Now) -> _ScanState:
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

    def _again(self, row: Backward, state: _ScanState) -> tuple[Arrays, Arrays, Arrays]:
        """What stages were given forward, what they made of it, and the stacks of their layers: run again, or kept."""
        if self.rota.rooms.results.count:
            made, rows = self.lanes.found(row.units, self.lanes.get(state.results, row.result))
            return made, made, rows
        given = self.lanes.get(state.inputs, row.units.slot)
        return given, *self.lanes.run(row.units, given)

    def _returned(self, row: Backward, state: _ScanState) -> Arrays:
        """What stages were handed back: from where it waits, or as it comes."""
        if self.rota.inbox:
            return self.lanes.get(state.gradients, row.gradient)
        return self.lanes.handed(state.back, -self.rota.shifts[0])

    def _weights(self, units: TickUnits, state: _ScanState, now: _Now) -> None:
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

    def _ends(self, layers: LayerScan, made: Arrays, rank: int) -> dict[Value, jax.Array]:
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
        with run_exchanges(AXIS, at):
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

    def _add_rows(self, layers: LayerScan, rows: Arrays, units: TickUnits, now: _Now) -> None:
        """Add what the layers of each stage made for its microbatch to the sums."""
        for v, x in zip(layers.made, rows, strict=True):
            s = self.sums.get(v.id)
            if s:
                now.sums[v.id] = self.lanes.added(s, now.sums[v.id], x, units)
