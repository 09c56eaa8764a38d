"""``md.Pipeline``: how a user asks for microbatches, and for a pipeline."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.errors import ArgumentError, faults, is_a, nearest
from meshdsl.schedules.schedule import Schedule

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")  # built in; others are tables
RECOMPUTE = ("stage", "none")
CHUNKED = ("interleaved", "zb")  # built-in schedules that take several chunks per stage


@dataclass(frozen=True)
class Pipeline:
    """Runs a step in microbatches, whose gradients are accumulated and reduced over devices once.

    If the layers of the model (a ``lax.scan`` over stacked parameters) are pinned to be split over a mesh axis, the
    devices of that axis become the stages of a pipeline.

    Args:
      microbatches: microbatches per step; they divide the batch.
      schedule: the order of the stages' tasks. ``1f1b`` keeps few microbatches in flight (PipeDream-flush), ``gpipe``
        all of them; ``interleaved`` is ``1f1b`` with several chunks of layers per stage, for a smaller bubble
        (Megatron-LM); ``zb`` computes weight gradients in ticks of their own, for a smaller bubble (a uniform
        zero-bubble schedule after Qi et al. 2023). Or a table, ``md.Schedule``, that says what every rank does, and
        which stages live on it.
      chunks: chunks of layers per stage, for ``interleaved`` and ``zb``; microbatches are then a multiple of the
        stages.
      batch: glob over the inputs whose leading dim is the batch. The default is every argument that no result replaces,
        or all but the first one if results replace none (an evaluation).
      per_microbatch: if the step needs the whole batch at once (batch statistics, say), compute that per microbatch
        instead of raising an error.
      layers: layers (or parts) per stage, in model order; with several chunks, per chunk. The default is equal numbers,
        or if the stages do not divide the layers, the fastest partition (``meshdsl.schedules.partition``).
      axis: the mesh axis whose devices run the parts that ``md.stage`` cuts, by ``1f1b``, ``gpipe``, ``interleaved`` or
        a table without ``I`` and ``W``. A scan over layers needs none: its axis is that over which the layers are
        split.
      recompute: what the backward pass recomputes. ``stage``: the layers of a stage from the stage's input, which is
        all that is stashed. ``none``: only what ``jax.checkpoint`` in the layers says; all else that the backward needs
        is stashed, except for weights. With ``remat="auto"`` of ``parallelize`` the planner chooses between both and
        all that lies between them, whatever is said here.

    Raises:
      ArgumentError: listing all faults of the arguments.

    Example:
      >>> pipeline = md.Pipeline(16, "interleaved", chunks=2)
      >>> sharded = md.parallelize(step, "pipe=4,data=2", {"params/layers": "pipe=S(0)"}, pipeline=pipeline)
      >>> pipeline.microbatches, pipeline.chunks
      (16, 2)
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
        """Check the arguments; a table determines the chunks."""
        rows = []
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            rows.append(f"microbatches: {is_a(self.microbatches)}, not a positive number of microbatches")
        rows += _table_faults(self, self.schedule) if isinstance(self.schedule, Schedule) else _name_faults(self)
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
            raise ArgumentError(faults("invalid arguments of Pipeline:", rows))
        if isinstance(self.schedule, Schedule):
            object.__setattr__(self, "chunks", self.schedule.chunks)

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return bool(self.schedule.split) if isinstance(self.schedule, Schedule) else self.schedule == "zb"

    @property
    def name(self) -> str:
        """The name of the schedule; ``table`` for a table."""
        return "table" if isinstance(self.schedule, Schedule) else self.schedule


def _name_faults(pipeline: Pipeline) -> Iterator[str]:
    """Yields faults of a schedule that is given by name, and of its chunks."""
    if not isinstance(pipeline.schedule, str):
        yield f"schedule: {is_a(pipeline.schedule)}, not the name of a schedule or an md.Schedule"
    elif pipeline.schedule not in SCHEDULES:
        yield f"schedule: no schedule {pipeline.schedule!r}{nearest(pipeline.schedule, SCHEDULES)}"
    if not isinstance(pipeline.chunks, int) or isinstance(pipeline.chunks, bool) or pipeline.chunks < 1:
        yield f"chunks: {is_a(pipeline.chunks)}, not a number of chunks of layers"
    elif pipeline.chunks > 1 and pipeline.schedule not in CHUNKED:
        yield (
            f"chunks: {pipeline.schedule!r} has one chunk per stage, not {pipeline.chunks}; "
            f"{' and '.join(map(repr, CHUNKED))} take several"
        )


def _table_faults(pipeline: Pipeline, table: Schedule) -> Iterator[str]:
    """Yields arguments that contradict the table."""
    if pipeline.microbatches != table.microbatches:
        yield f"microbatches: {pipeline.microbatches}, and the schedule is for {table.microbatches}"
    if pipeline.chunks not in (1, table.chunks):
        yield f"chunks: {pipeline.chunks}, and the schedule has {table.chunks} per rank"
