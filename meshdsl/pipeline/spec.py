"""What a user asks for: the step in microbatches, and how stages take them."""

from dataclasses import dataclass

from meshdsl.errors import ArgumentError, faults, is_a, nearest

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
CHUNKED = ("interleaved", "zb")  # those that take several chunks


@dataclass(frozen=True)
class Pipeline:
    """The batch in microbatches; gradients are added up, and reduced over devices once.

    Where the layers of the model are split over a mesh axis, the devices of that axis are the stages of a pipeline.

    Args:
      microbatches: per step; they divide the batch.
      schedule: of the stages: ``1f1b`` keeps few microbatches in flight, ``gpipe`` all of them; ``interleaved`` is
        ``1f1b`` with several chunks of layers per stage, for shorter bubbles; in ``zb``, gradients of weights have
        ticks of their own, for shorter bubbles (uniform zero-bubble, after Qi et al. 2023).
      chunks: per stage, for ``interleaved`` and ``zb``; microbatches are then a multiple of the stages.
      layers: per stage, in the order of the model; with several chunks, of every chunk. Default is equal numbers, or
        where the stages do not divide the layers, what takes the least time (``meshdsl.pipeline.balance``).
      batch: glob over the inputs whose first dim is the batch; default is every argument that no result replaces,
        or all but the first one if results replace nothing (an evaluation).
      per_microbatch: where the step needs the whole batch at once (batch statistics, say), take every microbatch for
        itself; without, that is an error.

    Raises ArgumentError, listing all that is none of these.
    """

    microbatches: int
    schedule: str = "1f1b"
    chunks: int = 1
    batch: str | None = None
    per_microbatch: bool = False
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no pipeline."""
        rows = []
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            rows.append(f"microbatches: {is_a(self.microbatches)}, not a number of microbatches")
        if self.schedule not in SCHEDULES:
            rows.append(f"schedule: no schedule {self.schedule!r}{nearest(self.schedule, SCHEDULES)}")
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            rows.append(f"chunks: {is_a(self.chunks)}, not a number of chunks of layers")
        elif self.chunks > 1 and self.schedule not in CHUNKED:
            one = f"{self.schedule!r} has one chunk per stage, not {self.chunks}"
            rows.append(f"chunks: {one}: 'interleaved' and 'zb' take more")
        if not isinstance(self.layers, tuple) or not all(type(n) is int and n > 0 for n in self.layers):
            rows.append(f"layers: {is_a(self.layers)}, not numbers of layers per stage, such as (3, 5, 5, 3)")
        if self.batch is not None and not isinstance(self.batch, str):
            rows.append(f"batch: {is_a(self.batch)}, not a glob over the inputs, such as 'batch/**'")
        if not isinstance(self.per_microbatch, bool):
            rows.append(f"per_microbatch: {is_a(self.per_microbatch)}, not True or False")
        if rows:
            raise ArgumentError(faults("arguments of Pipeline that do not fit:", rows))
