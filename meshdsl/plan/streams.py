"""Jobs on streams: a device computes one thing after the other, and every link sends one thing after the other.

A job begins when what it waits for is over and its stream is free; of several that could begin, the first in the order
goes first. So a collective that nobody waits for yet runs beside the computation, and one that the next operation
needs stands in its way. (List scheduling: Graham 1966.)
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

COMPUTE = ""


class Job(NamedTuple):
    """Something that takes a stream for some time.

    Args:
      stream: ``COMPUTE``, or the name of a link.
      seconds: that it takes.
      after: jobs that must be over, by their position.
      follows: it is due right behind the last job that it waits for, not at its own position.
    """

    stream: str
    seconds: float
    after: frozenset[int] = frozenset()
    follows: bool = False


def finish(jobs: Sequence[Job]) -> list[float]:
    """When each job is over, in seconds from the begin; a job only waits for jobs in front of it."""
    readers: list[list[int]] = [[] for _ in jobs]
    missing = [len(job.after) for job in jobs]
    for i, job in enumerate(jobs):
        for other in job.after:
            readers[other].append(i)
    due = _order(jobs)
    ready: dict[str, list[tuple[int, int]]] = {job.stream: [] for job in jobs}
    running: list[tuple[float, int]] = []
    busy: set[str] = set()
    ends = [0.0] * len(jobs)

    def begin(now: float, stream: str) -> None:
        if ready[stream] and stream not in busy:
            _, i = heappop(ready[stream])
            busy.add(stream)
            heappush(running, (now + jobs[i].seconds, i))

    for i, job in enumerate(jobs):
        if not missing[i]:
            heappush(ready[job.stream], (due[i], i))
    for stream in ready:
        begin(0.0, stream)
    while running:
        now = running[0][0]
        touched: set[str] = set()
        while running and running[0][0] == now:
            _, i = heappop(running)
            ends[i] = now
            busy.discard(jobs[i].stream)
            touched.add(jobs[i].stream)
            for reader in readers[i]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready[jobs[reader].stream], (due[reader], reader))
                    touched.add(jobs[reader].stream)
        for stream in sorted(touched):
            begin(now, stream)
    return ends


def _order(jobs: Sequence[Job]) -> list[int]:
    """Where each job is due."""
    due = list(range(len(jobs)))
    for i, job in enumerate(jobs):
        if job.follows and job.after:
            due[i] = max(due[other] for other in job.after)
    return due
