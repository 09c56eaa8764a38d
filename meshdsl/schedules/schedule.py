"""Schedules: the tasks of every rank of a pipeline, in order, and their text.

A *task* is the work of one kind of a stage on a microbatch: forward ``F``, backward ``B``, or a backward in two parts,
the gradient of the stage's input ``I`` and of its weights ``W``. Stages are numbered through the model; each lives on
one rank. The text is that of torch.distributed.pipelining, one line per rank and cells as stage, kind, microbatch:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

Cells about communication and sharding (``1RECV_F0``, ``0UNSHARD``) are ignored, since both are planned here; a pair
that overlaps, ``(0F1;0B0)OVERLAP_F_B``, is read as its two tasks.

``make_schedule`` builds the schedules of the literature.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product, zip_longest
from pathlib import Path

from meshdsl.errors import ScheduleError, faults, nearest, shortened
from meshdsl.util.files import read_regular

# ---- Tasks and schedules ---------------------------------------------------------------------------------------------

MOST_BYTES = 10_000_000  # of a file
_TASK = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_IGNORED_CELL = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_OVERLAPPED_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")


@dataclass(frozen=True, order=True)
class Task:
    """The work of one kind (``F``, ``B``, ``I`` or ``W``) of a stage on a microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """Returns the task written as ``2F0``; raises ScheduleError if the text is none."""
        found = _TASK.fullmatch(text.strip())
        if not found:
            raise ScheduleError(f"{text.strip()!r} is not a task: stage, F B I or W, microbatch, as in 2F0")
        return cls(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """The order in which every rank of a pipeline does its tasks.

    A schedule is checked when it is made: every stage has a forward and a backward (or its two halves) of every
    microbatch, and lives on one rank; and the ranks do not deadlock if each does its tasks in order. Pass one as
    ``md.Pipeline(microbatches, schedule)``.

    Args:
      ranks: per rank, its tasks in order.

    Raises:
      ScheduleError: listing missing and repeated tasks, stages on two ranks, and deadlocks.

    Example:
      >>> schedule = md.Schedule.load("schedule.csv")
      >>> pipeline = md.Pipeline(schedule.microbatches, schedule)
    """

    ranks: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        """Check that the schedule can run."""
        rows = list(_count_faults(self)) or list(_deadlocks(self))
        if rows:
            raise ScheduleError(faults("this schedule cannot run:", shortened(rows)))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Returns the schedule written with one line per rank, cells separated by commas; empty cells are ignored."""
        ranks = []
        for line in text.strip().splitlines():
            tasks: list[Task] = []
            for cell in map(str.strip, line.split(",")):
                pair = _OVERLAPPED_PAIR.fullmatch(cell)
                if pair:
                    tasks += map(Task.parse, pair.groups())
                elif cell and not _IGNORED_CELL.fullmatch(cell):
                    tasks.append(Task.parse(cell))
            ranks.append(tuple(tasks))
        return cls(tuple(ranks))

    @classmethod
    def load(cls, path: str | Path) -> "Schedule":
        """Returns the schedule in a file; raises ScheduleError if it cannot be read, or cannot run."""
        try:
            return cls.parse(read_regular(path, MOST_BYTES).decode())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ScheduleError(f"cannot read the schedule {str(path)!r}: {reason}") from error

    def save(self, path: str | Path) -> None:
        """Write the text to a file; raises ScheduleError if it cannot be written."""
        try:
            Path(path).write_text(f"{self}\n")
        except OSError as error:
            raise ScheduleError(f"cannot write the schedule {str(path)!r}: {error}") from error

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, tasks)) for tasks in self.ranks)

    @cached_property
    def home(self) -> dict[int, int]:
        """Per stage, the rank that it lives on."""
        return {task.stage: rank for rank, tasks in enumerate(self.ranks) for task in tasks}

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.stages // len(self.ranks)

    @property
    def forwards(self) -> "Schedule":
        """The schedule without its backwards, for an evaluation."""
        return Schedule(tuple(tuple(task for task in tasks if task.kind == "F") for tasks in self.ranks))

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return len(self.home)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return len({task.microbatch for tasks in self.ranks for task in tasks})

    @cached_property
    def forward_only(self) -> bool:
        """Whether there are no backwards, as in an evaluation."""
        return all(task.kind == "F" for tasks in self.ranks for task in tasks)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward that is split into two tasks."""
        return frozenset((t.stage, t.microbatch) for tasks in self.ranks for t in tasks if t.kind == "I")

    def needs(self, task: Task) -> Iterator[Task]:
        """Yields the tasks, on whatever rank, that a task directly depends on."""
        stage, m = task.stage, task.microbatch
        if task.kind == "F" and stage:
            yield Task(stage - 1, "F", m)
        if task.kind == "W":
            yield Task(stage, "I", m)
        if task.kind in "BI":
            yield Task(stage, "F", m)
            if stage + 1 < self.stages:
                yield Task(stage + 1, "I" if (stage + 1, m) in self.split else "B", m)

    def stash(self, rank: int) -> int:
        """Returns the most stage inputs, by stage and microbatch, that a rank stashes for its backwards at a time."""
        if self.forward_only:
            return 0
        live, most = 0, 0
        for task in self.ranks[rank]:
            live += (task.kind == "F") - (task.kind in "BW")
            most = max(most, live)
        return most


# ---- Faults ----------------------------------------------------------------------------------------------------------


def check_groups(ranks: int, microbatches: int, chunks: int) -> None:
    """Raise ScheduleError if several chunks per rank meet microbatches that do not come in groups of ``ranks``."""
    if chunks > 1 and microbatches % ranks:
        groups = microbatches // ranks
        near = sorted({max(1, groups) * ranks, (groups + 1) * ranks})
        raise ScheduleError(
            f"{chunks} chunks per rank need microbatches in groups of {ranks}, the number of ranks; "
            f"{microbatches} do not divide\n"
            f"use {' or '.join(map(str, near))} microbatches, or 1 chunk"
        )


def _count_faults(schedule: Schedule) -> Iterator[str]:
    """Yields missing and repeated tasks, and stages on several ranks."""
    counts = Counter(task for tasks in schedule.ranks for task in tasks)
    if not counts:
        yield "it has no tasks"
        return
    if far := [task for task in counts if max(task.stage, task.microbatch) >= len(counts)]:
        yield f"{far[0]} is one of {len(counts)} tasks: stages and microbatches are numbered from 0"
        return
    for task, count in sorted(counts.items()):
        if count > 1:
            yield f"{task} is done {count} times"
    stages = range(max(task.stage for task in counts) + 1)
    for stage in stages:
        homes = [rank for rank, tasks in enumerate(schedule.ranks) if any(task.stage == stage for task in tasks)]
        if len(homes) > 1:
            yield f"stage {stage} is on ranks {' and '.join(map(str, homes))}: a stage lives on one"
    stages_of_rank = [len({task.stage for task in tasks}) for tasks in schedule.ranks]
    if len(set(stages_of_rank)) > 1:
        listed = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(stages_of_rank))
        yield f"all ranks need the same number of stages, but {listed}"
    allowed = ("F",) if schedule.forward_only else ("FB", "FIW")
    for stage, m in product(stages, range(max(task.microbatch for task in counts) + 1)):
        kinds = "".join(kind for kind in "FBIW" if counts[Task(stage, kind, m)])
        if kinds not in allowed:
            yield f"stage {stage}, microbatch {m}: {kinds or 'nothing'}; each needs F and B, or F, I and W"


def _deadlocks(schedule: Schedule) -> Iterator[str]:
    """Yields what every rank waits for once none can go on, each doing its tasks in order."""
    done: set[Task] = set()
    at = [0] * len(schedule.ranks)
    progress = True
    while progress:
        progress = False
        for rank, tasks in enumerate(schedule.ranks):
            while at[rank] < len(tasks) and done.issuperset(schedule.needs(tasks[at[rank]])):
                done.add(tasks[at[rank]])
                at[rank] += 1
                progress = True
    for rank, tasks in enumerate(schedule.ranks):
        if at[rank] < len(tasks):
            task = tasks[at[rank]]
            missing = next(need for need in schedule.needs(task) if need not in done)
            where = schedule.home[missing.stage]
            yield f"rank {rank} waits at {task} for {missing}, which rank {where} does not reach: a deadlock"


# ---- Schedules of the literature -------------------------------------------------------------------------------------
# p ranks, v chunks per rank (stage ``g * p + r`` is chunk g of rank r), m microbatches.
#
#     gpipe        all forwards, then all backwards (Huang et al. 2019)
#     1f1b         as few microbatches in flight as keep all ranks busy (PipeDream-flush; Narayanan et al. 2021)
#     interleaved  1f1b over v chunks per rank, in groups of p microbatches (Megatron-LM; Narayanan et al. 2021)
#     zb-h1        weight gradients fill the bubble, with no more in flight than 1f1b's p (Qi et al. 2023)
#     zb-v         the same with stages r and 2 p - 1 - r on rank r: first and last share a rank (Qi et al. 2024)


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Returns a schedule of the literature as a table, to be read, edited or passed to ``md.Pipeline``.

    Args:
      name: ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1`` or ``zb-v``.
      ranks: ranks of the pipeline.
      microbatches: microbatches per step.
      chunks: stages per rank; more than one for ``interleaved`` only.

    Raises:
      ScheduleError: with the nearest name, or the numbers that would work.

    Example:
      >>> print(md.make_schedule("1f1b", 2, 2))
      0F0,0F1,0B0,0B1
      1F0,1B0,1F1,1B1
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule {name!r}{nearest(name, SCHEDULES)}")
    if chunks > 1 and name != "interleaved":
        raise ScheduleError(f"schedule {name!r} has one chunk per rank, not {chunks}; 'interleaved' takes several")
    check_groups(ranks, microbatches, chunks)
    return SCHEDULES[name](ranks, microbatches, chunks)


def _gpipe(p: int, m: int, v: int) -> Schedule:
    return Schedule(tuple(tuple(Task(r, kind, i) for kind in "FB" for i in range(m)) for r in range(p)))


def _interleaved(p: int, m: int, v: int) -> Schedule:
    """Returns Megatron's interleaved schedule; with one chunk it is 1f1b."""
    return Schedule(tuple(_interleaved_rank(r, p, m, v) for r in range(p)))


def _interleaved_rank(r: int, p: int, m: int, v: int) -> tuple[Task, ...]:
    group = p if v > 1 else m

    def unit(u: int, kind: str) -> Task:
        chunk, microbatch = (u // group) % v, u // (group * v) * group + u % group
        return Task((chunk if kind == "F" else v - 1 - chunk) * p + r, kind, microbatch)

    warm_up = min(m * v, p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * p)
    forwards, backwards = ([unit(u, kind) for u in range(m * v)] for kind in "FB")
    steady = zip_longest(forwards[warm_up:], backwards)
    return (*forwards[:warm_up], *(task for task in chain.from_iterable(steady) if task))


def _zb_h1(p: int, m: int, v: int) -> Schedule:
    return _greedy([[r] for r in range(p)], m, p)


def _zb_v(p: int, m: int, v: int) -> Schedule:
    return _greedy([[r, 2 * p - 1 - r] for r in range(p)], m, 2 * p)


def _greedy(placement: Sequence[Sequence[int]], m: int, stash: int) -> Schedule:
    """Returns the schedule in which every rank does the first task that it can: input gradients, forwards, weights.

    Of tasks of one kind, those of late stages come first. Every task takes one tick.

    Args:
      placement: per rank, its stages.
      stash: stage inputs that a rank may keep; a forward leaves room for one in each of its later stages.
    """
    tasks: list[list[Task]] = [[] for _ in placement]
    done: set[Task] = set()
    stages = sum(map(len, placement))
    while len(done) < 3 * m * stages:
        found = [_first_ready(mine, stages, stash, done, m) for mine in placement]
        for own, task in zip(tasks, found, strict=True):
            own += [task] if task else []
        done.update(task for task in found if task)
    return Schedule(tuple(map(tuple, tasks)))


def _first_ready(mine: Sequence[int], stages: int, stash: int, done: set[Task], m: int) -> Task | None:
    """Returns the task that a rank with these stages does next; None if it has to wait."""
    count = {(s, kind): sum(Task(s, kind, i) in done for i in range(m)) for s in mine for kind in "FIW"}
    stashed = sum(count[s, "F"] - count[s, "W"] for s in mine)
    for kind, s in product("IFW", sorted(mine, reverse=True)):
        i, later_stages = count[s, kind], sum(other >= s for other in mine)
        full = kind == "F" and stashed + later_stages > stash
        needs = {"F": [(s - 1, "F")] if s else [], "W": [(s, "I")], "I": [(s, "F"), (s + 1, "I")]}[kind]
        if i < m and not full and all(Task(stage, each, i) in done for stage, each in needs if stage < stages):
            return Task(s, kind, i)
    return None


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _interleaved,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zb-v": _zb_v,
}
