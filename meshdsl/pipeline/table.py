"""Schedules in lockstep: what every rank does in every tick.

A tick is a forward ``F``, then a backward ``B`` (or its first half ``I``, the gradient of the stage's input), then the
weights' gradient ``W``. Of each, a rank does one at most. What a stage hands on in a tick is there in the next. All
ranks do what any of them does, on whatever they have, so a tick takes as long as the kinds that are in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from meshdsl.pipeline.schedule import Schedule, Task

_PHASE = {"F": 0, "B": 1, "I": 1, "W": 2}
_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1, "H": 0}

Row = tuple[tuple[Task, ...], ...]


@dataclass(frozen=True)
class Table:
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


def lockstep(schedule: Schedule) -> Table:
    """A schedule in as few ticks as its order takes; backwards that are done at once are halved if others are."""
    whole = not schedule.split
    todo = [[task for one in tasks for task in _parts(one, whole)] for tasks in schedule.ranks]
    halved = Schedule(tuple(map(tuple, todo)))
    when: dict[Task, int] = {}
    ticks: list[Row] = []
    while any(todo):
        ticks.append(tuple(_next(halved, tasks, len(ticks), when) for tasks in todo))
    return Table(tuple(ticks))


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
