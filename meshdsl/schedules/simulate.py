"""Two predictions of a pipeline, from what its parts cost: every rank in step, and every rank as soon as it can."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.schedules.lockstep import LockstepTable, Row
from meshdsl.schedules.schedule import Schedule, Task

# ---- Costs -----------------------------------------------------------------------------------------------------------
# What the parts of a pipeline cost, as the plan has them; and the two predictions that follow.
#
# A step of a pipeline is ticks, in which stages go forward and backward, hand on what they made, and begin the backward
# of a microbatch (the head); before and after them comes what is done once. What embedding, head and loss take is
# shared by all ranks, as they are planned over all axes.
#
#     lockstep       every tick takes as long as what is done in it, bubbles included: what the executor does, and the
#                    seconds of the plan
#     asynchronous   every rank begins a task as soon as what it needs has arrived, and handing on takes nobody's time


FORWARD, BACKWARD, WEIGHTS, HEAD, HANDING, STASH = "forward", "backward", "weights", "head", "handing", "stash"
_MARK = "meshdsl-part-"


def part_scope(part: str) -> str:
    """The name scope under which a part of a tick is traced."""
    return f"{_MARK}{part}"


def part_of(scope: str) -> str:
    """The part of a tick that a name scope speaks of, the innermost; empty if it is outside of all."""
    return scope.rpartition(_MARK)[2].partition("/")[0].rstrip(")") if _MARK in scope else ""


@dataclass(frozen=True)
class TaskCost:
    """What the work of one stage on one microbatch takes, on a device that has all of it.

    Args:
      forward: seconds. backward: likewise, what is computed again included.
      room: bytes that it needs while it runs, beside what it is given and makes.
    """

    forward: float
    backward: float
    room: int


@dataclass(frozen=True)
class Costs:
    """Predicted costs of a pipeline, per device and step.

    Args:
      forward: seconds of all forwards, embedding included. backward, weights, head, handing: likewise; ``weights`` are
        gradients in ticks of their own, ``handing`` is what the permutes between stages take.
      others: seconds of the rest of the step.
      kept: bytes of one microbatch in the stash.
      memory: bytes at the fullest point, with room for all that the first rank keeps.
      room: bytes among them for the work of the largest stage, where stages are not alike.
      exchanges: collectives by which a device hands on, mostly permutes. sent: bytes of them.
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


# ---- Timing ----------------------------------------------------------------------------------------------------------
# When the tasks of a schedule run: every rank in its order, as soon as what a task needs has arrived.


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
class ScheduleTiming:
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


def time_schedule(schedule: Schedule, durations: Durations) -> ScheduleTiming:
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
    return ScheduleTiming(schedule, begin, end, max(end.values()))


def _arrivals(schedule: Schedule, task: Task, end: Mapping[Task, float], durations: Durations) -> list[float]:
    here = schedule.home[task.stage]
    return [
        end[need] + (durations.transfer if schedule.home[need.stage] != here else 0.0) for need in schedule.needs(task)
    ]


# ---- Forecast --------------------------------------------------------------------------------------------------------


_NOMINAL = Durations()


@dataclass(frozen=True)
class Forecast:
    """When the tasks of a pipeline run; where nothing is known of costs, a forward takes 1 and a backward 2.

    Args:
      layers: per stage; in step all take as long as the largest.
      loads: per stage, if they are not alike; in step, a tick takes as long as the largest of those that work in it.
    """

    table: LockstepTable
    costs: Costs | None = None
    layers: tuple[int, ...] = ()
    loads: tuple[TaskCost, ...] = ()

    @property
    def lockstep(self) -> float:
        """Seconds of the step if every tick takes as long as what is done in it: those of the plan."""
        return self.in_step.seconds + (self.costs.others if self.costs else 0.0)

    @property
    def asynchronous(self) -> float:
        """Seconds of the step if every rank only waited for what it needs."""
        return self.as_soon.seconds + (self.costs.head + self.costs.others if self.costs else 0.0)

    @cached_property
    def in_step(self) -> ScheduleTiming:
        """The tasks in their ticks."""
        begin, end, now = dict[Task, float](), dict[Task, float](), 0.0
        for tick in self.ticks:
            for tasks, seconds in tick.slots:
                for task in tasks:
                    begin[task], end[task] = now, now + (self._own.of(task) if self.loads else seconds)
                now += seconds
            now += tick.more
        return ScheduleTiming(self.table.schedule, begin, end, now)

    @cached_property
    def as_soon(self) -> ScheduleTiming:
        """The tasks in the order of every rank, each as soon as what it needs has arrived."""
        return time_schedule(self.table.schedule, self._own)

    @property
    def balance(self) -> tuple[float, ...]:
        """Per rank, the seconds of its own layers for one microbatch, forward and backward."""
        ranks = self.table.schedule.ranks
        return tuple(sum(self._own.of(task) for task in tasks if task.microbatch == 0) for tasks in ranks)

    @property
    def _own(self) -> Durations:
        """Seconds of a task if a stage only takes the time of its own layers."""
        return replace(self.durations, shares=self._shares)

    @cached_property
    def _shares(self) -> list[tuple[float, float]]:
        """Per stage, its work forward and backward as parts of the largest."""
        if not self.loads:
            return [(n / max(self.layers),) * 2 for n in self.layers]
        return list(zip(_parts([x.forward for x in self.loads]), _parts([x.backward for x in self.loads]), strict=True))

    def _share(self, tasks: tuple[Task, ...]) -> float:
        """How long what is done in a tick takes, of one kind, as a part of the largest stage's."""
        if not tasks:
            return 0.0
        return max(self._shares[task.stage][task.kind != "F"] for task in tasks) if self.loads else 1.0

    @cached_property
    def durations(self) -> Durations:
        """Seconds of a task of each kind, and of handing on."""
        if self.costs is None:
            return _NOMINAL
        forwards, backwards, weights = (sum(map(self._share, kind)) or 1.0 for kind in zip(*self._kinds, strict=True))
        hands = sum(bool(kind) for ahead, back, _ in self._kinds for kind in (ahead, back))
        return Durations(
            self.costs.forward / forwards,
            self.costs.backward / backwards,
            self.costs.weights / weights,
            self.costs.handing / hands,
        )

    @cached_property
    def ticks(self) -> tuple["Tick", ...]:
        """What is done in every tick, and how long it takes."""
        own = self.durations
        head = self.costs.head / self.table.schedule.microbatches if self.costs else 0.0
        found = []
        for t, (forwards, backwards, weights) in enumerate(self._kinds):
            hands, begins = bool(forwards) + bool(backwards), "H" in self.table.kinds(t)
            kinds = [tasks for tasks in (forwards, backwards, weights) if tasks]
            slots = [(tasks, own.of(tasks[0]) * self._share(tasks)) for tasks in kinds]
            found.append(Tick(tuple(slots), hands * own.transfer + begins * head))
        return tuple(found)

    @cached_property
    def _kinds(self) -> list[tuple[tuple[Task, ...], ...]]:
        """Per tick, the forwards, the backwards and the weight gradients of all ranks."""
        return [tuple(self._tasks(tick, kinds) for kinds in ("F", "BI", "W")) for tick in self.table.ticks]

    def _tasks(self, tick: Row, kinds: str) -> tuple[Task, ...]:
        return tuple(task for tasks in tick for task in tasks if task.kind in kinds)


def _parts(seconds: Sequence[float]) -> list[float]:
    """Of the largest; all are alike if there is nothing."""
    return [x / max(seconds) if max(seconds) else 1.0 for x in seconds]


@dataclass(frozen=True)
class Tick:
    """One tick of all ranks.

    Args:
      slots: tasks that ranks do at once, with their seconds, one kind after the other.
      more: seconds of handing on, and of the head.
    """

    slots: tuple[tuple[tuple[Task, ...], float], ...]
    more: float
