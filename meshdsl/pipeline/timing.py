"""When the tasks of a schedule run: every rank in its order, as soon as what a task needs has arrived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshdsl.pipeline.schedule import Schedule, Task


@dataclass(frozen=True)
class Durations:
    """Seconds of a stage's work on one microbatch, and of handing an activation or its gradient on.

    Args:
      forward: of a forward.
      inputs: of the gradient of the stage's input.
      weights: of the gradient of its weights; a whole backward takes both.
      transfer: between two ranks.
      shares: per stage, its parts of the work forward and backward, if stages are unequal.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0
    shares: Sequence[tuple[float, float]] = ()

    def of(self, task: Task) -> float:
        """Seconds of one task."""
        kinds = {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.inputs + self.weights}
        return kinds[task.kind] * (self.shares[task.stage][task.kind != "F"] if self.shares else 1.0)


@dataclass(frozen=True)
class Timing:
    """Begin and end of every task, in seconds from the begin of the step, and the seconds of all of them."""

    schedule: Schedule
    begin: Mapping[Task, float]
    end: Mapping[Task, float]
    seconds: float

    @cached_property
    def busy(self) -> float:
        """Seconds that the busiest rank works."""
        return max(sum(self.end[t] - self.begin[t] for t in tasks) for tasks in self.schedule.ranks)

    @property
    def bubble(self) -> float:
        """The part of the step in which the busiest rank does nothing."""
        return 1 - self.busy / self.seconds

    def timeline(self, columns: int = 100) -> str:
        """One line per rank: its tasks by kind and microbatch, drawn to scale, bubbles as dots."""
        width = min(columns, 3 * max(1, round(self.seconds / self._least))) / self.seconds
        lines = [self._line(tasks, width) for tasks in self.schedule.ranks]
        return "\n".join(f"rank {rank:<3d} {line}" for rank, line in enumerate(lines))

    @property
    def _least(self) -> float:
        return min(end - self.begin[task] for task, end in self.end.items() if end > self.begin[task])

    def _line(self, tasks: tuple[Task, ...], width: float) -> str:
        line = ["."] * round(self.seconds * width)
        for task in tasks:
            first, last = round(self.begin[task] * width), round(self.end[task] * width)
            line[first:last] = f"{task.kind}{task.microbatch}".ljust(last - first, " ")[: last - first]
        return "".join(line)


def time_schedule(schedule: Schedule, durations: Durations) -> Timing:
    """Run a schedule on paper."""
    begin: dict[Task, float] = {}
    end: dict[Task, float] = {}
    at, free = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    while len(end) < sum(map(len, schedule.ranks)):
        for rank, tasks in enumerate(schedule.ranks):
            while at[rank] < len(tasks) and all(need in end for need in schedule.needs(tasks[at[rank]])):
                task = tasks[at[rank]]
                begin[task] = max(free[rank], *_arrivals(schedule, task, end, durations), 0.0)
                end[task] = free[rank] = begin[task] + durations.of(task)
                at[rank] += 1
    return Timing(schedule, begin, end, max(end.values()))


def _arrivals(schedule: Schedule, task: Task, end: Mapping[Task, float], durations: Durations) -> list[float]:
    here = schedule.home[task.stage]
    return [
        end[need] + (durations.transfer if schedule.home[need.stage] != here else 0.0) for need in schedule.needs(task)
    ]
