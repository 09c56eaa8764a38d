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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from meshdsl.pipeline.schedule import Task
from meshdsl.pipeline.table import Table

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
class Rooms:
    """The slots of a table."""

    inputs: Slots
    results: Slots
    gradients: Slots
    cuts: Slots

    @property
    def stash(self) -> Slots:
        """What is kept from a forward to its backward."""
        return self.results if self.results.count else self.inputs


def make_rooms(table: Table, again: bool = True) -> Rooms:
    """As few slots as a table can do with.

    Args:
      again: backwards run their layers forward again.
    """
    units = list(product(range(table.schedule.stages), range(table.schedule.microbatches)))
    return Rooms(
        _slots(table, {unit: _input(table, *unit, again) for unit in units}),
        _slots(table, {unit: _result(table, *unit) for unit in units if not again and not table.schedule.forward_only}),
        _slots(table, {unit: _gradient(table, *unit) for unit in units if _returns(table, unit[0])}),
        _slots(table, {unit: _cut(table, *unit) for unit in units if table.split}),
    )


def _input(table: Table, stage: int, microbatch: int, again: bool) -> Span:
    begin = 2 * table.when[Task(stage - 1, "F", microbatch)] + 1 if stage else 2 * table.when[Task(0, "F", microbatch)]
    return begin, 2 * (table.back(stage, microbatch) if again else table.when[Task(stage, "F", microbatch)])


def _result(table: Table, stage: int, microbatch: int) -> Span:
    return 2 * table.when[Task(stage, "F", microbatch)], 2 * table.back(stage, microbatch)


def _gradient(table: Table, stage: int, microbatch: int) -> Span:
    return 2 * table.back(stage + 1, microbatch) + 2, 2 * table.back(stage, microbatch)


def _returns(table: Table, stage: int) -> bool:
    return stage < table.schedule.stages - 1 and not table.schedule.forward_only


def _cut(table: Table, stage: int, microbatch: int) -> Span:
    return 2 * table.back(stage, microbatch), 2 * table.when[Task(stage, "W", microbatch)]


def _slots(table: Table, spans: Mapping[Unit, Span]) -> Slots:
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
