"""Schedules in lockstep: a timetable in ticks, and the buffer slots that it needs.

A *tick* is a forward ``F``, then a backward ``B`` (or its first half ``I``, the gradient of the stage's input), then a
weight gradient ``W``; a rank does at most one task of each kind. What a stage sends in a tick arrives at its end. All
ranks run the same operations in a tick, so it takes as long as the kinds of tasks in it.

``lockstep`` packs any schedule into ticks. ``UniformSchedule`` is a closed form in which ranks need no table at all.
``make_buffer_slots`` allocates the buffers: a linear-scan allocation of live ranges per rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

from meshdsl.schedules.schedule import Schedule, Task, check_groups

# ---- The timetable ---------------------------------------------------------------------------------------------------

_PHASE = {"F": 0, "B": 1, "I": 1, "W": 2}  # the order of kinds within a tick
_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1, "H": 0}  # nominal time: F, I and W take one unit, B takes I and W
TickTasks = tuple[tuple[Task, ...], ...]  # by rank, its tasks in one tick


@dataclass(frozen=True)
class LockstepTable:
    """The tasks of every rank in every tick."""

    ticks: tuple[TickTasks, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """The tasks of every rank, in order."""
        return Schedule(tuple(tuple(chain.from_iterable(tasks)) for tasks in zip(*self.ticks, strict=True)))

    @cached_property
    def tick_of(self) -> dict[Task, int]:
        """The tick of every task."""
        return {task: t for t, tick in enumerate(self.ticks) for tasks in tick for task in tasks}

    @cached_property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, its stages in order."""
        home = self.schedule.home
        return tuple(tuple(s for s in sorted(home) if home[s] == r) for r in range(len(self.ticks[0])))

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.schedule.chunks

    @property
    def split(self) -> bool:
        """Whether backwards are split into input gradients and weight gradients."""
        return bool(self.schedule.split)

    @property
    def bubble(self) -> float:
        """The fraction of the step in which the busiest rank has no task, in nominal time."""
        total = sum(_UNITS[kind] for t in range(len(self.ticks)) for kind in self.kinds(t))
        busy = max(sum(_UNITS[task.kind] for task in tasks) for tasks in self.schedule.ranks)
        return (total - busy) / total

    def task(self, tick: int, rank: int, kinds: str) -> Task | None:
        """Returns the task of one of these kinds that a rank does in a tick."""
        return next((task for task in self.ticks[tick][rank] if task.kind in kinds), None)

    @property
    def turnaround(self) -> str:
        """The kind of task with which the last stage completes a microbatch's forward pass and starts its backward."""
        return "F" if self.schedule.forward_only else "I" if self.split else "B"

    def backward_tick(self, stage: int, microbatch: int) -> int:
        """Returns the tick of a stage's backward, or of its forward in an evaluation."""
        return self.tick_of[Task(stage, self.turnaround, microbatch)]

    def kinds(self, tick: int) -> str:
        """Returns which of ``FBIW`` occur in a tick, with ``H`` if the head runs: a microbatch turns around."""
        tasks = set(chain.from_iterable(self.ticks[tick]))
        present = {task.kind for task in tasks}
        head = any(task.stage == self.schedule.stages - 1 and task.kind == self.turnaround for task in tasks)
        return "".join(kind for kind in "FBIW" if kind in present) + "H" * head


def lockstep(schedule: Schedule) -> LockstepTable:
    """Returns a schedule in as few ticks as the order of its tasks allows.

    If some backwards are split, all are: a whole one becomes two tasks of the same tick, where that is possible.
    """
    pending = []
    for tasks in schedule.ranks:
        kinds = ((task, "IW" if schedule.split and task.kind == "B" else task.kind) for task in tasks)
        pending.append([Task(task.stage, kind, task.microbatch) for task, each in kinds for kind in each])
    split = Schedule(tuple(map(tuple, pending)))
    tick_of: dict[Task, int] = {}
    ticks: list[TickTasks] = []
    while any(pending):
        ticks.append(tuple(_next_tick(split, tasks, len(ticks), tick_of) for tasks in pending))
    return LockstepTable(tuple(ticks))


def _next_tick(schedule: Schedule, pending: list[Task], tick: int, tick_of: dict[Task, int]) -> tuple[Task, ...]:
    """Moves the tasks that a rank can do in a tick from ``pending`` to ``tick_of``; returns them."""

    def is_ready(task: Task) -> bool:
        in_order = not found or _PHASE[found[-1].kind] < _PHASE[task.kind]
        needs = schedule.needs(task)
        return in_order and all(n in tick_of and (tick_of[n] < tick or n.stage == task.stage) for n in needs)

    found: list[Task] = []
    while pending and is_ready(pending[0]):
        tick_of[pending[0]] = tick
        found.append(pending.pop(0))
    return tuple(found)


# ---- The uniform schedule --------------------------------------------------------------------------------------------
# With p ranks, v chunks per rank and m microbatches, a rank has ``n = m v`` units of each kind. Forward unit u of rank
# r runs in tick ``u + r``; backward unit w in tick ``w + A + (p - 1 - r)`` with ``A = v p - 1``, where the last stage's
# backward runs in the tick of its forward. Every operand of a unit was computed one tick earlier by a neighbour on the
# ring. Ticks in which a rank has no unit are the bubble. An evaluation has no backward units.


@dataclass(frozen=True)
class UniformSchedule:
    """A schedule in closed form: 1f1b, gpipe, interleaved and a zero-bubble variant.

    Args:
      ranks: p.
      microbatches: m; a multiple of p if there are several chunks.
      chunks: v.
      split: weight gradients in ticks of their own, the same tick on all ranks (zero bubble).
      flush: all forwards before the first backward (gpipe).
      forward_only: no backwards.

    Raises ScheduleError if the numbers do not fit.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    split: bool = False
    flush: bool = False
    forward_only: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_groups(self.ranks, self.microbatches, self.chunks)

    @property
    def warm_up(self) -> int:
        """Ticks before the first backward; in an evaluation, before the first microbatch is through."""
        return self.span if self.flush and not self.forward_only else self.chunks * self.ranks - 1

    @property
    def span(self) -> int:
        """Ticks from the first to the last forward, and from the first to the last backward."""
        return self.microbatches * self.chunks + self.ranks - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step; the first ``warm_up`` have no backwards, the last ``warm_up`` no forwards."""
        return self.span if self.forward_only else self.warm_up + self.span

    def forward(self, tick: int, rank: int) -> Task | None:
        """Returns the forward of a rank in a tick."""
        return self._task("F", tick - rank, rank)

    def backward(self, tick: int, rank: int) -> Task | None:
        """Returns the backward, or input gradient, of a rank in a tick."""
        kind, unit = "I" if self.split else "B", tick - self.warm_up - (self.ranks - 1 - rank)
        return None if self.forward_only else self._task(kind, unit, rank)

    def weights(self, tick: int, rank: int) -> Task | None:
        """Returns the weight gradient of a rank in a tick, if backwards are split."""
        if not self.split or self.forward_only:
            return None
        return self._task("W", tick - self.warm_up - (self.ranks - 1), rank)

    @cached_property
    def table(self) -> LockstepTable:
        """The timetable."""
        kinds = self.forward, self.backward, self.weights

        def tasks(tick: int, rank: int) -> tuple[Task, ...]:
            return tuple(task for kind in kinds if (task := kind(tick, rank)) is not None)

        return LockstepTable(tuple(tuple(tasks(t, r) for r in range(self.ranks)) for t in range(self.ticks)))

    @property
    def schedule(self) -> Schedule:
        """The tasks of every rank, in order."""
        return self.table.schedule

    def _task(self, kind: str, unit: int, rank: int) -> Task | None:
        p, v = self.ranks, self.chunks
        if not 0 <= unit < self.microbatches * v:
            return None
        chunk = unit // p % v
        stage = (chunk if kind == "F" else v - 1 - chunk) * p + rank
        return Task(stage, kind, unit // (p * v) * p + unit % p)


# ---- Buffer slots ----------------------------------------------------------------------------------------------------
# Live ranges are counted in half ticks: tick t begins at 2 t, and what is sent forward in it arrives at 2 t + 1. Every
# device has the same buffers, so the fullest rank determines the number of slots.

Unit = tuple[int, int]  # stage, microbatch
LiveRange = tuple[int, int]  # first and last half tick


@dataclass(frozen=True)
class Slots:
    """The slots of one buffer.

    Args:
      at: per stage and microbatch, the slot.
      used: per rank, how many slots it fills.
      outlives_tick: whether any entry is live longer than the tick in which it is used.
    """

    at: Mapping[Unit, int]
    used: tuple[int, ...]
    outlives_tick: bool

    @property
    def count(self) -> int:
        """Slots of every device; as a slot number, one past the last."""
        return max(self.used)


@dataclass(frozen=True)
class BufferSlots:
    """The slots of all buffers.

    Args:
      inputs: stage inputs, from their arrival (or the start of the microbatch) to the stage's backward if that
        recomputes the stage, else to its forward.
      activations: what backwards use of their forwards if stages are not recomputed, from one to the other.
      gradients: gradients of what a stage sent, from their arrival to the stage's backward.
      residuals: what weight gradients use of the input gradients, from one to the other.
    """

    inputs: Slots
    activations: Slots
    gradients: Slots
    residuals: Slots

    @property
    def stash(self) -> Slots:
        """The buffer between forwards and backwards."""
        return self.activations if self.activations.count else self.inputs


def make_buffer_slots(table: LockstepTable, recompute: bool = True) -> BufferSlots:
    """Returns as few slots as the live ranges of a timetable allow.

    Args:
      recompute: whether backwards recompute their stages from the stage inputs.
    """
    schedule, tick_of = table.schedule, table.tick_of
    units = list(product(range(schedule.stages), range(schedule.microbatches)))
    inputs, activations, gradients, residuals = (dict[Unit, LiveRange]() for _ in range(4))
    for stage, m in units:
        forward, backward = tick_of[Task(stage, "F", m)], table.backward_tick(stage, m)
        arrival = 2 * tick_of[Task(stage - 1, "F", m)] + 1 if stage else 2 * forward
        inputs[stage, m] = arrival, 2 * (backward if recompute else forward)
        if not recompute and not schedule.forward_only:
            activations[stage, m] = 2 * forward, 2 * backward
        if stage < schedule.stages - 1 and not schedule.forward_only:
            gradients[stage, m] = 2 * table.backward_tick(stage + 1, m) + 2, 2 * backward
        if table.split:
            residuals[stage, m] = 2 * backward, 2 * tick_of[Task(stage, "W", m)]
    return BufferSlots(*(_allocate(table, ranges) for ranges in (inputs, activations, gradients, residuals)))


def _allocate(table: LockstepTable, ranges: Mapping[Unit, LiveRange]) -> Slots:
    """Gives every live range of a rank, in the order in which they begin, the first slot that is free (linear scan)."""
    at: dict[Unit, int] = {}
    used = []
    for stages in table.placement:
        ends: list[int] = []
        for (begin, end), unit in sorted((span, unit) for unit, span in ranges.items() if unit[0] in stages):
            slot = next((i for i, last in enumerate(ends) if last < begin), len(ends))
            ends[slot : slot + 1] = [end]
            at[unit] = slot
        used.append(len(ends))
    return Slots(at, tuple(used), any(begin < end for begin, end in ranges.values()))
