"""Checkpoints: the state of a run after some steps, saved so that the run resumes exactly.

orbax writes and reads the arrays shard by shard, every process its own. The number of steps done is also the position
in the data. A checkpoint is written under a temporary name and renamed when it is complete, so a process that is killed
while saving leaves the previous one intact. Objects of nnx are saved as their arrays; restoring makes new objects.
"""

from pathlib import Path
from typing import Any, cast

import jax
import orbax.checkpoint as ocp

from meshdsl.errors import ArgumentError, faults, shortened
from meshdsl.ir.graph import array_type
from meshdsl.trace.pure_step import named_arrays

State = tuple[Any, ...]


class Checkpoints:
    """The checkpoints of one run.

    Args:
      folder: where they are.
      keep: number of checkpoints to keep; older ones are deleted.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            folder.resolve(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    @property
    def newest(self) -> int | None:
        """Steps done at the newest checkpoint; None if there is none."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, state: State) -> None:
        """Saves the state after ``step`` steps."""
        self._manager.save(step, args=ocp.args.StandardSave(named_arrays(state)[0]))
        self._manager.wait_until_finished()

    def restore(self, step: int, state: State) -> State:
        """The state after ``step`` steps.

        Args:
          step: steps done.
          state: arrays or shapes of the state. Their shardings are those of the result, so a checkpoint of one mesh
            and plan restores onto another.

        Raises:
          ArgumentError: the checkpoint is of another state; the message lists every difference.
        """
        arrays, tree = named_arrays(state)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
        self._check(step, shapes)
        found = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        return cast(State, tree.unflatten([found[name] for name in shapes]))

    def close(self) -> None:
        """Releases the folder."""
        self._manager.close()

    def _check(self, step: int, shapes: dict[str, Any]) -> None:
        saved = self._manager.item_metadata(step)
        rows = [f"{name}: {_type(x)}, not in the checkpoint" for name, x in shapes.items() if name not in saved]
        rows += [f"{name}: not in this program" for name in saved if name not in shapes]
        both = [(name, _type(x), _type(saved[name])) for name, x in shapes.items() if name in saved]
        rows += [f"{name}: {new}, in the checkpoint {old}" for name, new, old in both if new != old]
        if rows:
            title = f"the checkpoint in {self._folder} after step {step} is of another state:"
            raise ArgumentError(faults(title, shortened(rows), "train into another folder, or resume that program"))


def _type(x: Any) -> str:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # keys are saved as their data
        x = jax.eval_shape(jax.random.key_data, x)
    return array_type(x.dtype, x.shape, ())
