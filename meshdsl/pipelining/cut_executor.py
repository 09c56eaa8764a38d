"""The step as a pipeline whose stages are not alike: loops over ticks, in which every rank does its own stage's work.

The ticks are those of any table (``TickTable``). In each, an operation for all ranks at once, forward or back, is a
switch
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
from dataclasses import replace
from functools import partial
from itertools import chain
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
from meshdsl.ir.graph import Graph, TracedProgram, Value
from meshdsl.ir.rewrite import Table, filtered, substitute, with_ops
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Split
from meshdsl.layouts.sharding_rule import Dims
from meshdsl.lowering.interpreter import Arrays
from meshdsl.pins import UserPins
from meshdsl.pipelining import scan_executor as lanes
from meshdsl.pipelining.accumulate import JOIN, Step, dealt, retraced
from meshdsl.pipelining.cut_stage_work import Branch, Branches, Given, Known, Made, StageSide, reduction_of
from meshdsl.pipelining.cut_stages import AFTER, StagePartition, find_parts
from meshdsl.pipelining.interpreter import Runner, marked, within
from meshdsl.pipelining.stage_buffers import PackedRows, Packing, Ranks, in_rows, out_of_rows, pick, row_length
from meshdsl.pipelining.stage_cost import StageTimer
from meshdsl.pipelining.tick_loops import Loop, TickRow, TickTable, TickUnits
from meshdsl.pipelining.time_axis import EACH, TimePlacement, analyze_time_axis
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import BACKWARD, FORWARD, STASH
from meshdsl.schedules.spec import Pipeline
from meshdsl.trace.annotate import BACKWARD as BACKWARD_PHASE

# ---- Switch ----------------------------------------------------------------------------------------------------------
# One operation for all ranks: each does the work of its own stage, by a switch on the device.
#
# Weights that one stage alone reads are packed by stage, so that a device holds its own; others are whole everywhere.


_RANKS, _EXAMPLES = ("ranks",), ("examples",)
Sided = Sequence[Sequence[Branch]]


class Weights:
    """What stages read that does not depend on the batch.

    Args:
      order: by chunk and rank, the stage.
      sides: per side and stage, its work.
    """

    def __init__(self, ranks: Ranks, order: NDArray[np.int32], sides: Sided, whole: Runner) -> None:
        self.ranks, self.order, self.arrays = ranks, order, {i: x for (i, _), x in whole.arrays.items()}
        self.own = self._alone([set().union(*(way.reads for way in each)) for each in zip(*sides, strict=True)])
        read = [set[int]().union(*(branch.reads for branch in side)) for side in sides]
        self.common = [sorted(ids.difference(*self.own)) for ids in read]
        self.packing = Packing([[self._row(self.arrays[i]) for i in each] for each in self.own])
        self.packed = self._pack()

    def _alone(self, reads: Sequence[set[int]]) -> list[list[int]]:
        """Per stage, what it alone reads and is more than a number."""
        packed = {i for i, x in self.arrays.items() if x.size > 1 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)}
        return [sorted(i for i in each & packed if sum(i in other for other in reads) == 1) for each in reads]

    def _row(self, x: jax.Array) -> PackedRows:
        return PackedRows(row_length(x.shape, self.ranks.p), x.dtype)

    def _pack(self) -> Arrays:
        """By chunk and rank, what each stage alone reads."""
        rows = [[in_rows(self.arrays[i], self.ranks.p) for i in each] for each in self.own]
        buffers = [self.packing.pack(stage, each, self.ranks.p) for stage, each in enumerate(rows)]
        stacks = [jnp.stack([each[s] for s in self.order.ravel()]) for each in zip(*buffers, strict=True)]
        return tuple(self.ranks.split(x.reshape(*self.order.shape, *x.shape[1:]), 1) for x in stacks)

    def shared(self, way: int) -> Arrays:
        """What several stages read, or is small: on the way forward (0), or back (1)."""
        return tuple(self.arrays[i] for i in self.common[way])

    def of(self, stage: int, way: int, packed: Arrays, shared: Arrays) -> Known:
        """What a stage reads, from what its rank has packed."""
        chunk = int(np.argwhere(self.order == stage)[0, 0])
        mine = zip(self.own[stage], self.packing.unpack(stage, [x[chunk] for x in packed]), strict=True)
        found: Known = {(i, B): out_of_rows(x, self.arrays[i].shape) for i, x in mine}
        return found | {(i, B): x for i, x in zip(self.common[way], shared, strict=True)}


class Switch:
    """The work of all ranks on one way.

    Args:
      order: by chunk and rank, the stage.
      examples: whether a microbatch may be split over other axes.
    """

    def __init__(
        self,
        branches: Branches,
        side: StageSide,
        weights: Weights,
        order: NDArray[np.int32],
        blocks: Arrays,
        examples: bool,
    ) -> None:
        self.branches, self.side, self.weights, self.order, self.blocks = branches, side, weights, order, blocks
        self.shared = weights.shared(int(side.back))
        self.rule = self._rule(_EXAMPLES if examples else ())
        self.ruled = RuledCall("stages back" if side.back else "stages", self._local, self.rule)

    def _rule(self, examples: tuple[str, ...]) -> RuleSpec:
        """Ranks side by side; of what has no examples, each device has a share if they are split."""
        handed: Dims = (_RANKS, examples, ())
        inputs: list[Dims] = [(_RANKS,), (_RANKS,), (examples,)]
        inputs += [((), examples, *[()] * (x.ndim - 2)) for x in self.blocks]
        inputs += [((),) * x.ndim for x in self.shared]
        inputs += [((), _RANKS, (), ()) for _ in self.weights.packed] + [handed] * self._given
        side = self.side
        outputs: list[Dims] = [handed] * len(side.handing.columns) + [(_RANKS, (), ())] * len(side.adding.columns)
        outputs += [handed] * len(side.stacking.columns)
        return RuleSpec(tuple(inputs), tuple(outputs), reduced=tuple((name, "sum") for name in examples))

    @property
    def _given(self) -> int:
        """How many buffers come through cuts."""
        came, back = self.branches.forward.handing, self.branches.backward.handing
        return len(came.columns) + (len(back.columns) if self.side.back else 0)

    def __call__(self, units: TickUnits, came: Arrays, back: Arrays, spent: FixedCost) -> Made:
        """What all ranks make, those that have no microbatch nothing; it takes what all ranks together do."""
        order = jnp.asarray(self.order)
        stage = order[0] if len(order) == 1 else jax.vmap(pick, (1, 0))(order, units.chunk)
        stage = jnp.where(units.valid, stage, self.order.size)
        at = lax.iota(jnp.int32, self.branches.size)
        arrays = (stage, units.microbatch, at, *self.blocks, *self.shared, *self.weights.packed, *came, *back)
        found = iter(custom_rule_p.bind(*arrays, ruled=replace(self.ruled, spent=spent)))
        side = self.side
        return Made(*(tuple(next(found) for _ in p.columns) for p in (side.handing, side.adding, side.stacking)))

    def _local(self, stage: jax.Array, microbatch: jax.Array, at: jax.Array, *rest: jax.Array) -> list[jax.Array]:
        """The work of the ranks that a device holds."""
        made = [self._rank(i, stage, microbatch, at, rest) for i in range(stage.shape[0])]
        return [jnp.stack(each) for each in zip(*made, strict=True)]

    def _rank(
        self, i: int, stage: jax.Array, microbatch: jax.Array, at: jax.Array, rest: Sequence[jax.Array]
    ) -> list[jax.Array]:
        all_there = stage.shape[0] == self.order.shape[1]
        mine = (self.order[:, i] if all_there else self.order.ravel()).tolist()
        which = jnp.argmax(jnp.append(stage[i] == jnp.asarray(mine), True))
        branches = [partial(self._branch, s) for s in mine]
        blocks, shared, packed, handed = self._dealt(rest)
        packed, handed = [x[:, i] for x in packed], [x[i] for x in handed]
        found: list[jax.Array] = lax.switch(
            which, [*branches, self._idle], microbatch[i], at, blocks, shared, packed, handed
        )
        return found

    def _dealt(self, rest: Sequence[jax.Array]) -> list[list[jax.Array]]:
        found, counts = list(rest), (len(self.blocks), len(self.shared), len(self.weights.packed))
        parts = []
        for n in counts:
            parts.append(found[:n])
            found = found[n:]
        return [*parts, found]

    def _branch(self, stage: int, microbatch: jax.Array, at: jax.Array, *rest: Any) -> list[jax.Array]:
        blocks, shared, packed, handed = map(tuple, rest)
        n = len(self.branches.forward.handing.columns)
        whole = self.weights.of(stage, int(self.side.back), packed, shared)
        given = Given(microbatch, at, blocks, whole, handed[:n], handed[n:])
        return jax.tree.leaves(self.branches.run(self.side, stage, given))

    def _idle(self, microbatch: jax.Array, at: jax.Array, *rest: Any) -> list[jax.Array]:
        return jax.tree.leaves(self.side.idle(at.shape[0]))


# ---- Parted ----------------------------------------------------------------------------------------------------------


Ways = tuple[Arrays, ...]  # forward, and back if anything goes back


class CutStep(Step):
    """A step whose parts are run by the ranks of an axis.

    Args:
      examples: whether a microbatch may be split over other axes.
    """

    def __init__(
        self, graph: Graph, parts: StagePartition, rota: TickTable, axis: str, examples: bool, mesh: Mesh
    ) -> None:
        late = [op.id for op in graph.ops if any(parts.times.get(v.id) == AFTER for v in op.outputs)]
        super().__init__(graph, parts.placing, late)
        self.parts, self.rota, self.axis = parts, rota, axis
        self.branches = Branches(self, parts, rota.ranks)
        self.loads = self.branches.loads(mesh)
        self.examples = examples and all(reduction_of(v, parts.placing) in ("", "sum") for v in self.exported)

    def looped(self, whole: Runner) -> list[jax.Array]:
        """The exported values, whole."""
        return _CutLoops(self, whole).run()


class _CutState(NamedTuple):
    """What is kept from tick to tick: what was handed back, what waits, and the sums so far."""

    back: Arrays
    inputs: Arrays
    gradients: Arrays
    sums: Ways


class _CutLoops(Ranks):
    """The loops over ticks, while they are traced."""

    def __init__(self, step: CutStep, whole: Runner) -> None:
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

    def _spent(self, loop: Loop, kinds: str, way: int) -> list[FixedCost]:
        """Per part of a loop, what a tick takes on one way, on average: as long as the largest stage, on all ranks."""
        loads, flops = self.step.loads, self.branches.flops[way] if way < len(self.sides) else []
        seconds = [load.backward if way else load.forward for load in loads]
        room = self.p * max(load.room for load in loads)
        return [
            FixedCost(
                self.p * mean(max((seconds[s] for s in at), default=0.0) for at in ticks),
                mean(sum(flops[s] for s in at) for at in ticks),
                room,
            )
            for ticks in self.rota.working(loop, kinds)
        ]

    def _empty(self) -> _CutState:
        """What there is before the first tick."""
        rooms, size = self.rota.rooms, self.branches.size
        forward, *back = [[((size, row.length), row.dtype) for row in side.handing.columns] for side in self.sides]
        with within(STASH):
            inputs = tuple(self._unused((rooms.inputs.count, *shape), dtype) for shape, dtype in forward)
        handed = tuple(self._unused(shape, dtype) for shape, dtype in chain(*back))
        slots = (rooms.gradients.count,)
        kept = tuple(self._unused((*slots, *shape), dtype) for shape, dtype in chain(*back) if self.rota.inbox)
        return _CutState(handed, inputs, kept, tuple(map(self._zero, self.sides)))

    def _unused(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return self.split(lanes.unused((self.p, *shape), dtype))

    def _zero(self, side: StageSide) -> Arrays:
        return tuple(self.split(x, 1) for x in side.adding.nothing(*self.order.shape, self.p))

    def _round(
        self, spent: Sequence[tuple[FixedCost, FixedCost]], state: _CutState, rows: tuple[TickRow, ...]
    ) -> tuple[_CutState, Ways]:
        """One round of a loop: its parts, tick by tick."""
        stacks = []
        for both, part in zip(spent, rows, strict=True):
            state, found = lax.scan(partial(self._tick, both), state, part)
            stacks.append(found)
        return state, _joined(stacks)

    def _tick(self, spent: tuple[FixedCost, FixedCost], state: _CutState, row: TickRow) -> tuple[_CutState, Ways]:
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

    def _returned(self, slot: jax.Array, state: _CutState) -> Arrays:
        """What stages were handed back: from where it waits, or as it comes."""
        if self.rota.inbox:
            return self.get(state.gradients, slot)
        return self.handed(state.back, -self.rota.shifts[0])

    def _work(
        self, way: int, spent: FixedCost, units: TickUnits, state: _CutState, given: tuple[Arrays, Arrays]
    ) -> tuple[Arrays, _CutState, Arrays]:
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


# ---- Cut -------------------------------------------------------------------------------------------------------------
# A step that ``md.stage`` cuts, as a pipeline over a named axis.


def by_parts(
    program: TracedProgram, asked: Pipeline, mesh: Mesh, batch: Sequence[int], user_pins: UserPins
) -> TracedProgram:
    """The program as a pipeline of the parts that ``md.stage`` cuts.

    Args:
      batch: positions of the inputs that are split in microbatches.

    Raises PipelineError if there is no such axis, no cut, or if the parts are no stages; PinError as ``make_pins``.
    """
    if mesh.sizes_by_name.get(asked.axis, 1) == 1:
        raise PipelineError(f"no axis {asked.axis!r} with several devices{nearest(asked.axis, mesh.names)}")
    if not any(op.name == "stage" for op in program.graph.ops):
        text = "a scan over layers needs none, there a rule such as layers:pipe says it"
        raise PipelineError(f"Pipeline(axis={asked.axis!r}) is for a step that md.stage cuts, and nothing does; {text}")
    again = [
        op for op in program.graph.ops if op.name == "stage" and not op.params["back"] and op.phase == BACKWARD_PHASE
    ]
    if again:
        text = f"md.stage at {again[0].source} is run again in the backward pass"
        raise PipelineError(f"{text}; put jax.checkpoint inside of parts, not around the cuts between them")
    user_pins.resolve(program, mesh)
    ids, examples = [program.graph.inputs[i].id for i in batch], program.inputs[batch[0]].shape[0]
    placing = analyze_time_axis(program.graph, asked.microbatches, ids, asked.per_microbatch)
    graph, clock = _trimmed(program.graph, placing), StageTimer(program.graph, mesh)
    seconds = {op.id: clock.seconds([op]) for op in graph.ops if placing.in_turns(op)}
    parts = find_parts(graph, placing, mesh.axis(asked.axis), seconds, asked)
    made = Pipelined(asked, asked.axis, mesh.axis(asked.axis), parts.forward_only, parts.sizes)
    free = _divides(program.graph, placing, ids, examples, asked)
    step = CutStep(graph, parts, TickTable(made.table, made.rooms), asked.axis, free, mesh)
    made = replace(made, loads=step.loads)
    notes = [f"{made}; {len(step.inside)} of {len(graph.ops) - 1} operations run per microbatch"]
    notes += _other_axes(mesh, asked.axis, free, step.examples)
    ignored = [op for op in graph.ops if op.name == "constrain" and placing.in_turns(op)]
    if ignored:
        notes.append(f"layouts that are stated inside of stages are not followed, the first at {ignored[0].source}")
    return replace(program, graph=retraced(graph, step.run), notes=[*program.notes, *notes], pipeline=made)


def _other_axes(mesh: Mesh, axis: str, free: bool, split: bool) -> Iterator[str]:
    """What axes beside that of the stages do for their work.

    Args:
      free: examples of a microbatch do not depend on each other. split: these axes split them.
    """
    others = [name for name, size in mesh.sizes_by_name.items() if name != axis and size > 1]
    if not others:
        return
    if split:
        yield f"over {', '.join(others)} stages are split by examples alone, and have the weights that they read whole"
        return
    why = (
        "the largest or smallest of all examples is wanted" if free else "examples of a microbatch depend on each other"
    )
    yield f"{why}, so that {', '.join(others)} cannot split the work of stages"


def _trimmed(graph: Graph, placing: TimePlacement) -> Graph:
    """The graph whose cuts hand on only what is known per example; the rest goes past them."""
    table, ops = Table(), []
    for op in graph.ops:
        op = substitute(op, table)
        if op.name == "stage":
            stays = [isinstance(placing.of(v), Split) for v in op.outputs]
            table.update({v.id: x for v, x, s in zip(op.outputs, op.inputs, stays, strict=True) if not s})
            op = replace(op, inputs=filtered(op.inputs, stays), outputs=filtered(op.outputs, stays))
        if op.name != "stage" or op.outputs:
            ops.append(op)
    return with_ops(graph, ops)


def _divides(graph: Graph, placing: TimePlacement, batch: Sequence[int], examples: int, asked: Pipeline) -> bool:
    """Whether every example could be a turn of its own, so that any number of them is a block."""
    if EACH in placing.places.values():
        return False
    try:
        single = analyze_time_axis(graph, examples, batch, asked.per_microbatch)
    except PipelineError:
        return False
    return single.places == placing.places and single.rows == placing.rows
