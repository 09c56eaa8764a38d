"""Two predictions of a pipeline, from what its parts cost: every rank in step, and every rank as soon as it can."""

from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.pipeline.costs import Costs
from meshdsl.pipeline.schedule import Task
from meshdsl.pipeline.table import Row, Table
from meshdsl.pipeline.timing import Durations, Timing, time_schedule

_NOMINAL = Durations()


@dataclass(frozen=True)
class Forecast:
    """When the tasks of a pipeline run; where nothing is known of costs, a forward takes 1 and a backward 2.

    Args:
      layers: per stage, or what else stages are measured by; in step all take as long as the largest.
    """

    table: Table
    costs: Costs | None = None
    layers: tuple[float, ...] = ()

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
                    begin[task], end[task] = now, now + seconds
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
        return replace(self.durations, shares=[n / max(self.layers) for n in self.layers])

    @cached_property
    def durations(self) -> Durations:
        """Seconds of a task of each kind, and of handing on."""
        if self.costs is None:
            return _NOMINAL
        forwards, backwards, weights = (sum(map(bool, kind)) for kind in zip(*self._kinds, strict=True))
        return Durations(
            self.costs.forward / forwards,
            self.costs.backward / max(1, backwards),
            self.costs.weights / max(1, weights),
            self.costs.handing / (forwards + backwards),
        )

    @cached_property
    def ticks(self) -> tuple["Tick", ...]:
        """What is done in every tick, and how long it takes."""
        own = self.durations
        head = self.costs.head / self.table.schedule.microbatches if self.costs else 0.0
        found = []
        for t, (forwards, backwards, weights) in enumerate(self._kinds):
            hands, begins = bool(forwards) + bool(backwards), "H" in self.table.kinds(t)
            slots = [(tasks, own.of(tasks[0])) for tasks in (forwards, backwards, weights) if tasks]
            found.append(Tick(tuple(slots), hands * own.transfer + begins * head))
        return tuple(found)

    @cached_property
    def _kinds(self) -> list[tuple[tuple[Task, ...], ...]]:
        """Per tick, the forwards, the backwards and the weight gradients of all ranks."""
        return [tuple(self._tasks(tick, kinds) for kinds in ("F", "BI", "W")) for tick in self.table.ticks]

    def _tasks(self, tick: Row, kinds: str) -> tuple[Task, ...]:
        return tuple(task for tasks in tick for task in tasks if task.kind in kinds)


@dataclass(frozen=True)
class Tick:
    """One tick of all ranks.

    Args:
      slots: tasks that ranks do at once, with their seconds, one kind after the other.
      more: seconds of handing on, and of the head.
    """

    slots: tuple[tuple[tuple[Task, ...], float], ...]
    more: float
