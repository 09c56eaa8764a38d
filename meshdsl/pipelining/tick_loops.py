"""A lockstep timetable as loops over arrays: which microbatch and which buffer slots every rank uses in every tick.

A schedule as a table (``schedules.lockstep``) would unroll into a program of one block per tick. Here equal
neighbouring ticks become one ``lax.scan``, and a repeating sequence of such runs a scan of scans:

    1f1b, 4 stages, 8 microbatches     3 ticks F, 8 ticks FBH, 3 ticks B      three loops: warm-up, steady, cool-down

so the length of the program depends on the number of kinds of ticks, not on the number of microbatches. Everything that
differs between ranks and ticks (chunk, microbatch, slots) is data: integer arrays that the loops scan over. All ranks
run the same operations, and those without work are masked.

``make_loops`` finds the loops, ``TickTable`` the arrays; ``tick_executor`` runs them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from meshdsl.schedules.lockstep import BufferSlots, LockstepTable, Slots
from meshdsl.schedules.schedule import Task

MOST_BODIES = 8  # loop bodies of a program; beyond this, ticks are made equal by running more kinds of work, masked

# ---- Loops over ticks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ticks:
    """``count`` consecutive ticks with work of the same kinds (``LockstepTable.kinds``)."""

    kinds: str
    count: int


@dataclass(frozen=True)
class Loop:
    """A sequence of runs of ticks that starts at tick ``start`` and repeats ``times`` times."""

    start: int
    times: int
    parts: tuple[Ticks, ...]

    @property
    def period(self) -> int:
        """Ticks of one repetition."""
        return sum(part.count for part in self.parts)


def make_loops(kinds: Sequence[str], bodies: int = MOST_BODIES) -> list[Loop]:
    """Returns loops over ticks of these kinds.

    If they have more than ``bodies`` parts, the head also runs in every backward tick; if that is not enough, all kinds
    run in every tick.
    """
    all_kinds = "".join(sorted(set("".join(kinds))))
    with_head = [k + "H" if ("B" in k or "I" in k) and "H" not in k else k for k in kinds]
    for chosen in (kinds, with_head, [all_kinds] * len(kinds)):
        loops = list(_compressed([Ticks(kind, len(list(same))) for kind, same in groupby(chosen)]))
        if sum(len(loop.parts) for loop in loops) <= bodies:
            break
    # A loop of a single tick runs only the kinds of that tick, so that the compiler sees no masked work.
    return [
        replace(loop, parts=(Ticks(kinds[loop.start], 1),)) if loop.times * loop.period == 1 else loop for loop in loops
    ]


def _compressed(runs: Sequence[Ticks]) -> Iterator[Loop]:
    """Yields loops greedily: at each run, the repetition that saves the most runs, and of these the shortest."""
    start = at = 0
    while at < len(runs):

        def repetitions(length: int, rest: Sequence[Ticks] = runs[at:]) -> int:
            times = 1
            while rest[times * length : (times + 1) * length] == rest[:length]:
                times += 1
            return times

        candidates = ((length, repetitions(length)) for length in range(1, len(runs) - at + 1))
        length, times = max(candidates, key=lambda found: (found[0] * (found[1] - 1), -found[0]))
        loop = Loop(start, times, tuple(runs[at : at + length])) if times > 1 else Loop(start, 1, (runs[at],))
        yield loop
        at, start = at + loop.times * len(loop.parts), start + loop.times * loop.period


# ---- Rows of a tick table --------------------------------------------------------------------------------------------
# Fields are arrays by tick and rank, or by tick where only one stage is concerned. A slot past the last is a write that
# is dropped.

Tasks = list[list[Task | None]]  # by tick and rank


class TickUnits(NamedTuple):
    """The unit of work of every rank.

    Args:
      chunk: which of the rank's stages.
      microbatch: which microbatch.
      valid: False for a rank without work, whose results are masked.
      slot: where the unit's operands are buffered.
    """

    chunk: Any
    microbatch: Any
    valid: Any
    slot: Any


class Forward(NamedTuple):
    """The forward tasks of one tick.

    Args:
      starts: by rank, whether it runs the first stage, which starts from the prologue.
      started: the microbatch of the first stage.
      stash: by rank, the slot for the activations that its backward needs.
      receive: per shift (``TickTable.shifts``), by rank, the slot for the stage input that arrives; None if none
        arrives over that shift in any of these ticks.
    """

    units: TickUnits
    starts: Any
    started: Any
    stash: Any
    receive: tuple[Any, ...]


class Backward(NamedTuple):
    """The backward tasks of one tick, or their first halves.

    Args:
      finished: the microbatch of the first stage, whose backward pass is complete.
      has_finished: whether there is one.
      gradient: by rank, the slot of the gradient that it received.
      stash: by rank, the slot of its stashed activations.
      residuals: by rank, the slot for the residuals of its second half.
    """

    units: TickUnits
    finished: Any
    has_finished: Any
    gradient: Any
    stash: Any
    residuals: Any


class Head(NamedTuple):
    """The head runs for a microbatch that left the last stage.

    Args:
      is_last: by rank, whether it runs the last stage.
      valid: whether there is such a microbatch; None if there is one in every tick.
    """

    is_last: Any
    microbatch: Any
    valid: Any


class TickRow(NamedTuple):
    """The work of one tick; None for kinds that do not occur.

    Args:
      receive: per shift, by rank, the slot for the gradient that arrives; None as in ``Forward.receive``.
      weights: the second halves of backward tasks.
    """

    forward: Forward | None
    receive: tuple[Any, ...] | None
    backward: Backward | None
    head: Head | None
    weights: TickUnits | None


# ---- The table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TickTable:
    """A lockstep timetable with buffer slots, as loops over rows of arrays."""

    lockstep: LockstepTable
    slots: BufferSlots

    @cached_property
    def loops(self) -> list[Loop]:
        """Loops over all ticks."""
        return make_loops([self._kinds(t) for t in range(len(self.lockstep.ticks))])

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.lockstep.placement)

    @property
    def first_rank(self) -> int:
        """The rank of the first stage."""
        return self._home[0]

    @property
    def last_rank(self) -> int:
        """The rank of the last stage."""
        return self._home[self._last_stage]

    @property
    def _last_stage(self) -> int:
        return self.lockstep.schedule.stages - 1

    @property
    def _home(self) -> dict[int, int]:
        return self.lockstep.schedule.home

    @cached_property
    def shifts(self) -> list[int]:
        """Distances in ranks from a stage to the next, around the ring; gradients travel as far back."""
        return sorted({(self._home[s + 1] - self._home[s]) % self.ranks for s in range(self._last_stage)})

    @property
    def buffers_gradients(self) -> bool:
        """Whether received gradients need a buffer; otherwise each is used in the tick after it was sent."""
        return self.slots.gradients.outlives_tick or len(self.shifts) > 1

    def _kinds(self, tick: int) -> str:
        """Returns the kinds of work of a tick, with ``G`` if gradients only arrive and are buffered."""
        kinds = self.lockstep.kinds(tick)
        before = self.lockstep.ticks[tick - 1] if tick else ()
        arrives = any(task.kind in "BI" and task.stage for tasks in before for task in tasks)
        return kinds + "G" * (self.buffers_gradients and arrives and not {"B", "I"} & set(kinds))

    def rows(self, loop: Loop) -> tuple[TickRow, ...]:
        """Returns the rows of each part of a loop; arrays are by repetition and tick within it."""

        def by_repetition(x: Any) -> Any:
            return x.reshape(loop.times, -1, *x.shape[1:])

        return tuple(jax.tree.map(by_repetition, self._row(part.kinds, ticks)) for part, ticks in self._parts(loop))

    def working_stages(self, loop: Loop, kinds: str) -> list[list[list[int]]]:
        """Returns, per part of a loop and tick of all its repetitions, the stages with a task of these kinds."""
        tasks = [self._tasks(ticks, kinds) for _, ticks in self._parts(loop)]
        return [[[task.stage for task in row if task] for row in part] for part in tasks]

    def order_of_microbatches(self, kinds: str, stage: int, kind: str = "") -> list[int]:
        """Returns, per microbatch, the position of a stage's task among all ticks that do work of ``kinds``.

        Results that are stacked tick by tick are brought into the order of microbatches by it.

        Args:
          stage: the stage, counted from the last one if negative.
          kind: the kind of task; by default the backward, or the forward if there is no backward pass.
        """
        all_kinds = (part.kinds for loop in self.loops for part in loop.parts * loop.times for _ in range(part.count))
        ticks = [tick for tick, found in enumerate(all_kinds) if set(kinds) & set(found)]
        stage %= self.lockstep.schedule.stages
        microbatches = range(self.lockstep.schedule.microbatches)
        tasks = (Task(stage, kind or self.lockstep.turnaround, m) for m in microbatches)
        return [ticks.index(self.lockstep.tick_of[task]) for task in tasks]

    def _parts(self, loop: Loop) -> Iterator[tuple[Ticks, list[int]]]:
        """Yields the parts of a loop with the ticks of each, repetition by repetition."""
        start = loop.start
        for part in loop.parts:
            yield part, [start + i * loop.period + j for i in range(loop.times) for j in range(part.count)]
            start += part.count

    def _row(self, kinds: str, ticks: Sequence[int]) -> TickRow:
        backward = bool({"B", "I"} & set(kinds))
        receives = self.buffers_gradients and (backward or "G" in kinds)
        return TickRow(
            self._forward(ticks) if "F" in kinds else None,
            self._received_gradients(ticks) if receives else None,
            self._backward(ticks) if backward else None,
            self._head(ticks) if "H" in kinds else None,
            self._units(self._tasks(ticks, "W"), self.slots.residuals) if "W" in kinds else None,
        )

    def _forward(self, ticks: Sequence[int]) -> Forward:
        tasks = self._tasks(ticks, "F")
        sent = [[task and Task(task.stage + 1, "F", task.microbatch) for task in row] for row in tasks]
        starts, started, _ = self._of_stage(tasks, 0)
        receive, stash = self._received(sent, self.slots.inputs, 1), self._slot(tasks, self.slots.activations)
        return Forward(self._units(tasks, self.slots.inputs), starts, started, stash, receive)

    def _backward(self, ticks: Sequence[int]) -> Backward:
        tasks = self._tasks(ticks, "BI")
        gradient, residuals = self._slot(tasks, self.slots.gradients, 0), self._slot(tasks, self.slots.residuals)
        _, finished, has_finished = self._of_stage(tasks, 0)
        units, stash = self._units(tasks, self.slots.inputs), self._slot(tasks, self.slots.activations, 0)
        return Backward(units, finished, has_finished, gradient, stash, residuals)

    def _head(self, ticks: Sequence[int]) -> Head:
        is_last, microbatch, valid = self._of_stage(self._tasks(ticks, self.lockstep.turnaround), self._last_stage)
        return Head(is_last, microbatch, None if valid.all() else valid)

    def _received_gradients(self, ticks: Sequence[int]) -> tuple[Any, ...]:
        tasks = self._tasks([t - 1 for t in ticks], "BI")
        sent = [[task and Task(task.stage - 1, "B", task.microbatch) for task in row] for row in tasks]
        return self._received(sent, self.slots.gradients, -1)

    def _tasks(self, ticks: Sequence[int], kinds: str) -> Tasks:
        return [[self.lockstep.task(t, r, kinds) if t >= 0 else None for r in range(self.ranks)] for t in ticks]

    def _of_stage(self, tasks: Tasks, stage: int) -> tuple[Any, Any, Any]:
        """Returns by tick and rank whether it works on a stage; by tick its microbatch, and whether there is one."""
        mine = np.array([[task is not None and task.stage == stage for task in row] for row in tasks])
        microbatches = [[task.microbatch for task in row if task and task.stage == stage] for row in tasks]
        return mine, np.array([(*m, 0)[0] for m in microbatches], np.int32), mine.any(1)

    def _units(self, tasks: Tasks, slots: Slots) -> TickUnits:
        chunk = {s: stages.index(s) for stages in self.lockstep.placement for s in stages}
        return TickUnits(
            np.array([[chunk[task.stage] if task else 0 for task in row] for row in tasks], np.int32),
            np.array([[task.microbatch if task else 0 for task in row] for row in tasks], np.int32),
            np.array([[task is not None for task in row] for row in tasks]),
            self._slot(tasks, slots, 0),
        )

    def _slot(self, tasks: Tasks, slots: Slots, absent: int | None = None) -> Any:
        """Returns the slots of tasks; ``absent`` where there is none, by default one past the last."""
        absent = slots.count if absent is None else absent
        at = [[slots.at.get((t.stage, t.microbatch), absent) if t else absent for t in row] for row in tasks]
        return np.array(at, np.int32)

    def _received(self, sent: Tasks, slots: Slots, direction: int) -> tuple[Any, ...]:
        """Returns, per shift, the slots of what arrives.

        Args:
          sent: by sender, the task for which it sends something.
          direction: 1 towards later stages, -1 back.
        """
        found = []
        for shift in self.shifts:
            arriving: Tasks = []
            for row in sent:
                moved = [row[(rank - direction * shift) % self.ranks] for rank in range(self.ranks)]
                arriving.append([t if t and self._home.get(t.stage) == r else None for r, t in enumerate(moved)])
            found.append(self._slot(arriving, slots) if any(map(any, arriving)) else None)
        return tuple(found)
