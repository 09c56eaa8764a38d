"""Checkpoints: everything that a run is made of, saved so that it resumes exactly.

That is the state's arrays (orbax; sharded arrays are written and read shard by shard), the
position in the data and the losses so far. A checkpoint is written beside its final name and
renamed when complete, so a process killed while saving leaves the one before it intact.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

State = tuple[Any, ...]


class Checkpoints:
    """The checkpoints of one run, in one folder; the last ``keep`` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, step: int, state: State, notes: dict[str, Any]) -> None:
        """Save ``state`` and ``notes`` (anything that JSON holds) after ``step`` steps."""
        arrays = ocp.args.StandardSave(list(state))
        self._manager.save(step, args=ocp.args.Composite(state=arrays, notes=ocp.args.JsonSave(notes)))
        self._manager.wait_until_finished()

    def restore(self, state: State) -> tuple[int, State, dict[str, Any]] | None:
        """The newest checkpoint as ``(step, state, notes)``; None if there is none.

        Args:
          state: arrays or shapes of the state; a sharding on them is where the arrays go, so a
            checkpoint of one mesh and plan restores onto another.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, list(state))
        wanted = ocp.args.Composite(state=ocp.args.StandardRestore(shapes), notes=ocp.args.JsonRestore())
        found = self._manager.restore(step, args=wanted)
        return step, tuple(found["state"]), found["notes"]

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()
