"""``Pipelined``: what a plan knows of its microbatches and its pipeline: timetable, stash, memory, predicted times."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from meshdsl.schedules.lockstep import BufferSlots, LockstepTable, UniformSchedule, lockstep, make_buffer_slots
from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.simulate import Forecast, PipelineCosts, TaskCost
from meshdsl.schedules.spec import Pipeline


@dataclass(frozen=True)
class Pipelined:
    """How a planned step runs its microbatches, as in ``plan.pipeline``.

    It is saved with the plan: its field names are names of the plan file.

    Args:
      asked: the user's options.
      axis: the mesh axis whose devices are the stages; empty if microbatches only run one after the other.
      ranks: devices of that axis.
      forward_only: whether there is no backward pass, as in an evaluation.
      layers: layers per stage, in model order; parts per stage if ``md.stage`` cuts the step.
      loads: costs per stage if ``md.stage`` cuts the step; empty if stages are equal layers.
      costs: costs of the parts of the pipeline, once planned; they follow from the plan.

    Example:
      >>> plan = step.plan(params, batch)
      >>> print(plan.pipeline.timeline())
    """

    asked: Pipeline
    axis: str = ""
    ranks: int = 1
    forward_only: bool = False
    layers: tuple[int, ...] = ()
    loads: tuple[TaskCost, ...] = ()
    costs: PipelineCosts | None = field(default=None, compare=False)

    # The timetable.

    @property
    def microbatches(self) -> int:
        """Microbatches per step."""
        return self.asked.microbatches

    @cached_property
    def table(self) -> LockstepTable:
        """The tasks of every rank in every tick."""
        schedule = self.asked.schedule
        if isinstance(schedule, Schedule) and self.axis:
            return lockstep(schedule.forwards if self.forward_only else schedule)
        chunks, name = self.asked.chunks if self.axis else 1, self.asked.name
        split, flush = name == "zb", name == "gpipe"
        return UniformSchedule(self.ranks, self.microbatches, chunks, split, flush, self.forward_only).table

    @property
    def schedule(self) -> Schedule:
        """The tasks of every rank, in order."""
        return self.table.schedule

    @property
    def ticks(self) -> int:
        """Ticks of a step; in each, a rank does at most one forward and one backward."""
        return len(self.table.ticks)

    @property
    def bubble(self) -> float:
        """The fraction of the step in which the busiest rank has no task, if F, I and W take the same and B is both."""
        return self.table.bubble

    @cached_property
    def forecast(self) -> Forecast:
        """When the tasks run, in lockstep and asynchronously."""
        return Forecast(self.table, self.costs, self.layers, self.loads)

    def timeline(self, columns: int = 100, asynchronous: bool = False) -> str:
        """Returns a line per rank, to scale: its tasks by kind and microbatch; dots are the bubble, and shared work.

        Args:
          columns: the most characters of a line.
          asynchronous: as if every rank waited only for the operands of its tasks, not for the tick.
        """
        timing = self.forecast.asynchronous_timing if asynchronous else self.forecast.lockstep_timing
        return timing.timeline(columns)

    # Stages.

    @property
    def noun(self) -> str:
        """What stages consist of."""
        return "parts" if self.loads else "layers"

    @property
    def layers_by_rank(self) -> tuple[int, ...]:
        """Per rank, the layers of all its chunks."""
        home = self.schedule.home
        return tuple(sum(n for s, n in enumerate(self.layers) if home[s] == r) for r in range(self.ranks))

    # Memory.

    @cached_property
    def buffer_slots(self) -> BufferSlots:
        """The slots of all buffers."""
        return make_buffer_slots(self.table, self.asked.recompute == "stage")

    @property
    def slots(self) -> int:
        """Slots of the stash on every device: those of the fullest rank."""
        return self.buffer_slots.stash.count

    @property
    def stash(self) -> tuple[int, ...]:
        """Per rank, the most slots of the stash that it fills at a time."""
        return self.buffer_slots.stash.used

    @property
    def stash_bytes(self) -> tuple[int, ...]:
        """Per rank, the bytes of these slots on each of its devices; empty before planning."""
        return tuple(n * self.costs.kept for n in self.stash) if self.costs else ()

    @property
    def memory(self) -> tuple[int, ...]:
        """Per rank, the peak bytes with only the stash slots and workspace that it needs; empty before planning."""
        if self.costs is None:
            return ()
        rest = self.costs.memory - self.slots * self.costs.kept - self.costs.room
        return tuple(rest + size + room for size, room in zip(self.stash_bytes, self._workspaces(), strict=True))

    def _workspaces(self) -> list[int]:
        """Returns per rank the bytes of workspace of the largest of its stages."""
        if self.costs is None or not self.costs.room:
            return [0] * self.ranks
        largest, home = max(cost.room for cost in self.loads), self.schedule.home
        by_rank = ([cost.room for s, cost in enumerate(self.loads) if home[s] == r] for r in range(self.ranks))
        return [self.costs.room * max(rooms) // largest for rooms in by_rank]

    # As plain values, and as text.

    @property
    def facts(self) -> dict[str, Any]:
        """Options and derived numbers as plain values, for JSON."""
        derived = {"ticks": self.ticks, "bubble": self.bubble, "stash": self.stash}
        if self.axis and self.costs:
            derived |= {"stash_bytes": self.stash_bytes, "rank_memory": self.memory}
            derived |= {"lockstep": self.forecast.lockstep, "asynchronous": self.forecast.asynchronous}
            derived |= {"balance": self.forecast.balance}
            derived |= {"exchanges": self.costs.exchanges, "exchanged_bytes": self.costs.sent}
        options = {**asdict(self.asked), "schedule": str(self.asked.schedule), "layers": self.layers}
        return {**options, "axis": self.axis, "stages": self.ranks, **derived}

    def __str__(self) -> str:
        if not self.axis:
            return f"{self.microbatches} microbatches, one after the other"
        uneven = f" of {' '.join(map(str, self.layers))} {self.noun}" if len(set(self.layers)) > 1 else ""
        name = f"{self.asked.name}, forward only," if self.forward_only else self.asked.name
        entries = "microbatches' activations" if self.buffer_slots.activations.count else "stage inputs"
        return (
            f"{name} over {self.axis}: {self.microbatches} microbatches through {self.ranks} stages{uneven} "
            f"in {self.ticks} ticks, bubble {self.bubble:.1%}, at most {max(self.stash)} {entries} stashed"
        )
