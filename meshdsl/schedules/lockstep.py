"""Where ranks keep what waits: slots, each for one stage's work on one microbatch at a time.

Four things wait, each from when it is there to when it is last read:

    inputs      of stages: from their arrival (or start) to the stage's backward, which runs its layers again
    results     where nothing is run again, what backwards read of forwards instead: from one to the other; inputs then
                wait for the forward alone
    gradients   of what stages handed on: from their arrival to the stage's backward
    cuts        what the second half of a backward reads of the first

Times are counted in halves of ticks: a tick t begins at 2 t, and what is handed on forward arrives at its end, 2 t + 1.
As every device has the same room, the fullest rank says how many slots there are.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

from meshdsl.schedules.schedule import Schedule, Task, check_groups

# ---- Table -----------------------------------------------------------------------------------------------------------
# Schedules in lockstep: what every rank does in every tick.
#
# A tick is a forward ``F``, then a backward ``B`` (or its first half ``I``, the gradient of the stage's input), then
# the weights' gradient ``W``. Of each, a rank does one at most. What a stage hands on in a tick is there in the next.
# All ranks do what any of them does, on whatever they have, so a tick takes as long as the kinds that are in it.


_PHASE = {"F": 0, "B": 1, "I": 1, "W": 2}
_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1, "H": 0}
Row = tuple[tuple[Task, ...], ...]


@dataclass(frozen=True)
class LockstepTable:
    """Per tick and rank, what is done."""

    ticks: tuple[Row, ...]

    @cached_property
    def schedule(self) -> Schedule:
        """The same as lists of tasks."""
        return Schedule(tuple(tuple(chain.from_iterable(tasks)) for tasks in zip(*self.ticks, strict=True)))

    @cached_property
    def when(self) -> dict[Task, int]:
        """The tick of every task."""
        return {task: t for t, tick in enumerate(self.ticks) for tasks in tick for task in tasks}

    @cached_property
    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the stages that live on it."""
        homes = self.schedule.home
        return tuple(tuple(s for s in sorted(homes) if homes[s] == r) for r in range(len(self.ticks[0])))

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.schedule.chunks

    @property
    def split(self) -> bool:
        """Whether weight gradients are done on their own."""
        return bool(self.schedule.split)

    @property
    def bubble(self) -> float:
        """The part of the step in which the busiest rank does nothing, if all kinds take the same and B takes two."""
        took = sum(_UNITS[kind] for t in range(len(self.ticks)) for kind in self.kinds(t))
        busy = max(sum(_UNITS[task.kind] for task in tasks) for tasks in self.schedule.ranks)
        return (took - busy) / took

    def task(self, tick: int, rank: int, kinds: str) -> Task | None:
        """What a rank does of some kinds in a tick."""
        return next((task for task in self.ticks[tick][rank] if task.kind in kinds), None)

    def back(self, stage: int, microbatch: int) -> int:
        """The tick in which a stage goes backward, or forward if nothing goes backward."""
        return self.when[Task(stage, self.turns, microbatch)]

    @property
    def turns(self) -> str:
        """The kind of task after whose forward part the last stage is through with a microbatch."""
        return "F" if self.schedule.forward_only else "I" if self.split else "B"

    def kinds(self, tick: int) -> str:
        """Of ``FBIW``, what some rank does in a tick, and ``H`` where the last stage is through with a microbatch."""
        tasks = set(chain.from_iterable(self.ticks[tick]))
        done = {task.kind for task in tasks}
        head = any(task.stage == self.schedule.stages - 1 and task.kind == self.turns for task in tasks)
        return "".join(kind for kind in "FBIW" if kind in done) + "H" * head


def lockstep(schedule: Schedule) -> LockstepTable:
    """A schedule in as few ticks as its order takes; backwards that are done at once are halved if others are."""
    whole = not schedule.split
    todo = [[task for one in tasks for task in _parts(one, whole)] for tasks in schedule.ranks]
    halved = Schedule(tuple(map(tuple, todo)))
    when: dict[Task, int] = {}
    ticks: list[Row] = []
    while any(todo):
        ticks.append(tuple(_next(halved, tasks, len(ticks), when) for tasks in todo))
    return LockstepTable(tuple(ticks))


def _parts(task: Task, whole: bool) -> list[Task]:
    kinds = task.kind if whole or task.kind != "B" else "IW"
    return [Task(task.stage, kind, task.microbatch) for kind in kinds]


def _next(schedule: Schedule, tasks: list[Task], tick: int, when: dict[Task, int]) -> tuple[Task, ...]:
    """What a rank does in a tick, taken off its list."""
    found: list[Task] = []
    while tasks and _fits(schedule, found, tasks[0], tick, when):
        when[tasks[0]] = tick
        found.append(tasks.pop(0))
    return tuple(found)


def _fits(schedule: Schedule, found: Sequence[Task], task: Task, tick: int, when: dict[Task, int]) -> bool:
    after = not found or _PHASE[found[-1].kind] < _PHASE[task.kind]
    needs = schedule.needs(task)
    return after and all(n in when and (when[n] < tick or n.stage == task.stage) for n in needs)


# ---- Slots -----------------------------------------------------------------------------------------------------------


Unit = tuple[int, int]  # stage, microbatch
Span = tuple[int, int]  # first and last half of a tick


@dataclass(frozen=True)
class Slots:
    """Slots of one kind.

    Args:
      at: per stage and microbatch, its slot.
      used: per rank, how many slots it fills.
      waits: whether anything is there longer than for the tick in which it is read.
    """

    at: Mapping[Unit, int]
    used: tuple[int, ...]
    waits: bool

    @property
    def count(self) -> int:
        """Slots of every device; also the number of a slot that is nowhere."""
        return max(self.used)


@dataclass(frozen=True)
class BufferSlots:
    """The slots of a table."""

    inputs: Slots
    results: Slots
    gradients: Slots
    cuts: Slots

    @property
    def stash(self) -> Slots:
        """What is kept from a forward to its backward."""
        return self.results if self.results.count else self.inputs


def make_buffer_slots(table: LockstepTable, again: bool = True) -> BufferSlots:
    """As few slots as a table can do with.

    Args:
      again: backwards run their layers forward again.
    """
    units = list(product(range(table.schedule.stages), range(table.schedule.microbatches)))
    return BufferSlots(
        _slots(table, {unit: _input(table, *unit, again) for unit in units}),
        _slots(table, {unit: _result(table, *unit) for unit in units if not again and not table.schedule.forward_only}),
        _slots(table, {unit: _gradient(table, *unit) for unit in units if _returns(table, unit[0])}),
        _slots(table, {unit: _cut(table, *unit) for unit in units if table.split}),
    )


def _input(table: LockstepTable, stage: int, microbatch: int, again: bool) -> Span:
    begin = 2 * table.when[Task(stage - 1, "F", microbatch)] + 1 if stage else 2 * table.when[Task(0, "F", microbatch)]
    return begin, 2 * (table.back(stage, microbatch) if again else table.when[Task(stage, "F", microbatch)])


def _result(table: LockstepTable, stage: int, microbatch: int) -> Span:
    return 2 * table.when[Task(stage, "F", microbatch)], 2 * table.back(stage, microbatch)


def _gradient(table: LockstepTable, stage: int, microbatch: int) -> Span:
    return 2 * table.back(stage + 1, microbatch) + 2, 2 * table.back(stage, microbatch)


def _returns(table: LockstepTable, stage: int) -> bool:
    return stage < table.schedule.stages - 1 and not table.schedule.forward_only


def _cut(table: LockstepTable, stage: int, microbatch: int) -> Span:
    return 2 * table.back(stage, microbatch), 2 * table.when[Task(stage, "W", microbatch)]


def _slots(table: LockstepTable, spans: Mapping[Unit, Span]) -> Slots:
    at: dict[Unit, int] = {}
    used = []
    for stages in table.placement:
        mine = sorted((span, unit) for unit, span in spans.items() if unit[0] in stages)
        used.append(_fill(mine, at))
    return Slots(at, tuple(used), any(begin < end for begin, end in spans.values()))


def _fill(spans: Iterable[tuple[Span, Unit]], at: dict[Unit, int]) -> int:
    """Give each, in the order in which they begin, the first slot that is free; how many that takes."""
    ends: list[int] = []
    for (begin, end), unit in spans:
        slot = next((i for i, last in enumerate(ends) if last < begin), len(ends))
        ends[slot : slot + 1] = [end]
        at[unit] = slot
    return len(ends)


# ---- Uniform ---------------------------------------------------------------------------------------------------------
# The uniform schedule: in every tick all ranks do the same operations, so that nothing in the program diverges.
#
# With p ranks, v chunks of stages per rank and m microbatches, a rank has ``n = m v`` units of each kind. Forward unit
# u of rank r runs in tick ``u + r``; backward unit w in tick ``w + A + (p - 1 - r)`` with ``A = v p - 1``, where the
# last stage's backward runs in the tick of its forward. Whatever a unit needs was made one tick earlier by the
# neighbour on the ring. Ticks in which a rank has no unit are idle, or masked. An evaluation has no backward units.


@dataclass(frozen=True)
class Uniform:
    """Ticks of a pipeline in which every rank does the same.

    Args:
      ranks: of the pipeline, p.
      microbatches: per step, m; a multiple of p if there are several chunks.
      chunks: stages per rank, v.
      split: weight gradients in ticks of their own, the same tick on all ranks (zero-bubble).
      flush: all forwards before the first backward (gpipe).
      forward_only: there are no backwards.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    split: bool = False
    flush: bool = False
    forward_only: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that have no such schedule."""
        check_groups(self.ranks, self.microbatches, self.chunks)

    @property
    def ahead(self) -> int:
        """Ticks before the first backward, or before the first microbatch is through."""
        return self.span if self.flush and not self.forward_only else self.chunks * self.ranks - 1

    @property
    def span(self) -> int:
        """Ticks from the first to the last forward, and as many from the first to the last backward."""
        return self.microbatches * self.chunks + self.ranks - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step; the first ``ahead`` have no backwards, the last ``ahead`` no forwards."""
        return self.span if self.forward_only else self.ahead + self.span

    def forward(self, tick: int, rank: int) -> Task | None:
        """The forward of a rank in a tick."""
        return self._task("F", tick - rank, rank)

    def backward(self, tick: int, rank: int) -> Task | None:
        """The backward of a rank in a tick, or its first part."""
        kind, unit = "I" if self.split else "B", tick - self.ahead - (self.ranks - 1 - rank)
        return None if self.forward_only else self._task(kind, unit, rank)

    def weights(self, tick: int, rank: int) -> Task | None:
        """The weight gradient of a rank in a tick, if that is a part of its own."""
        mine = self.split and not self.forward_only
        return self._task("W", tick - self.ahead - (self.ranks - 1), rank) if mine else None

    @cached_property
    def table(self) -> LockstepTable:
        """What every rank does in every tick."""
        return LockstepTable(
            tuple(tuple(self._tasks(t, rank) for rank in range(self.ranks)) for t in range(self.ticks))
        )

    @property
    def schedule(self) -> Schedule:
        """The same as lists of tasks."""
        return self.table.schedule

    def _tasks(self, tick: int, rank: int) -> tuple[Task, ...]:
        found = self.forward(tick, rank), self.backward(tick, rank), self.weights(tick, rank)
        return tuple(task for task in found if task is not None)

    def _task(self, kind: str, unit: int, rank: int) -> Task | None:
        p, v = self.ranks, self.chunks
        if not 0 <= unit < self.microbatches * v:
            return None
        chunk = unit // p % v
        stage = (chunk if kind == "F" else v - 1 - chunk) * p + rank
        return Task(stage, kind, unit // (p * v) * p + unit % p)
