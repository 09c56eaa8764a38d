"""Checkpoints: the state of a run after some steps, saved so that it goes on exactly.

The state's arrays are written and read by orbax, shard by shard, every process its own. Where a run stands in its
data is the number of steps done. A checkpoint is written beside its final name and renamed when complete, so a
process killed while saving leaves the one before it intact.
"""

from pathlib import Path
from typing import Any, cast

import jax
import orbax.checkpoint as ocp

from meshdsl.errors import ArgumentError, faults, shortened
from meshdsl.ir.graph import array_type

State = tuple[Any, ...]


class Checkpoints:
    """The checkpoints of one run, in one folder; the last ``keep`` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self._folder = folder
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(
            folder.resolve(), options=options, item_handlers=ocp.StandardCheckpointHandler()
        )

    @property
    def newest(self) -> int | None:
        """The steps done at the newest checkpoint; None if there is none."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, step: int, state: State) -> None:
        """Save ``state`` after ``step`` steps."""
        self._manager.save(step, args=ocp.args.StandardSave(_by_name(state)))
        self._manager.wait_until_finished()

    def restore(self, step: int, state: State) -> State:
        """The state after ``step`` steps.

        Args:
          state: arrays or shapes of the state; a sharding on them is where the arrays go, so a
            checkpoint of one mesh and plan restores onto another.

        Raises ArgumentError if the checkpoint is of another state.
        """
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, _by_name(state))
        self._check(step, shapes)
        found = self._manager.restore(step, args=ocp.args.StandardRestore(shapes))
        return cast(State, jax.tree.unflatten(jax.tree.structure(state), [found[name] for name in shapes]))

    def close(self) -> None:
        """Release the folder."""
        self._manager.close()

    def _check(self, step: int, shapes: dict[str, Any]) -> None:
        saved = self._manager.item_metadata(step)
        rows = [f"{name}: {_type(x)}, not in the checkpoint" for name, x in shapes.items() if name not in saved]
        rows += [f"{name}: not of this program" for name in saved if name not in shapes]
        both = [(name, _type(x), _type(saved[name])) for name, x in shapes.items() if name in saved]
        rows += [f"{name}: {new}, in the checkpoint {old}" for name, new, old in both if new != old]
        if rows:
            title = f"the checkpoint in {self._folder} after step {step} is of another state:"
            raise ArgumentError(faults(title, shortened(rows), "train into another folder, or go on with that program"))


def _by_name(state: State) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _type(x: Any) -> str:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # keys are kept as their data
        x = jax.eval_shape(jax.random.key_data, x)
    return array_type(x.dtype, x.shape, ())
