"""The step as a pipeline whose stages are not alike: loops over ticks, in which every rank does its own stage's work.

The ticks are those of any table (``Rota``). In each, an operation for all ranks at once, forward or back, is a switch
over stages on the device (``Branches`` says what a branch does). To the planner it is one operation with a rule of its
own: its stacks lie split over the axis of the stages, and the examples of a microbatch may lie split over others, where
gradients are then partial. So a branch holds no collective: what ranks hand on moves outside.

What it costs, against layers in a scan:

    switches   the compiled program has conditionals; devices of other axes are idle unless they split the batch
    buffers    a rank hands on as much as the largest cut has, of each dtype
    weights    of a stage lie packed on its devices while the step runs, as long as those of the largest stage; outside
               they lie as planned, over all devices, and are exchanged once a step, as are their gradients; what
               several stages read is whole on all of them
    plan       what a branch computes is not planned, but told from its operations: a tick takes as long as the
               largest of the stages that work in it, and needs the room of the largest of all

A rank without a microbatch runs an empty branch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from statistics import mean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.custom.primitive import Spent
from meshdsl.ir import Graph, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B
from meshdsl.lowering.walk import Arrays
from meshdsl.pipeline.costs import BACKWARD, FORWARD, STASH
from meshdsl.turns import lanes
from meshdsl.turns.accumulate import JOIN, Step, dealt
from meshdsl.turns.branches import Branches, Side, reduction_of
from meshdsl.turns.packing import out_of_rows
from meshdsl.turns.parts import AFTER, Parts
from meshdsl.turns.ranks import Ranks
from meshdsl.turns.rota import Rota, Row, Units
from meshdsl.turns.runner import Runner, marked, within
from meshdsl.turns.switch import Switch, Weights
from meshdsl.turns.ticks import Loop

Ways = tuple[Arrays, ...]  # forward, and back if anything goes back


class PartedStep(Step):
    """A step whose parts are run by the ranks of an axis.

    Args:
      examples: whether a microbatch may be split over other axes.
    """

    def __init__(self, graph: Graph, parts: Parts, rota: Rota, axis: str, examples: bool, mesh: Mesh) -> None:
        late = [op.id for op in graph.ops if any(parts.times.get(v.id) == AFTER for v in op.outputs)]
        super().__init__(graph, parts.placing, late)
        self.parts, self.rota, self.axis = parts, rota, axis
        self.branches = Branches(self, parts, rota.ranks)
        self.loads = self.branches.loads(mesh)
        self.examples = examples and all(reduction_of(v, parts.placing) in ("", "sum") for v in self.exported)

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        return _Loops(self, whole).run()


class _State(NamedTuple):
    """What is kept from tick to tick: what was handed back, what waits, and the sums so far."""

    back: Arrays
    inputs: Arrays
    gradients: Arrays
    sums: Ways


class _Loops(Ranks):
    """The loops over ticks, while they are traced."""

    def __init__(self, step: PartedStep, whole: Runner) -> None:
        super().__init__(step.axis, step.rota.ranks)
        self.step, self.rota, self.parts = step, step.rota, step.parts
        self.order = np.array(step.rota.table.placement, np.int32).T  # by chunk and rank, the stage
        blocks = tuple(dealt(whole.get(v, B), step.placing.turns) for v in step.batch)
        self.branches, self.sides = step.branches, step.branches.sides
        weights = Weights(self, self.order, self.branches.traced, whole)
        self.works = [Switch(self.branches, s, weights, self.order, blocks, step.examples) for s in self.sides]

    def run(self) -> list[jax.Array]:
        """The exported values, whole."""
        state, rounds = self._empty(), list[Ways]()
        for loop in self.rota.loops:
            spent = list(zip(self._spent(loop, "F", 0), self._spent(loop, "BI", 1), strict=True))
            state, found = lax.scan(partial(self._round, spent), state, self.rota.rows(loop))
            rounds.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found))
        stacks = _joined(rounds)
        ends = {v.id: x for i in range(len(self.sides)) for v, x in self._ends(i, state.sums[i], stacks[i])}
        return [ends[v.id] for v in self.step.exported]

    def _spent(self, loop: Loop, kinds: str, way: int) -> list[Spent]:
        """Per part of a loop, what a tick takes on one way, on average: as long as the largest stage, on all ranks."""
        loads, flops = self.step.loads, self.branches.flops[way] if way < len(self.sides) else []
        seconds = [load.backward if way else load.forward for load in loads]
        room = self.p * max(load.room for load in loads)
        return [
            Spent(
                self.p * mean(max((seconds[s] for s in at), default=0.0) for at in ticks),
                mean(sum(flops[s] for s in at) for at in ticks),
                room,
            )
            for ticks in self.rota.working(loop, kinds)
        ]

    def _empty(self) -> _State:
        """What there is before the first tick."""
        rooms, size = self.rota.rooms, self.branches.size
        forward, *back = [[((size, row.length), row.dtype) for row in side.handing.columns] for side in self.sides]
        with within(STASH):
            inputs = tuple(self._unused((rooms.inputs.count, *shape), dtype) for shape, dtype in forward)
        handed = tuple(self._unused(shape, dtype) for shape, dtype in chain(*back))
        slots = (rooms.gradients.count,)
        kept = tuple(self._unused((*slots, *shape), dtype) for shape, dtype in chain(*back) if self.rota.inbox)
        return _State(handed, inputs, kept, tuple(map(self._zero, self.sides)))

    def _unused(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return self.split(lanes.unused((self.p, *shape), dtype))

    def _zero(self, side: Side) -> Arrays:
        return tuple(self.split(x, 1) for x in side.adding.nothing(*self.order.shape, self.p))

    def _round(self, spent: Sequence[tuple[Spent, Spent]], state: _State, rows: tuple[Row, ...]) -> tuple[_State, Ways]:
        """One round of a loop: its parts, tick by tick."""
        stacks = []
        for both, part in zip(spent, rows, strict=True):
            state, found = lax.scan(partial(self._tick, both), state, part)
            stacks.append(found)
        return state, _joined(stacks)

    def _tick(self, spent: tuple[Spent, Spent], state: _State, row: Row) -> tuple[_State, Ways]:
        stacks, made = [tuple[jax.Array, ...]() for _ in self.sides], tuple[jax.Array, ...]()
        if row.got is not None:
            with self._going(BACKWARD):
                state = state._replace(gradients=self._sent(state.back, state.gradients, row.got, -1))
        if row.forward:
            with self._going(FORWARD):
                came = self.get(state.inputs, row.forward.units.slot)
                made, state, stacks[0] = self._work(0, spent[0], row.forward.units, state, (came, ()))
        if row.backward:
            with self._going(BACKWARD):
                units, back = row.backward.units, self._returned(row.backward.gradient, state)
                given = self.get(state.inputs, units.slot), back
                found, state, stacks[1] = self._work(1, spent[1], units, state, given)
                state = state._replace(back=found)
        if row.forward:
            with self._going(FORWARD):
                state = state._replace(inputs=self._sent(made, state.inputs, row.forward.to, 1))
        return state, tuple(stacks)

    @contextmanager
    def _going(self, part: str) -> Iterator[None]:
        """What is traced in here is a part of the tick, and comes from the first cut."""
        cut = self.parts.cuts[0]
        with marked(cut.backward if part is BACKWARD and cut.backward else cut.forward), within(part):
            yield

    def _sent(self, made: Arrays, room: Arrays, to: Sequence[jax.Array | None], way: int) -> Arrays:
        """The room with what stages hand on, one ``way`` or the other."""
        for shift, slot in zip(self.rota.shifts, to, strict=True):
            if slot is not None:
                room = self.put(room, self.handed(made, way * shift), slot)
        return room

    def _returned(self, slot: jax.Array, state: _State) -> Arrays:
        """What stages were handed back: from where it waits, or as it comes."""
        if self.rota.inbox:
            return self.get(state.gradients, slot)
        return self.handed(state.back, -self.rota.shifts[0])

    def _work(
        self, way: int, spent: Spent, units: Units, state: _State, given: tuple[Arrays, Arrays]
    ) -> tuple[Arrays, _State, Arrays]:
        """What all ranks do: what they hand on, the state with what they add, and what they have per example."""
        made = self.works[way](units, *given, spent)
        mine = (lax.broadcasted_iota(jnp.int32, self.order.shape, 0) == units.chunk)[..., None, None]
        totals = zip(self.sides[way].adding.columns, state.sums[way], made.sums, strict=True)
        shares = ((c, so_far, jnp.where(mine, x[None], c.nothing(1))) for c, so_far, x in totals)
        added = tuple(self.split(JOIN[c.reduction](so_far, x), 1) for c, so_far, x in shares)
        sums = (*state.sums[:way], added, *state.sums[way + 1 :])
        return tuple(map(self.split, made.handed)), state._replace(sums=sums), tuple(map(self.split, made.stacks))

    def _ends(self, way: int, sums: Arrays, stacks: Arrays) -> Iterator[tuple[Value, jax.Array]]:
        """What is exported by the stages on one way, whole."""
        side = self.sides[way]
        for stage in range(self.parts.last + 1):
            (chunk, rank), *_ = np.argwhere(self.order == stage).tolist()
            totals = side.adding.unpack(stage, [x[chunk, rank] for x in sums])
            for v, x in zip(side.sums[stage], totals, strict=True):
                yield v, out_of_rows(x, v.shape)
            if side.stacks[stage]:
                places = np.array(self.rota.places("BI" if way else "F", stage, "B" if way else "F"))
                rows = [x[places, rank] for x in stacks]
                for v, x in zip(side.stacks[stage], side.whole(stage, rows), strict=True):
                    yield v, x


def _joined(stacks: Sequence[Ways]) -> Ways:
    """What comes tick by tick, one after the other, of those that have any."""
    ways = [[each for each in way if each] for way in zip(*stacks, strict=True)]
    return tuple(tuple(map(jnp.concatenate, zip(*way, strict=True))) for way in ways)
