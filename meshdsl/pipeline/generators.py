"""The schedules of the literature, as lists of tasks.

p ranks, v chunks of stages per rank (stage ``g * p + r`` is chunk g of rank r), m microbatches.

    gpipe        all forwards, then all backwards (Huang et al. 2019)
    1f1b         as few microbatches in flight as keep all ranks busy (PipeDream-flush; Narayanan et al. 2021)
    interleaved  1f1b over v chunks per rank, in groups of p microbatches (Megatron-LM; Narayanan et al. 2021)
    zb           weight gradients fill the bubbles, and no more is in flight than 1f1b's p (ZB-H1; Qi et al. 2023)
"""

from collections.abc import Callable
from itertools import chain, zip_longest

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
    """Every rank does what it can: an input gradient, else a forward while fewer than p are in flight, else weights."""
    tasks: list[list[Task]] = [[] for _ in range(p)]
    count = [dict.fromkeys("FIW", 0) for _ in range(p)]
    while any(done["W"] < m for done in count):
        before = [dict(done) for done in count]
        for r in range(p):
            kind = _next_kind(r, p, m, before)
            if kind:
                tasks[r].append(Task(r, kind, count[r][kind]))
                count[r][kind] += 1
    return Schedule(tuple(map(tuple, tasks)))


def _next_kind(r: int, p: int, m: int, done: list[dict[str, int]]) -> str | None:
    """What rank r does in a tick in which every task takes one."""
    own = done[r]
    if own["I"] < own["F"] and (r == p - 1 or done[r + 1]["I"] > own["I"]):
        return "I"
    if own["F"] < m and own["F"] - own["W"] < p and (r == 0 or done[r - 1]["F"] > own["F"]):
        return "F"
    return "W" if own["W"] < own["I"] else None


SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": _gpipe,
    "1f1b": _interleaved,
    "interleaved": _interleaved,
    "zb": _zero_bubble,
}
