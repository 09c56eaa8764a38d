"""Predicted time of a pipeline: in lockstep, as it runs, and asynchronously, for comparison.

A step of a pipeline is a sequence of ticks, in which stages run forward and backward and send what they computed, and
the head runs for the microbatches that turn around; before and after them comes work that is done once. Embedding, head
and loss are shared by all ranks, as they are planned over all axes.

    lockstep       a tick takes as long as the slowest task of each kind in it, bubble included: what the executor does,
                   and the seconds of the plan
    asynchronous   a rank begins a task once its operands have arrived, and sending takes no rank's time

The parts of a tick are name scopes of the traced operations (``part_scope``); the plan sums up its seconds by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.schedules.lockstep import LockstepTable, TickTasks
from meshdsl.schedules.schedule import Schedule, Task

# ---- Costs of the parts of a tick ------------------------------------------------------------------------------------

FORWARD, BACKWARD, WEIGHTS, HEAD, HANDING, STASH = "forward", "backward", "weights", "head", "handing", "stash"
_MARK = "meshdsl-part-"


def part_scope(part: str) -> str:
    """Returns the name scope under which a part of a tick is traced."""
    return f"{_MARK}{part}"


def part_of(scope: str) -> str:
    """Returns the part of a tick that a name scope is in, the innermost one; empty outside of all parts."""
    return scope.rpartition(_MARK)[2].partition("/")[0].rstrip(")") if _MARK in scope else ""


# ``TaskCost`` and ``PipelineCosts`` are saved with plans: their field names are names of the plan file.


@dataclass(frozen=True)
class TaskCost:
    """Cost of the tasks of one stage on one microbatch, on a device that holds all of its operands.

    Args:
      forward: seconds of a forward.
      backward: seconds of a backward, recomputation included.
      room: bytes of workspace while a task runs, beside its operands and results.
    """

    forward: float
    backward: float
    room: int


@dataclass(frozen=True)
class PipelineCosts:
    """Predicted costs of a planned pipeline, per device and step.

    Args:
      forward: seconds of all forwards, embedding included.
      backward: seconds of all backwards, or input gradients.
      weights: seconds of weight gradients in ticks of their own.
      head: seconds of the head.
      handing: seconds of the collective-permutes between stages.
      others: seconds of the rest of the step.
      kept: bytes of one microbatch in the stash.
      memory: peak bytes, with all slots of the fullest rank.
      exchanges: collectives between stages, mostly permutes.
      sent: bytes that they send.
      room: bytes of the peak that are workspace of the largest stage, if stages differ.
    """

    forward: float
    backward: float
    weights: float
    head: float
    handing: float
    others: float
    kept: int
    memory: int
    exchanges: int
    sent: int
    room: int = 0


@dataclass(frozen=True)
class Durations:
    """Seconds of the tasks of a stage on one microbatch; the defaults are nominal time.

    Args:
      forward: seconds of a forward.
      inputs: seconds of the gradient of the stage's input.
      weights: seconds of the gradient of its weights; a whole backward takes both.
      transfer: seconds to send an activation, or its gradient, to another rank.
      shares: per stage, factors of its forward and its backward tasks, if stages are unequal.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    transfer: float = 0.0
    shares: Sequence[tuple[float, float]] = ()

    def seconds(self, task: Task) -> float:
        """Returns the seconds of a task."""
        kinds = {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.inputs + self.weights}
        return kinds[task.kind] * (self.shares[task.stage][task.kind != "F"] if self.shares else 1.0)


# ---- Timing of a schedule --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleTiming:
    """When tasks run.

    Args:
      begin: per task, seconds from the beginning of the step.
      end: per task, the same.
      seconds: of all tasks together.
    """

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
        """The fraction of the time in which the busiest rank has no task."""
        return 1 - self.busy / self.seconds

    def timeline(self, columns: int = 100) -> str:
        """Returns a line per rank with its tasks by kind and microbatch, to scale; the bubble is dots.

        Args:
          columns: the most characters of a line; three characters for the shortest task suffice.
        """
        shortest = min(end - self.begin[task] for task, end in self.end.items() if end > self.begin[task])
        per_second = min(columns, 3 * max(1, round(self.seconds / shortest))) / self.seconds
        lines = []
        for rank, tasks in enumerate(self.schedule.ranks):
            line = ["."] * round(self.seconds * per_second)
            for task in tasks:
                first, last = round(self.begin[task] * per_second), round(self.end[task] * per_second)
                line[first:last] = f"{task.kind}{task.microbatch}".ljust(last - first, " ")[: last - first]
            lines.append(f"rank {rank:<3d} {''.join(line)}")
        return "\n".join(lines)


def time_schedule(schedule: Schedule, durations: Durations) -> ScheduleTiming:
    """Returns the asynchronous timing: every rank does its tasks in order, each once its operands have arrived."""

    def arrivals(task: Task) -> list[float]:
        here = schedule.home[task.stage]
        needs = schedule.needs(task)
        return [end[need] + (durations.transfer if schedule.home[need.stage] != here else 0.0) for need in needs]

    begin: dict[Task, float] = {}
    end: dict[Task, float] = {}
    at, free = [0] * len(schedule.ranks), [0.0] * len(schedule.ranks)
    while len(end) < sum(map(len, schedule.ranks)):
        for rank, tasks in enumerate(schedule.ranks):
            while at[rank] < len(tasks) and all(need in end for need in schedule.needs(tasks[at[rank]])):
                task = tasks[at[rank]]
                begin[task] = max(free[rank], *arrivals(task), 0.0)
                end[task] = free[rank] = begin[task] + durations.seconds(task)
                at[rank] += 1
    return ScheduleTiming(schedule, begin, end, max(end.values()))


# ---- Forecast of a planned pipeline ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TickTime:
    """One tick of all ranks.

    Args:
      groups: tasks of one kind that ranks do at the same time, with their seconds, one kind after the other.
      overhead: seconds of sending, and of the head.
    """

    groups: tuple[tuple[tuple[Task, ...], float], ...]
    overhead: float


@dataclass(frozen=True)
class Forecast:
    """When the tasks of a pipeline run; without costs in nominal time, a forward taking 1 and a backward 2.

    Args:
      layers: per stage; in lockstep all take as long as the largest.
      loads: costs per stage if stages differ; in lockstep, a tick takes as long as the largest stage at work in it.
    """

    table: LockstepTable
    costs: PipelineCosts | None = None
    layers: tuple[int, ...] = ()
    loads: tuple[TaskCost, ...] = ()

    @property
    def lockstep(self) -> float:
        """Seconds of the step in lockstep: those of the plan."""
        return self.lockstep_timing.seconds + (self.costs.others if self.costs else 0.0)

    @property
    def asynchronous(self) -> float:
        """Seconds of the step if every rank waited only for the operands of its tasks."""
        return self.asynchronous_timing.seconds + (self.costs.head + self.costs.others if self.costs else 0.0)

    @cached_property
    def lockstep_timing(self) -> ScheduleTiming:
        """The tasks in their ticks."""
        begin, end, now = dict[Task, float](), dict[Task, float](), 0.0
        for tick in self.ticks:
            for tasks, seconds in tick.groups:
                for task in tasks:
                    begin[task], end[task] = now, now + (self._own_durations.seconds(task) if self.loads else seconds)
                now += seconds
            now += tick.overhead
        return ScheduleTiming(self.table.schedule, begin, end, now)

    @cached_property
    def asynchronous_timing(self) -> ScheduleTiming:
        """The tasks in the order of every rank, each once its operands have arrived."""
        return time_schedule(self.table.schedule, self._own_durations)

    @property
    def balance(self) -> tuple[float, ...]:
        """Per rank, the seconds of its own stages for one microbatch, forward and backward."""
        own, ranks = self._own_durations, self.table.schedule.ranks
        return tuple(sum(own.seconds(task) for task in tasks if task.microbatch == 0) for tasks in ranks)

    @property
    def _own_durations(self) -> Durations:
        """Durations in which every stage takes the time of its own layers."""
        return replace(self.durations, shares=self._shares)

    @cached_property
    def _shares(self) -> list[tuple[float, float]]:
        """Per stage, its forward and backward work as fractions of the largest stage's."""
        if not self.loads:
            return [(n / max(self.layers),) * 2 for n in self.layers]
        forward, backward = (_fractions(x) for x in zip(*((x.forward, x.backward) for x in self.loads), strict=True))
        return list(zip(forward, backward, strict=True))

    def _share(self, tasks: tuple[Task, ...]) -> float:
        """Returns how long tasks of one kind in a tick take together, as a fraction of the largest stage's."""
        if not tasks:
            return 0.0
        return max(self._shares[task.stage][task.kind != "F"] for task in tasks) if self.loads else 1.0

    @cached_property
    def durations(self) -> Durations:
        """Seconds of a task of each kind on the largest stage, and of sending."""
        if self.costs is None:
            return Durations()
        forwards, backwards, weights = (sum(map(self._share, kind)) or 1.0 for kind in zip(*self._kinds, strict=True))
        sends = sum(bool(kind) for forward, backward, _ in self._kinds for kind in (forward, backward))
        return Durations(
            self.costs.forward / forwards,
            self.costs.backward / backwards,
            self.costs.weights / weights,
            self.costs.handing / sends,
        )

    @cached_property
    def ticks(self) -> tuple[TickTime, ...]:
        """What every tick takes."""
        durations = self.durations
        head = self.costs.head / self.table.schedule.microbatches if self.costs else 0.0
        found = []
        for t, (forwards, backwards, weights) in enumerate(self._kinds):
            sends, runs_head = bool(forwards) + bool(backwards), "H" in self.table.kinds(t)
            kinds = [tasks for tasks in (forwards, backwards, weights) if tasks]
            groups = [(tasks, durations.seconds(tasks[0]) * self._share(tasks)) for tasks in kinds]
            found.append(TickTime(tuple(groups), sends * durations.transfer + runs_head * head))
        return tuple(found)

    @cached_property
    def _kinds(self) -> list[tuple[tuple[Task, ...], ...]]:
        """Per tick, the forwards, the backwards and the weight gradients of all ranks."""

        def of_kinds(tick: TickTasks, kinds: str) -> tuple[Task, ...]:
            return tuple(task for tasks in tick for task in tasks if task.kind in kinds)

        return [tuple(of_kinds(tick, kinds) for kinds in ("F", "BI", "W")) for tick in self.table.ticks]


def _fractions(seconds: Sequence[float]) -> list[float]:
    """Returns fractions of the largest; all 1 if everything is 0."""
    return [x / max(seconds) if max(seconds) else 1.0 for x in seconds]
