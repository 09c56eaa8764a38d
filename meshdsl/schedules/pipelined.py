"""A step in microbatches, as it is planned: ticks, bubble, what is kept."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from meshdsl.schedules.lockstep import BufferSlots, LockstepTable, Uniform, lockstep, make_buffer_slots
from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.simulate import Costs, Forecast, TaskCost
from meshdsl.schedules.spec import Pipeline


@dataclass(frozen=True)
class Pipelined:
    """How a step takes its microbatches.

    Args:
      asked: what was asked for.
      axis: the mesh axis whose devices are the stages; empty if the microbatches only come one after the other.
      ranks: devices of that axis.
      forward_only: nothing goes backward, as in an evaluation.
      layers: per stage, in the order of the model; of a step that ``md.stage`` cuts, its parts.
      loads: what those parts take, by stage; empty if stages consist of layers, which are all alike.
      costs: of its parts, once it is planned; they follow from the rest.
    """

    asked: Pipeline
    axis: str = ""
    ranks: int = 1
    forward_only: bool = False
    layers: tuple[int, ...] = ()
    loads: tuple[TaskCost, ...] = ()
    costs: Costs | None = field(default=None, compare=False)

    @property
    def microbatches(self) -> int:
        """Per step."""
        return self.asked.microbatches

    @cached_property
    def table(self) -> LockstepTable:
        """What every rank does in every tick."""
        asked = self.asked.schedule
        if isinstance(asked, Schedule) and self.axis:
            return lockstep(asked.forwards if self.forward_only else asked)
        chunks, name = self.asked.chunks if self.axis else 1, self.asked.name
        return Uniform(self.ranks, self.microbatches, chunks, name == "zb", name == "gpipe", self.forward_only).table

    @property
    def schedule(self) -> Schedule:
        """The same as lists of tasks."""
        return self.table.schedule

    @cached_property
    def rooms(self) -> BufferSlots:
        """Where ranks keep what waits."""
        return make_buffer_slots(self.table, self.asked.recompute == "stage")

    @cached_property
    def forecast(self) -> Forecast:
        """When all of it runs."""
        return Forecast(self.table, self.costs, self.layers, self.loads)

    @property
    def ticks(self) -> int:
        """Ticks of a step; in each, a rank does at most one forward and one backward."""
        return len(self.table.ticks)

    @property
    def bubble(self) -> float:
        """The part of the step in which a rank does nothing that counts, if F, I and W take the same and B is both."""
        return self.table.bubble

    @property
    def noun(self) -> str:
        """What stages consist of."""
        return "parts" if self.loads else "layers"

    @property
    def layers_by_rank(self) -> tuple[int, ...]:
        """Per rank, the layers of all its chunks."""
        home = self.schedule.home
        return tuple(sum(n for s, n in enumerate(self.layers) if home[s] == r) for r in range(self.ranks))

    @property
    def stash(self) -> tuple[int, ...]:
        """Per rank, the most inputs of its chunks that it holds at a time; a device keeps room for ``slots``."""
        return self.rooms.stash.used

    @property
    def stash_bytes(self) -> tuple[int, ...]:
        """The same in bytes on each device of a rank; every device has room for the largest."""
        return tuple(n * self.costs.kept for n in self.stash) if self.costs else ()

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes per rank at the fullest point, if each had room for no more than it keeps, and works on."""
        if self.costs is None:
            return ()
        rest = self.costs.memory - self.slots * self.costs.kept - self.costs.room
        return tuple(rest + size + room for size, room in zip(self.stash_bytes, self._rooms, strict=True))

    @property
    def _rooms(self) -> list[int]:
        """Per rank, bytes for the work of the largest of its stages."""
        if self.costs is None or not self.costs.room:
            return [0] * self.ranks
        largest, home = max(load.room for load in self.loads), self.schedule.home
        mine = ([x.room for s, x in enumerate(self.loads) if home[s] == r] for r in range(self.ranks))
        return [self.costs.room * max(rooms) // largest for rooms in mine]

    @property
    def slots(self) -> int:
        """Stage inputs that every device has room for."""
        return self.rooms.stash.count

    @property
    def facts(self) -> dict[str, Any]:
        """All of it as plain values."""
        kept = {"ticks": self.ticks, "bubble": self.bubble, "stash": self.stash}
        if self.axis and self.costs:
            kept |= {"stash_bytes": self.stash_bytes, "rank_memory": self.memory}
            kept |= {"lockstep": self.forecast.lockstep, "asynchronous": self.forecast.asynchronous}
            kept |= {"balance": self.forecast.balance}
            kept |= {"exchanges": self.costs.exchanges, "exchanged_bytes": self.costs.sent}
        asked = {**asdict(self.asked), "schedule": str(self.asked.schedule), "layers": self.layers}
        return {**asked, "axis": self.axis, "stages": self.ranks, **kept}

    def timeline(self, columns: int = 100, asynchronous: bool = False) -> str:
        """One line per rank, to scale: its forwards and backwards by microbatch; dots are bubbles, and what all share.

        Args:
          asynchronous: as if every rank only waited for what it needs, not for the tick.
        """
        return (self.forecast.as_soon if asynchronous else self.forecast.in_step).timeline(columns)

    def __str__(self) -> str:
        if not self.axis:
            return f"{self.microbatches} microbatches, one after the other"
        uneven = f" of {' '.join(map(str, self.layers))} {self.noun}" if len(set(self.layers)) > 1 else ""
        done = f"{self.asked.name}, forward only," if self.forward_only else self.asked.name
        what = "microbatches' results" if self.rooms.results.count else "stage inputs"
        return (
            f"{done} over {self.axis}: {self.microbatches} microbatches through {self.ranks} stages{uneven} "
            f"in {self.ticks} ticks, bubble {self.bubble:.1%}, at most {max(self.stash)} {what} kept"
        )
