"""Schedules as data: what every rank of the pipeline does, in which order.

A task is a stage's work on one microbatch: forward ``F``, backward ``B``, or backward in two parts, the gradient of
the stage's input ``I`` and of its weights ``W``. Stages are numbered through the model, and each lives on one rank.
A schedule has a list of tasks per rank. Its text is that of torch.distributed.pipelining, one line per rank:

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

What such a text says of sending, receiving and sharding (``1RECV_F0``, ``0UNSHARD``) is passed over, as that is planned
here, and of a pair that overlaps, ``(0F1;0B0)OVERLAP_F_B``, both are taken.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product, zip_longest
from pathlib import Path

from meshdsl.errors import ScheduleError, faults, nearest, shortened

# ---- Schedule --------------------------------------------------------------------------------------------------------


_TASK = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_MOVES = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")
_PAIR = re.compile(r"\((.+);(.+)\)OVERLAP_F_B")


@dataclass(frozen=True, order=True)
class Task:
    """A stage's work of one kind on one microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Task":
        """The task written as ``2F0``; ScheduleError if it is none."""
        found = _TASK.fullmatch(text.strip())
        if not found:
            raise ScheduleError(f"{text.strip()!r} is no task: stage, F B I or W, microbatch, as in 2F0")
        return cls(int(found[1]), found[2], int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """The tasks of every rank, in order; checked when made.

    Raises ScheduleError that lists tasks that are missing or doubled, stages on two ranks, and what waits for ever.
    """

    ranks: tuple[tuple[Task, ...], ...]

    def __post_init__(self) -> None:
        """Refuse what cannot run."""
        rows = list(_miscounted(self)) or list(_deadlocks(self))
        if rows:
            raise ScheduleError(faults("a schedule that cannot run:", shortened(rows)))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """The schedule written with one line per rank; empty cells are idle and mean nothing."""
        lines = text.strip().splitlines()
        return cls(tuple(tuple(task for cell in line.split(",") for task in _tasks(cell.strip())) for line in lines))

    @classmethod
    def load(cls, path: str | Path) -> "Schedule":
        """The schedule in a file; ScheduleError if there is none, or if it cannot run."""
        try:
            return cls.parse(Path(path).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"cannot read the schedule {str(path)!r}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write its text to a file; ScheduleError if that cannot be."""
        try:
            Path(path).write_text(f"{self}\n")
        except OSError as error:
            raise ScheduleError(f"cannot write the schedule {str(path)!r}: {error}") from error

    def __str__(self) -> str:
        return "\n".join(",".join(map(str, tasks)) for tasks in self.ranks)

    @cached_property
    def home(self) -> dict[int, int]:
        """Stage -> the rank that it lives on."""
        return {task.stage: rank for rank, tasks in enumerate(self.ranks) for task in tasks}

    @property
    def chunks(self) -> int:
        """Stages per rank."""
        return self.stages // len(self.ranks)

    @property
    def forwards(self) -> "Schedule":
        """Without what goes backward."""
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
        """Whether nothing goes backward, as in an evaluation."""
        return all(task.kind == "F" for tasks in self.ranks for task in tasks)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward that is done in two parts."""
        return frozenset((t.stage, t.microbatch) for tasks in self.ranks for t in tasks if t.kind == "I")

    def needs(self, task: Task) -> Iterator[Task]:
        """What has to be done before a task, wherever it is done."""
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
        """The most stage inputs, one per stage and microbatch, that a rank keeps for its backwards at any time."""
        if self.forward_only:
            return 0
        alive, most = 0, 0
        for task in self.ranks[rank]:
            alive += (task.kind == "F") - (task.kind in "BW")
            most = max(most, alive)
        return most


def _tasks(cell: str) -> Iterator[Task]:
    pair = _PAIR.fullmatch(cell)
    if pair:
        yield from (Task.parse(text) for text in pair.groups())
    elif cell and not _MOVES.fullmatch(cell):
        yield Task.parse(cell)


def check_groups(ranks: int, microbatches: int, chunks: int) -> None:
    """Several chunks per rank take microbatches in groups of as many as there are ranks; ScheduleError otherwise."""
    if chunks > 1 and microbatches % ranks:
        groups = microbatches // ranks
        near = sorted({max(1, groups) * ranks, (groups + 1) * ranks})
        raise ScheduleError(
            f"{chunks} chunks per rank need microbatches in groups of {ranks}, the ranks, and "
            f"{microbatches} do not divide\n"
            f"use {' or '.join(map(str, near))} microbatches, or 1 chunk"
        )


def _miscounted(schedule: Schedule) -> Iterator[str]:
    """Tasks that are missing, doubled or in two places."""
    counts = Counter(task for tasks in schedule.ranks for task in tasks)
    if not counts:
        yield "it has no tasks"
        return
    for task, count in sorted(counts.items()):
        if count > 1:
            yield f"{task} is done {count} times"
    stages = range(max(task.stage for task in counts) + 1)
    for stage in stages:
        homes = [rank for rank, tasks in enumerate(schedule.ranks) if any(task.stage == stage for task in tasks)]
        if len(homes) > 1:
            yield f"stage {stage} is on ranks {' and '.join(map(str, homes))}: a stage lives on one"
    lives = [len({task.stage for task in tasks}) for tasks in schedule.ranks]
    if len(set(lives)) > 1:
        said = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(lives))
        yield f"every rank takes as many stages, and {said}"
    allowed = ("F",) if schedule.forward_only else ("FB", "FIW")
    for stage, m in product(stages, range(max(task.microbatch for task in counts) + 1)):
        kinds = "".join(kind for kind in "FBIW" if counts[Task(stage, kind, m)])
        if kinds not in allowed:
            yield f"stage {stage}, microbatch {m}: {kinds or 'nothing'}; each needs F and B, or F, I and W"


def _deadlocks(schedule: Schedule) -> Iterator[str]:
    """What the ranks wait for when nothing can go on, each doing its tasks in order."""
    done: set[Task] = set()
    at = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, tasks in enumerate(schedule.ranks):
            while at[rank] < len(tasks) and done.issuperset(schedule.needs(tasks[at[rank]])):
                done.add(tasks[at[rank]])
                at[rank] += 1
                moved = True
    for rank, tasks in enumerate(schedule.ranks):
        if at[rank] < len(tasks):
            task = tasks[at[rank]]
            missing = next(need for need in schedule.needs(task) if need not in done)
            where = schedule.home[missing.stage]
            yield f"rank {rank} waits at {task} for {missing}, which rank {where} does not reach: a deadlock"


# ---- Generators ------------------------------------------------------------------------------------------------------
# The schedules of the literature, as lists of tasks.
#
# p ranks, v chunks of stages per rank (stage ``g * p + r`` is chunk g of rank r), m microbatches.
#
#     gpipe        all forwards, then all backwards (Huang et al. 2019)
#     1f1b         as few microbatches in flight as keep all ranks busy (PipeDream-flush; Narayanan et al. 2021)
#     interleaved  1f1b over v chunks per rank, in groups of p microbatches (Megatron-LM; Narayanan et al. 2021)
#     zb-h1        weight gradients fill the bubbles, and no more is in flight than 1f1b's p (Qi et al. 2023)
#     zb-v         likewise with stages r and 2 p - 1 - r on rank r, so the last is where the first is (Qi et al. 2024)


def make_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of this name.

    Args:
      ranks: of the pipeline.
      microbatches: per step.
      chunks: stages per rank; more than one is what ``interleaved`` is for.

    Raises ScheduleError with the nearest name, or the numbers that would work.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule {name!r}{nearest(name, SCHEDULES)}")
    if chunks > 1 and name != "interleaved":
        raise ScheduleError(
            f"schedule {name!r} has one chunk of stages per rank, not {chunks}: 'interleaved' takes more"
        )
    check_groups(ranks, microbatches, chunks)
    return SCHEDULES[name](ranks, microbatches, chunks)


def _gpipe(p: int, m: int, v: int) -> Schedule:
    return Schedule(tuple(tuple(Task(r, kind, i) for kind in "FB" for i in range(m)) for r in range(p)))


def _interleaved(p: int, m: int, v: int) -> Schedule:
    """With one chunk this is 1f1b."""
    return Schedule(tuple(_interleaved_rank(r, p, m, v) for r in range(p)))


def _interleaved_rank(r: int, p: int, m: int, v: int) -> tuple[Task, ...]:
    group = p if v > 1 else m

    def unit(u: int, kind: str) -> Task:
        chunk, microbatch = (u // group) % v, u // (group * v) * group + u % group
        return Task((chunk if kind == "F" else v - 1 - chunk) * p + r, kind, microbatch)

    ahead = min(m * v, p - 1 - r if v == 1 else 2 * (p - 1 - r) + (v - 1) * p)
    forwards, backwards = ([unit(u, kind) for u in range(m * v)] for kind in "FB")
    paired = zip_longest(forwards[ahead:], backwards)
    return (*forwards[:ahead], *(task for task in chain.from_iterable(paired) if task))


def _zero_bubble(p: int, m: int, v: int) -> Schedule:
    return _busy([[r] for r in range(p)], m, p)


def _zero_bubble_v(p: int, m: int, v: int) -> Schedule:
    return _busy([[r, 2 * p - 1 - r] for r in range(p)], m, 2 * p)


def _busy(placement: Sequence[Sequence[int]], m: int, room: int) -> Schedule:
    """Every rank does what it can: an input gradient, else a forward, else weights; late stages first.

    Args:
      placement: per rank, its stages.
      room: stage inputs that a rank keeps; a forward leaves room for one in each of its later stages.
    """
    tasks: list[list[Task]] = [[] for _ in placement]
    done: set[Task] = set()
    stages = sum(map(len, placement))
    while len(done) < 3 * m * stages:
        found = [_next(mine, stages, room, done, m) for mine in placement]
        for own, task in zip(tasks, found, strict=True):
            own += [task] if task else []
        done.update(task for task in found if task)
    return Schedule(tuple(map(tuple, tasks)))


def _next(mine: Sequence[int], stages: int, room: int, done: set[Task], m: int) -> Task | None:
    """What a rank does in a tick in which every task takes one."""
    count = {(s, kind): sum(Task(s, kind, i) in done for i in range(m)) for s in mine for kind in "FIW"}
    kept = sum(count[s, "F"] - count[s, "W"] for s in mine)
    for kind, s in product("IFW", sorted(mine, reverse=True)):
        task, more = Task(s, kind, count[s, kind]), len([1 for other in mine if other >= s])
        full = kind == "F" and kept + more > room
        if task.microbatch < m and not full and all(need in done for need in _needs(task, stages)):
            return task
    return None


def _needs(task: Task, stages: int) -> Iterator[Task]:
    s, i = task.stage, task.microbatch
    before = {"F": [(s - 1, "F")] if s else [], "W": [(s, "I")], "I": [(s, "F"), (s + 1, "I")]}[task.kind]
    return (Task(stage, kind, i) for stage, kind in before if stage < stages)


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _interleaved,
    "interleaved": _interleaved,
    "zb-h1": _zero_bubble,
    "zb-v": _zero_bubble_v,
}
