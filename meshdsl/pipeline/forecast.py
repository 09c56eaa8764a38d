"""Two predictions of a pipeline, from what its parts cost: every rank in step, and every rank as soon as it can."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.pipeline.costs import Costs, Load
from meshdsl.pipeline.schedule import Task
from meshdsl.pipeline.table import Row, Table
from meshdsl.pipeline.timing import Durations, Timing, time_schedule

_NOMINAL = Durations()


@dataclass(frozen=True)
class Forecast:
    """When the tasks of a pipeline run; where nothing is known of costs, a forward takes 1 and a backward 2.

    Args:
      layers: per stage; in step all take as long as the largest.
      loads: per stage, if they are not alike; in step, a tick takes as long as the largest of those that work in it.
    """

    table: Table
    costs: Costs | None = None
    layers: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def lockstep(self) -> float:
        """Seconds of the step if every tick takes as long as what is done in it: those of the plan."""
        return self.in_step.seconds + (self.costs.others if self.costs else 0.0)

    @property
    def asynchronous(self) -> float:
        """Seconds of the step if every rank only waited for what it needs."""
        return self.as_soon.seconds + (self.costs.head + self.costs.others if self.costs else 0.0)

    @cached_property
    def in_step(self) -> Timing:
        """The tasks in their ticks."""
        begin, end, now = dict[Task, float](), dict[Task, float](), 0.0
        for tick in self.ticks:
            for tasks, seconds in tick.slots:
                for task in tasks:
                    begin[task], end[task] = now, now + (self._own.of(task) if self.loads else seconds)
                now += seconds
            now += tick.more
        return Timing(self.table.schedule, begin, end, now)

    @cached_property
    def as_soon(self) -> Timing:
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
