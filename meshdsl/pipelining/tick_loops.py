"""What stages work on, tick by tick: a table of a schedule as arrays that loops go over."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import numpy as np

from meshdsl.schedules.lockstep import BufferSlots, LockstepTable, Slots
from meshdsl.schedules.schedule import Task

# ---- Ticks -----------------------------------------------------------------------------------------------------------
# The ticks of a table as loops.
#
# Ticks with the same kinds of work, one after the other, are one scan; runs of such ticks that come again are a scan
# over scans. So a program is as long as there are ways to spend a tick, however many microbatches there are. Where
# there are many, heads are run in every backward, and then everything in every tick: what is not asked for is masked.


BODIES = 8


@dataclass(frozen=True)
class Ticks:
    """``count`` ticks in which work of the same kinds is done (``LockstepTable.kinds``)."""

    kinds: str
    count: int


@dataclass(frozen=True)
class Loop:
    """Ticks that come several times, from ``start`` on."""

    start: int
    times: int
    parts: tuple[Ticks, ...]

    @property
    def every(self) -> int:
        """Ticks from one time to the next."""
        return sum(part.count for part in self.parts)


def make_loops(kinds: Sequence[str], bodies: int = BODIES) -> list[Loop]:
    """Loops over ticks of these kinds, with no more parts than ``bodies`` if more may be done than is asked for."""
    every = "".join(sorted(set("".join(kinds))))
    for more in (kinds, [_with_head(k) for k in kinds], [every] * len(kinds)):
        loops = list(_loops([Ticks(kind, len(list(same))) for kind, same in groupby(more)]))
        if sum(len(loop.parts) for loop in loops) <= bodies:
            break
    return [_alone(kinds[loop.start], loop) for loop in loops]


def _alone(kind: str, loop: Loop) -> Loop:
    """A loop of one tick does what is asked for: compilers see that there is no more to it."""
    return replace(loop, parts=(Ticks(kind, 1),)) if loop.times * loop.every == 1 else loop


def _with_head(kinds: str) -> str:
    return kinds + "H" if ("B" in kinds or "I" in kinds) and "H" not in kinds else kinds


def _loops(runs: Sequence[Ticks]) -> Iterator[Loop]:
    start = at = 0
    while at < len(runs):
        length, times = max(((n, _times(runs[at:], n)) for n in range(1, len(runs) - at + 1)), key=_saved)
        loop = Loop(start, times, tuple(runs[at : at + length])) if times > 1 else Loop(start, 1, (runs[at],))
        yield loop
        at, start = at + loop.times * len(loop.parts), start + loop.times * loop.every


def _times(runs: Sequence[Ticks], n: int) -> int:
    """How often the first runs come, one time after the other."""
    times = 1
    while runs[times * n : (times + 1) * n] == runs[:n]:
        times += 1
    return times


def _saved(found: tuple[int, int]) -> tuple[int, int]:
    length, times = found
    return length * (times - 1), -length


# ---- Rota ------------------------------------------------------------------------------------------------------------


Tasks = list[list[Task | None]]  # by tick and rank


class TickUnits(NamedTuple):
    """By rank, what it works on.

    Args:
      chunk: which of its stages.
      microbatch: of the step.
      valid: whether there is anything.
      slot: where what it reads is kept.
    """

    chunk: Any
    microbatch: Any
    valid: Any
    slot: Any


class Forward(NamedTuple):
    """Forwards of one tick.

    Args:
      begins: by rank, whether it is the first stage's.
      begun: the microbatch of that.
      result: by rank, the slot for what its backward reads; past the last if nothing is kept.
      to: per distance that stages hand on over, by rank, the slot of what comes; past the last if nothing does, and
        None if nothing comes over that distance in any of these ticks.
    """

    units: TickUnits
    begins: Any
    begun: Any
    result: Any
    to: tuple[Any, ...]


class Backward(NamedTuple):
    """Backwards of one tick.

    Args:
      ended: the microbatch that is through the first stage; ``has_ended`` if there is one.
      gradient: by rank, the slot of what was handed back.
      result: by rank, the slot of what its forward kept.
      cut: by rank, the slot for what the second half reads of the first.
    """

    units: TickUnits
    ended: Any
    has_ended: Any
    gradient: Any
    result: Any
    cut: Any


class Head(NamedTuple):
    """The last stage is through with a microbatch.

    Args:
      begins: by rank, whether it is the last stage's.
      valid: whether there is one; None if there is in every tick.
    """

    begins: Any
    microbatch: Any
    valid: Any


class TickRow(NamedTuple):
    """One tick; what is not done is None.

    Args:
      got: per distance that stages hand back over, by rank, the slot of what comes; likewise.
    """

    forward: Forward | None
    got: tuple[Any, ...] | None
    backward: Backward | None
    head: Head | None
    weights: TickUnits | None


@dataclass(frozen=True)
class TickTable:
    """A table as loops over rows; ``rooms`` say where everything is kept."""

    table: LockstepTable
    rooms: BufferSlots

    @cached_property
    def loops(self) -> list[Loop]:
        """The ticks."""
        return make_loops([self._kinds(t) for t in range(len(self.table.ticks))])

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return len(self.table.placement)

    @property
    def first(self) -> int:
        """The rank of the first stage."""
        return self._homes[0]

    @property
    def last(self) -> int:
        """The rank of the last stage."""
        return self._homes[self._end]

    @property
    def _end(self) -> int:
        return self.table.schedule.stages - 1

    @property
    def _homes(self) -> dict[int, int]:
        return self.table.schedule.home

    @cached_property
    def shifts(self) -> list[int]:
        """Over how many ranks stages hand on, forward; backward it is as many back."""
        return sorted({(self._homes[s + 1] - self._homes[s]) % self.ranks for s in range(self._end)})

    @property
    def inbox(self) -> bool:
        """Whether gradients are kept; else each is read in the tick in which it comes."""
        return self.rooms.gradients.waits or len(self.shifts) > 1

    def _kinds(self, tick: int) -> str:
        kinds = self.table.kinds(tick)
        before = self.table.ticks[tick - 1] if tick else ()
        come = any(task.kind in "BI" and task.stage for tasks in before for task in tasks)
        return kinds + "G" * (self.inbox and come and not {"B", "I"} & set(kinds))

    def working(self, loop: Loop, kinds: str) -> list[list[list[int]]]:
        """Per part of a loop and each of its ticks, all rounds together, the stages that do a task of some kinds."""
        found = [self._tasks(ticks, kinds) for _, ticks in self._ticks(loop)]
        return [[[task.stage for task in row if task] for row in tasks] for tasks in found]

    def rows(self, loop: Loop) -> tuple[TickRow, ...]:
        """What the ticks of each part of a loop are about, by round and tick."""
        by_round = partial(_by_round, loop.times)
        return tuple(jax.tree.map(by_round, self._row(part.kinds, ticks)) for part, ticks in self._ticks(loop))

    def _ticks(self, loop: Loop) -> Iterator[tuple[Ticks, list[int]]]:
        """The parts of a loop with the ticks of each, round by round."""
        start = loop.start
        for part in loop.parts:
            yield part, [start + i * loop.every + j for i in range(loop.times) for j in range(part.count)]
            start += part.count

    def _row(self, kinds: str, ticks: Sequence[int]) -> TickRow:
        back = bool({"B", "I"} & set(kinds))
        return TickRow(
            self._forward(ticks) if "F" in kinds else None,
            self._got(ticks) if self.inbox and (back or "G" in kinds) else None,
            self._backward(ticks) if back else None,
            self._head(ticks) if "H" in kinds else None,
            self._units(self._tasks(ticks, "W"), self.rooms.cuts) if "W" in kinds else None,
        )

    def places(self, kinds: str, stage: int, kind: str = "") -> list[int]:
        """Per microbatch, which of the ticks in which some kinds are done is that of a stage's task of one kind.

        That is its backward by default, or its forward if nothing goes backward.
        """
        done = (part.kinds for loop in self.loops for part in loop.parts * loop.times for _ in range(part.count))
        order = [tick for tick, found in enumerate(done) if set(kinds) & set(found)]
        stage %= self.table.schedule.stages  # from the end if negative
        tasks = (Task(stage, kind or self.table.turns, m) for m in range(self.table.schedule.microbatches))
        return [order.index(self.table.when[task]) for task in tasks]

    def _forward(self, ticks: Sequence[int]) -> Forward:
        tasks = self._tasks(ticks, "F")
        sent = [[task and Task(task.stage + 1, "F", task.microbatch) for task in row] for row in tasks]
        begins, begun, _ = self._only(tasks, 0)
        to, result = self._come(sent, self.rooms.inputs, 1), self._slot(tasks, self.rooms.results)
        return Forward(self._units(tasks, self.rooms.inputs), begins, begun, result, to)

    def _backward(self, ticks: Sequence[int]) -> Backward:
        tasks = self._tasks(ticks, "BI")
        gradient, cut = self._slot(tasks, self.rooms.gradients, 0), self._slot(tasks, self.rooms.cuts)
        _, ended, has_ended = self._only(tasks, 0)
        units, result = self._units(tasks, self.rooms.inputs), self._slot(tasks, self.rooms.results, 0)
        return Backward(units, ended, has_ended, gradient, result, cut)

    def _head(self, ticks: Sequence[int]) -> Head:
        begins, microbatch, valid = self._only(self._tasks(ticks, self.table.turns), self._end)
        return Head(begins, microbatch, None if valid.all() else valid)

    def _got(self, ticks: Sequence[int]) -> tuple[Any, ...]:
        tasks = self._tasks([t - 1 for t in ticks], "BI")
        sent = [[task and Task(task.stage - 1, "B", task.microbatch) for task in row] for row in tasks]
        return self._come(sent, self.rooms.gradients, -1)

    def _tasks(self, ticks: Sequence[int], kinds: str) -> Tasks:
        return [[self.table.task(t, r, kinds) if t >= 0 else None for r in range(self.ranks)] for t in ticks]

    def _only(self, tasks: Tasks, stage: int) -> tuple[Any, Any, Any]:
        """Where one stage works, on which microbatch, and whether."""
        is_it = np.array([[task is not None and task.stage == stage for task in row] for row in tasks])
        numbers = [[task.microbatch for task in row if task and task.stage == stage] for row in tasks]
        return is_it, np.array([(*n, 0)[0] for n in numbers], np.int32), is_it.any(1)

    def _units(self, tasks: Tasks, slots: Slots) -> TickUnits:
        chunk = {s: stages.index(s) for stages in self.table.placement for s in stages}
        return TickUnits(
            np.array([[chunk[task.stage] if task else 0 for task in row] for row in tasks], np.int32),
            np.array([[task.microbatch if task else 0 for task in row] for row in tasks], np.int32),
            np.array([[task is not None for task in row] for row in tasks]),
            self._slot(tasks, slots, 0),
        )

    def _slot(self, tasks: Tasks, slots: Slots, other: int | None = None) -> Any:
        other = slots.count if other is None else other
        at = [[slots.at.get((t.stage, t.microbatch), other) if t else other for t in row] for row in tasks]
        return np.array(at, np.int32)

    def _come(self, sent: Tasks, slots: Slots, way: int) -> tuple[Any, ...]:
        come = (self._over(sent, way * shift) for shift in self.shifts)
        return tuple(self._slot(each, slots) if any(map(any, each)) else None for each in come)

    def _over(self, sent: Tasks, shift: int) -> Tasks:
        """What comes to every rank from some ranks away: what is for it."""
        moved = [[row[(rank - shift) % self.ranks] for rank in range(self.ranks)] for row in sent]
        return [[t if t and self._homes.get(t.stage) == r else None for r, t in enumerate(row)] for row in moved]


def _by_round(times: int, x: Any) -> Any:
    return x.reshape(times, -1, *x.shape[1:])
