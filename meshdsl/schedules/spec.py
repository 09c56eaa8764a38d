"""What a user asks for: the step in microbatches, and how stages take them."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.errors import ArgumentError, faults, is_a, nearest
from meshdsl.schedules.schedule import Schedule

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
RECOMPUTE = ("stage", "none")
CHUNKED = ("interleaved", "zb")  # those that take several chunks


@dataclass(frozen=True)
class Pipeline:
    """The batch in microbatches; gradients are added up, and reduced over devices once.

    Where the layers of the model are split over a mesh axis, the devices of that axis are the stages of a pipeline.

    Args:
      microbatches: per step; they divide the batch.
      schedule: of the stages: ``1f1b`` keeps few microbatches in flight, ``gpipe`` all of them; ``interleaved`` is
        ``1f1b`` with several chunks of layers per stage, for shorter bubbles; in ``zb``, gradients of weights have
        ticks of their own, for shorter bubbles (uniform zero-bubble, after Qi et al. 2023). Or a table: a ``Schedule``,
        which says what every rank does, and which stages live on it.
      chunks: per stage, for ``interleaved`` and ``zb``; microbatches are then a multiple of the stages.
      layers: per stage (or parts), in the order of the model; with several chunks, of every chunk. Default is equal
        numbers, or where the stages do not divide the layers, what takes the least time
        (``meshdsl.schedules.partition``).
      axis: mesh axis whose devices run the parts of a step that ``md.stage`` cuts, by ``1f1b``, ``gpipe``,
        ``interleaved`` or a table without ``I`` and ``W``. A scan over layers needs none: there it is the axis over
        which the layers are split.
      recompute: what is computed again in the backward pass: ``stage``, the layers of a stage, from the stage's input,
        which is all that is kept; ``none``, nothing but what ``jax.checkpoint`` in the layers says: what their
        backward reads is kept, weights excepted.
      batch: glob over the inputs whose first dim is the batch; default is every argument that no result replaces,
        or all but the first one if results replace nothing (an evaluation).
      per_microbatch: where the step needs the whole batch at once (batch statistics, say), take every microbatch for
        itself; without, that is an error.

    Raises ArgumentError, listing all that is none of these.
    """

    microbatches: int
    schedule: str | Schedule = "1f1b"
    chunks: int = 1
    batch: str | None = None
    per_microbatch: bool = False
    layers: tuple[int, ...] = ()
    axis: str = ""
    recompute: str = "stage"

    def __post_init__(self) -> None:
        """Refuse what is no pipeline."""
        rows = []
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            rows.append(f"microbatches: {is_a(self.microbatches)}, not a number of microbatches")
        rows += _table_faults(self) if isinstance(self.schedule, Schedule) else _name_faults(self)
        if not isinstance(self.layers, tuple) or not all(type(n) is int and n > 0 for n in self.layers):
            rows.append(f"layers: {is_a(self.layers)}, not numbers of layers per stage, such as (3, 5, 5, 3)")
        if not isinstance(self.axis, str):
            rows.append(f"axis: {is_a(self.axis)}, not the name of a mesh axis")
        if self.recompute not in RECOMPUTE:
            rows.append(f"recompute: {self.recompute!r}, not {' or '.join(map(repr, RECOMPUTE))}")
        if self.batch is not None and not isinstance(self.batch, str):
            rows.append(f"batch: {is_a(self.batch)}, not a glob over the inputs, such as 'batch/**'")
        if not isinstance(self.per_microbatch, bool):
            rows.append(f"per_microbatch: {is_a(self.per_microbatch)}, not True or False")
        if rows:
            raise ArgumentError(faults("arguments of Pipeline that do not fit:", rows))
        if isinstance(self.schedule, Schedule):
            object.__setattr__(self, "chunks", self.schedule.chunks)

    @property
    def halves(self) -> bool:
        """Whether gradients of weights have ticks of their own."""
        return bool(self.schedule.split) if isinstance(self.schedule, Schedule) else self.schedule == "zb"

    @property
    def name(self) -> str:
        """Of the schedule."""
        return "table" if isinstance(self.schedule, Schedule) else self.schedule


def _name_faults(asked: Pipeline) -> Iterator[str]:
    """What is wrong with a schedule by name, and its chunks."""
    if asked.schedule not in SCHEDULES:
        known = isinstance(asked.schedule, str)
        said = f"no schedule {asked.schedule!r}{nearest(asked.schedule, SCHEDULES)}" if known else is_a(asked.schedule)
        yield f"schedule: {said}{'' if known else ', not the name of a schedule or an md.Schedule'}"
    if not isinstance(asked.chunks, int) or isinstance(asked.chunks, bool) or asked.chunks < 1:
        yield f"chunks: {is_a(asked.chunks)}, not a number of chunks of layers"
    elif asked.chunks > 1 and asked.schedule not in CHUNKED:
        one = f"{asked.schedule!r} has one chunk per stage, not {asked.chunks}"
        yield f"chunks: {one}: 'interleaved' and 'zb' take more"


def _table_faults(asked: Pipeline) -> Iterator[str]:
    """What of a table is not as it is asked for."""
    assert isinstance(asked.schedule, Schedule)
    table = asked.schedule
    if asked.microbatches != table.microbatches:
        yield f"microbatches: {asked.microbatches}, and the schedule is for {table.microbatches}"
    if asked.chunks not in (1, table.chunks):
        yield f"chunks: {asked.chunks}, and the schedule has {table.chunks} per rank"
