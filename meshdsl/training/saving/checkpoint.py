"""Checkpoints: the state of a run after some steps, saved so that the run resumes exactly.

orbax writes and reads the arrays shard by shard, every process its own, in the background: ``save`` returns when the
state has been copied off the devices, so the next step may donate it. In a run of one process on CPU devices, the
devices copy it before they do the next step, and ``save`` returns at once: a thread does what orbax does before it
writes. It runs no program with collectives, since two threads could start such programs in different orders. The number
of steps done is also the position in the data. A checkpoint is

    state    the arrays; objects of nnx are saved as their arrays, and restoring makes new objects
    facts    JSON: the digest of every array, versions, and what the run says of itself (``meshdsl.training.run``)

and is renamed when both are complete, so a process that is killed while saving leaves the previous one intact. A state
with NaNs or infinities is never completed. Restoring verifies the digests; what does not come back as it was saved is
set aside under another name, and the checkpoint before it is restored.
"""

import asyncio
import json
import logging
import platform
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from shutil import disk_usage
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from meshdsl.errors import ArgumentError, CheckpointError, MeshDSLError, NonFiniteError, faults, first_line, shortened
from meshdsl.ir.graph import array_type
from meshdsl.trace.pure_step import named_arrays
from meshdsl.training.saving.digests import Digests, snapshot
from meshdsl.training.saving.storage import MAKE_ROOM, is_remote, reason, reported
from meshdsl.util.text import bytes_text
from meshdsl.util.version import version

log = logging.getLogger("meshdsl")

State = tuple[Any, ...]
Facts = Mapping[str, Any]
_STATE, _FACTS, _FILE, _SEAL = "state", "facts", "facts.json", "seal"
FACTS = f"{_FACTS}/{_FILE}"  # the file without which a checkpoint is none
_LAST = 15.0  # seconds in which processes complete a save when one of them ends with an error: others may have before
_COPYING = 6 * 3600  # seconds that other processes wait for the one that copies a checkpoint to a bucket
_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that is being written


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last save.

    Args:
      folder: where they are; also a remote one, such as ``gs://bucket/run``.
      keep: number of checkpoints to keep; older ones are deleted.
      keep_every: checkpoints after multiples of this many steps are kept as well.
      facts: what is saved with each, as JSON.
      only_finite: whether to refuse states with NaNs or infinities.
      publish: what the first process does before a checkpoint is completed, in the background.
      copy: the same, when all of its files are written: of the steps done, and the folder that has the files so far.
    """

    def __init__(
        self,
        folder: Path | str,
        keep: int = 2,
        keep_every: int | None = None,
        facts: Facts | None = None,
        only_finite: bool = True,
        publish: Callable[[], None] | None = None,
        copy: Callable[[int, Path], None] | None = None,
    ) -> None:
        self.folder = epath.Path(folder) if is_remote(folder) else epath.Path(folder).resolve()
        self._facts, self._only_finite, self._publish = dict(facts or {}), only_finite, publish
        self._copy, self._saved = copy, 0
        waits = ocp.AsyncOptions()
        if copy is not None:
            waits = ocp.AsyncOptions(timeout_secs=_COPYING, post_finalization_callback=self._copy_written)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            cleanup_tmp_directories=True,
            async_options=waits,
        )
        handlers = {_STATE: ocp.StandardCheckpointHandler(), _FACTS: _FactsHandler()}
        with reported(f"{self.folder} cannot hold checkpoints"):
            self._manager = _Manager(self.folder, options=options, item_handlers=handlers)
        self._thread = ThreadPoolExecutor(1, "save")
        self._started: Future[None] | None = None  # the save that the thread starts
        self._tracebacks = partial(_is_not_raised)  # an object of its own, for several may be open
        logging.getLogger("absl").addFilter(self._tracebacks)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        closing = threading.Thread(target=self._close_after_error, name="last save", daemon=True)
        closing.start()
        closing.join(None if jax.process_count() == 1 else _LAST)
        if closing.is_alive():
            log.warning("%s: what other processes do not save is not completed", self.folder)

    def _close_after_error(self) -> None:
        try:
            self.close()
        except MeshDSLError as error:
            log.warning("%s", error)  # the error that ends the block says more

    @property
    def newest(self) -> int | None:
        """Steps done at the newest checkpoint, once that is complete; None if there is none.

        Raises:
          NonFiniteError, CheckpointError: as ``wait``.
        """
        self.wait()
        return self._newest

    @property
    def _newest(self) -> int | None:
        step: int | None = self._manager.latest_step()
        return step

    @property
    def _steps(self) -> list[int]:
        """The steps after which there is a checkpoint, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(self, step: int, state: State) -> None:
        """Start to save the state after ``step`` steps; the one saved before is complete when this returns.

        Raises:
          NonFiniteError: the state saved before holds NaNs or infinities.
          CheckpointError: a state cannot be written.
        """
        arrays = named_arrays(state)[0]
        self.wait()
        self._check_space(arrays)
        if self._newest is not None and step <= self._newest:
            raise CheckpointError(
                f"{self.folder} has the state after step {self._newest}, and step {step} is no later one: "
                "resume from it"
            )
        copies = snapshot(arrays) if jax.process_count() == 1 else None
        if copies is None:
            self._save(step, arrays, Digests(arrays))
        else:
            self._started = self._thread.submit(lambda: self._save(step, copies, Digests(copies, in_parts=True)))

    def _save(self, step: int, arrays: Mapping[str, Any], digests: Digests) -> None:
        facts = {"versions": versions(), "position": {"batches": step}, **self._facts}
        started = _FactsSave(step, facts, digests, self._only_finite, self._publish)
        self._saved = step
        with reported(f"{self.folder} cannot hold the state after step {step}"):
            self._manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), facts=started))

    def _copy_written(self) -> None:
        """Copies the checkpoint whose files are written; orbax calls this before it renames their folder."""
        if self._copy is not None and jax.process_index() == 0:
            [place] = (each for each in self.folder.iterdir() if each.name.startswith(f"{self._saved}{_UNFINISHED}"))
            self._copy(self._saved, Path(place))

    def wait(self) -> None:
        """Wait until everything is saved.

        Raises:
          NonFiniteError, CheckpointError: as ``save``.
        """
        try:
            with reported(f"{self.folder} cannot hold the newest state"):
                started, self._started = self._started, None
                if started is not None:
                    started.result()
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
        except MeshDSLError as error:
            self._remove_unfinished()
            if isinstance(error, NonFiniteError):
                raise
            left = f"the newest checkpoint is after step {self._newest}" if self._steps else "there is no checkpoint"
            raise CheckpointError(f"{error}; {left}") from error.__cause__

    def facts(self, step: int) -> dict[str, Any]:
        """Return what was saved beside the state after ``step`` steps; nothing if it cannot be read."""
        try:
            found = json.loads((self.folder / str(step) / _FACTS / _FILE).read_text())
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        seal = found.pop(_SEAL, None)
        return found if seal == _seal(found) else {}

    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the newest checkpoint whose facts can be read; nothing if there is none."""
        return next(filter(None, map(self.facts, self._steps)), {})

    def restore_newest(self, state: State) -> tuple[int, State] | None:
        """Return the steps done and the state of the newest checkpoint that is intact; None without checkpoints.

        Damaged ones that are newer are renamed to ``damaged-STEP``, with a warning each; if none is intact, all stay as
        they are. All processes have to call this.

        Args:
          state: arrays or shapes of the state. Their shardings are those of the result, so a checkpoint of one mesh
            and plan restores onto another.

        Raises:
          ArgumentError: the checkpoint is of another state; the message lists every difference.
          CheckpointError: none is intact.
        """
        self.wait()
        damaged: list[tuple[int, str]] = []
        for step in self._steps:
            fault, found = self._restore(step, state)
            if not fault:
                for each in damaged:
                    self._set_aside(*each)
                return step, cast(State, found)
            damaged.append((step, fault))
        if damaged:
            rows = [f"after step {step}: {fault}" for step, fault in damaged]
            title = f"no checkpoint in {self.folder} is intact, or none can be read now:"
            raise CheckpointError(
                faults(title, rows, "run it again if the storage failed; --folder names another place to start anew")
            )
        return None

    def close(self) -> None:
        """Wait until everything is saved, and release the folder."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._manager.close()
            logging.getLogger("absl").removeFilter(self._tracebacks)

    def _remove_unfinished(self) -> None:
        """Removes what a save that failed has left; in a bucket, the next run does."""
        if jax.process_index() == 0 and not is_remote(str(self.folder)):
            with suppress(OSError):
                for each in self.folder.iterdir():
                    if _UNFINISHED in each.name:
                        each.rmtree()
        self._manager.reload()

    def _restore(self, step: int, state: State) -> tuple[str, State | None]:
        """Return what is wrong with a checkpoint, or its state; in every process the same.

        Reading is local to each process, so that a fault of one leaves no other waiting.
        """
        arrays, tree = named_arrays(state)
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, arrays)
        place, found, fault = self.folder / str(step) / _STATE, None, ""
        try:
            handler = ocp.StandardCheckpointHandler()
            self._check(step, shapes, handler.metadata(place))
            found = handler.restore(place, args=ocp.args.StandardRestore(shapes))
        except (ArgumentError, MemoryError, jax.errors.JaxRuntimeError):  # the devices' fault, not the checkpoint's
            raise
        except Exception as error:  # of whatever library reads the files
            fault = first_line(error).partition(" [tensorstore_spec")[0] or type(error).__name__
        saved = self.facts(step).get("digests")
        if not fault and not saved:
            fault = "its digests cannot be read"
        if multihost_utils.process_allgather(np.array(bool(fault))).any():
            return fault or "another process cannot read it", None
        assert found is not None and saved is not None
        wrong = [name for name, digest in Digests(found).result()[0].items() if digest != saved.get(name)]
        if wrong:
            return f"{', '.join(shortened(wrong, 3))}: not as saved", None
        return "", cast(State, tree.unflatten([found[name] for name in shapes]))

    def _set_aside(self, step: int, fault: str) -> None:
        place = self.folder / f"damaged-{step}"
        if jax.process_index() == 0:
            if place.exists():
                place.rmtree()
            (self.folder / str(step)).rename(place)
            log.warning("the checkpoint after step %d is damaged: %s; it is now %s", step, fault, place.name)
        multihost_utils.sync_global_devices(f"set aside {step}")
        self._manager.reload()

    def _check(self, step: int, shapes: dict[str, Any], saved: Any) -> None:
        """Raise ArgumentError unless a checkpoint has the arrays of this state."""
        rows = [f"{name}: {_type(x)}, not in the checkpoint" for name, x in shapes.items() if name not in saved]
        rows += [f"{name}: not in this program" for name in saved if name not in shapes]
        both = [(name, _type(x), _type(saved[name])) for name, x in shapes.items() if name in saved]
        rows += [f"{name}: {new}, in the checkpoint {old}" for name, new, old in both if new != old]
        if rows:
            title = f"the checkpoint in {self.folder} after step {step} is of another state:"
            raise ArgumentError(faults(title, shortened(rows), "train into another folder, or resume that program"))

    def _check_space(self, arrays: Mapping[str, Any]) -> None:
        """Raises CheckpointError, in all processes, unless the disk that they share has room for the arrays."""
        if is_remote(str(self.folder)):
            return
        size, fault = sum(x.size * x.dtype.itemsize for x in arrays.values()), "another process says why"
        try:
            free = disk_usage(self.folder).free
        except OSError as error:
            free, fault = -1, reason(error)
        if jax.process_count() > 1:  # of which no one may look while another one writes
            words = multihost_utils.broadcast_one_to_all(np.array([free], np.int64).view(np.uint32))
            free = int(np.asarray(words).view(np.int64)[0])
        if free < 0:
            raise CheckpointError(f"{self.folder} cannot hold the newest state: {fault}")
        if size > free:
            has = f"{self.folder} has {bytes_text(free)} free"
            raise CheckpointError(f"{has}, and a checkpoint needs {bytes_text(size)}: {MAKE_ROOM}")


def _seal(facts: Facts) -> str:
    """What shows that facts are those that were written."""
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _type(x: Any) -> str:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):  # keys are saved as their data
        x = jax.eval_shape(jax.random.key_data, x)
    return array_type(x.dtype, x.shape, ())


@cache
def versions() -> dict[str, str]:
    """Returns the versions of what computes a state, and saves it."""
    libraries = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "orbax-checkpoint")}
    return {"meshdsl": version(), "python": platform.python_version(), **libraries}


def _is_not_raised(record: logging.LogRecord) -> bool:
    """Whether a record is no traceback of an error that orbax raises again in who waits for what it does meanwhile."""
    return not (record.exc_info and record.module in ("future", "async_checkpointer", "checkpoint_manager"))


class _Manager(ocp.CheckpointManager):  # type: ignore[misc]  # orbax has no types
    """A manager that leaves it to the training loop when several processes stop."""

    def reached_preemption(self, step: int) -> bool:
        """False; jax, which orbax would ask, takes every question for the dispatch that this process has come to."""
        return False


# ---- What is saved beside the arrays ---------------------------------------------------------------------------------


class _FactsHandler(ocp.AsyncCheckpointHandler):  # type: ignore[misc]
    """Writes the facts of a checkpoint as JSON when the digests of its arrays are there."""

    async def async_save(self, directory: epath.Path, args: "_FactsSave") -> list[ocp.future.Future]:
        writing = self._write(directory, args)
        return [ocp.future.CommitFutureAwaitingContractedSignals(writing, name="facts")]

    def save(self, directory: epath.Path, args: "_FactsSave") -> None:
        asyncio.run(self._write(directory, args))

    def restore(self, directory: epath.Path, args: Any = None) -> Any:
        return json.loads((directory / _FILE).read_text())

    async def _write(self, directory: epath.Path, args: "_FactsSave") -> None:
        digests, bad = args.digests.result()
        if bad and args.only_finite:
            raise NonFiniteError(
                f"the state after step {args.step} is not saved: NaNs or infinities in {', '.join(shortened(bad, 3))}"
            )
        if jax.process_index() == 0:
            if args.publish is not None:
                args.publish()
            content = {**args.facts, "digests": digests}
            (directory / _FILE).write_text(json.dumps({**content, _SEAL: _seal(content)}))


@ocp.args.register_with_handler(_FactsHandler, for_save=True)
@dataclass
class _FactsSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    step: int
    facts: Facts
    digests: Digests
    only_finite: bool
    publish: Callable[[], None] | None


@ocp.args.register_with_handler(_FactsHandler, for_restore=True)
@dataclass
class _FactsRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Nothing; orbax takes no handler without it."""
