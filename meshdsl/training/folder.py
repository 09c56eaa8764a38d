"""The folder of a run belongs to one run at a time, and all its processes see it.

``run.lock`` names the process that holds the folder; that process touches the file every few seconds. Its holder is
gone if its process is, on the same machine, or if the file has not been touched for a while, on another. A holder that
was paused for so long that another run took its folder ends when it goes on.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshdsl.errors import ArgumentError
from meshdsl.util.exit_status import LOST
from meshdsl.util.text import seconds_text

LOCK, CHECKPOINTS, METRICS, EVENTS = "run.lock", "checkpoints", "metrics.jsonl", "events.jsonl"  # in a run's folder
HEARTBEAT, STALE = 5.0, 60.0  # seconds between two touches, and without one after which the holder is gone
VISIBLE = 20.0  # seconds in which a file of one process reaches the others, over a network file system


class FolderLock:
    """Holds the folder of a run for this process; a context manager.

    Raises:
      ArgumentError: another run holds it, or it cannot be written; the message names the process and its machine.
    """

    def __init__(self, folder: Path) -> None:
        self.file, self.token = folder / LOCK, secrets.token_hex(8)
        self._ended = threading.Event()

    def __enter__(self) -> "FolderLock":
        check_free(self.file.parent)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            own = self.file.with_suffix(f".{self.token}")
            own.write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "token": self.token}))
            os.replace(own, self.file)
        except OSError as error:
            raise ArgumentError(f"{self.file.parent} cannot be the folder of a run: {error}") from error
        if not self._is_held():  # another one was faster
            check_free(self.file.parent)
        threading.Thread(target=self._touch, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._is_held():
            self.file.unlink()

    def _is_held(self) -> bool:
        return (_holder(self.file) or {}).get("token") == self.token

    def _touch(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            if self._is_lost():
                print(f"{self.file.parent} was taken by another run; this one ends", file=sys.stderr, flush=True)
                os._exit(LOST)
            with suppress(OSError):
                os.utime(self.file)

    def _is_lost(self) -> bool:
        """Whether another run took the folder; not where the file cannot be read for a moment, or was given back."""
        try:
            lost = json.loads(self.file.read_text()).get("token") != self.token
        except FileNotFoundError:  # another one took the folder, and has ended
            lost = True
        except (OSError, ValueError):
            lost = False
        return lost and not self._ended.is_set()


def check_free(folder: Path) -> None:
    """Raises ArgumentError if another run holds the folder."""
    file = folder / LOCK
    holder = _holder(file)
    if holder is None or (holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname()):
        return
    quiet = time.time() - file.stat().st_mtime if file.exists() else STALE
    here = holder.get("host") == socket.gethostname()
    if quiet < STALE and not (here and not is_alive(int(holder.get("pid", 0)))):
        who = f"process {holder.get('pid')} on {holder.get('host')}, seen {seconds_text(quiet)} ago"
        raise ArgumentError(f"{folder} is in use by {who}: wait for it, or --folder names another place")


@contextmanager
def shared_folder(folder: Path) -> Iterator[None]:
    """Holds the folder in the first process, and makes sure that all processes see it; all have to call this.

    Raises:
      ArgumentError: another run holds it, or some processes see another folder of this name; raised in all of them.
    """
    lock, fault = FolderLock(folder), ""
    first = jax.process_index() == 0
    if first:
        try:
            lock.__enter__()
        except ArgumentError as error:
            fault = str(error)
    try:
        _agree(folder, lock, fault)
        yield
    finally:
        if first and not fault:
            lock.__exit__(*sys.exc_info())


def _agree(folder: Path, lock: FolderLock, fault: str) -> None:
    if jax.process_count() == 1:
        if fault:
            raise ArgumentError(fault)
        return
    token = np.frombuffer(bytes.fromhex(lock.token), np.uint8)
    held, of_first = multihost_utils.broadcast_one_to_all((np.array(not fault), token))
    if not held:
        raise ArgumentError(fault or f"process 0 cannot hold {folder}, and says why")
    sees = _appears(folder / LOCK, bytes(np.asarray(of_first)).hex())
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.array(sees))).tolist()
    if blind:
        who = f"processes {', '.join(map(str, blind))} do" if len(blind) > 1 else f"process {blind[0]} does"
        raise ArgumentError(f"{who} not see what process 0 writes to {folder.resolve()}: give a folder that all share")


def _appears(file: Path, token: str) -> bool:
    end = time.monotonic() + VISIBLE
    while (_holder(file) or {}).get("token") != token:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _holder(file: Path) -> dict[str, Any] | None:
    """What the file says of its holder; None if there is none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def is_alive(pid: int) -> bool:
    """Whether there is such a process on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:  # of Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # a zombie has ended
    except OSError:
        return True
