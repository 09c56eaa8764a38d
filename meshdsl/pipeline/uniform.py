"""The uniform schedule: in every tick all ranks do the same operations, so that nothing in the program diverges.

With p ranks, v chunks of stages per rank and m microbatches, a rank has ``n = m v`` units of each kind. Forward unit u
of rank r runs in tick ``u + r``; backward unit w in tick ``w + A + (p - 1 - r)`` with ``A = v p - 1``, where the last
stage's backward runs in the tick of its forward. Whatever a unit needs was made one tick earlier by the
neighbour on the ring. Ticks in which a rank has no unit are idle, or masked. An evaluation has no backward units.
"""

from dataclasses import dataclass
from functools import cached_property

from meshdsl.pipeline.schedule import Schedule, Task, check_groups
from meshdsl.pipeline.table import Table


@dataclass(frozen=True)
class Uniform:
    """Ticks of a pipeline in which every rank does the same.

    Args:
      ranks: of the pipeline, p.
      microbatches: per step, m; a multiple of p if there are several chunks.
      chunks: stages per rank, v.
      split: weight gradients in ticks of their own, the same tick on all ranks (zero-bubble).
      flush: all forwards before the first backward (gpipe).
      forward_only: there are no backwards.
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    split: bool = False
    flush: bool = False
    forward_only: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that have no such schedule."""
        check_groups(self.ranks, self.microbatches, self.chunks)

    @property
    def ahead(self) -> int:
        """Ticks before the first backward, or before the first microbatch is through."""
        return self.span if self.flush and not self.forward_only else self.chunks * self.ranks - 1

    @property
    def span(self) -> int:
        """Ticks from the first to the last forward, and as many from the first to the last backward."""
        return self.microbatches * self.chunks + self.ranks - 1

    @property
    def ticks(self) -> int:
        """Ticks of a step; the first ``ahead`` have no backwards, the last ``ahead`` no forwards."""
        return self.span if self.forward_only else self.ahead + self.span

    def forward(self, tick: int, rank: int) -> Task | None:
        """The forward of a rank in a tick."""
        return self._task("F", tick - rank, rank)

    def backward(self, tick: int, rank: int) -> Task | None:
        """The backward of a rank in a tick, or its first part."""
        kind, unit = "I" if self.split else "B", tick - self.ahead - (self.ranks - 1 - rank)
        return None if self.forward_only else self._task(kind, unit, rank)

    def weights(self, tick: int, rank: int) -> Task | None:
        """The weight gradient of a rank in a tick, if that is a part of its own."""
        mine = self.split and not self.forward_only
        return self._task("W", tick - self.ahead - (self.ranks - 1), rank) if mine else None

    @cached_property
    def table(self) -> Table:
        """What every rank does in every tick."""
        return Table(tuple(tuple(self._tasks(t, rank) for rank in range(self.ranks)) for t in range(self.ticks)))

    @property
    def schedule(self) -> Schedule:
        """The same as lists of tasks."""
        return self.table.schedule

    def _tasks(self, tick: int, rank: int) -> tuple[Task, ...]:
        found = self.forward(tick, rank), self.backward(tick, rank), self.weights(tick, rank)
        return tuple(task for task in found if task is not None)

    def _task(self, kind: str, unit: int, rank: int) -> Task | None:
        p, v = self.ranks, self.chunks
        if not 0 <= unit < self.microbatches * v:
            return None
        chunk = unit // p % v
        stage = (chunk if kind == "F" else v - 1 - chunk) * p + rank
        return Task(stage, kind, unit // (p * v) * p + unit % p)
