"""The schedules of the literature, as lists of tasks.

p ranks, v chunks of stages per rank (stage ``g * p + r`` is chunk g of rank r), m microbatches.

    gpipe        all forwards, then all backwards (Huang et al. 2019)
    1f1b         as few microbatches in flight as keep all ranks busy (PipeDream-flush; Narayanan et al. 2021)
    interleaved  1f1b over v chunks per rank, in groups of p microbatches (Megatron-LM; Narayanan et al. 2021)
    zb-h1        weight gradients fill the bubbles, and no more is in flight than 1f1b's p (Qi et al. 2023)
    zb-v         likewise with stages r and 2 p - 1 - r on rank r, so the last is where the first is (Qi et al. 2024)
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product, zip_longest

from meshdsl.errors import ScheduleError, nearest
from meshdsl.pipeline.schedule import Schedule, Task, check_groups


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
