"""What a user asks for: the step in microbatches."""

from dataclasses import dataclass

from meshdsl.errors import ArgumentError, faults, is_a


@dataclass(frozen=True)
class Pipeline:
    """The batch in microbatches, one after the other; gradients are added up, and reduced over devices once.

    Args:
      microbatches: per step; they divide the batch.
      batch: glob over the inputs whose first dim is the batch; default is every argument that no result replaces.
      per_microbatch: where the step needs the whole batch at once (batch statistics, say), take every microbatch for
        itself; without, that is an error.

    Raises ArgumentError, listing all that is none of these.
    """

    microbatches: int
    batch: str | None = None
    per_microbatch: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no pipeline."""
        rows = []
        if not isinstance(self.microbatches, int) or isinstance(self.microbatches, bool) or self.microbatches < 1:
            rows.append(f"microbatches: {is_a(self.microbatches)}, not a number of microbatches")
        if self.batch is not None and not isinstance(self.batch, str):
            rows.append(f"batch: {is_a(self.batch)}, not a glob over the inputs, such as 'batch/**'")
        if not isinstance(self.per_microbatch, bool):
            rows.append(f"per_microbatch: {is_a(self.per_microbatch)}, not True or False")
        if rows:
            raise ArgumentError(faults("arguments of Pipeline that do not fit:", rows))
