"""The folder of a run belongs to one run at a time, and all its processes see it.

``run.lock`` names the process that holds the folder: its machine, number and start. That process rewrites the file
every few seconds. A file is replaced only by who has read its last version, so of several runs that find the folder
free in the same instant one has it. The holder is gone if its process is, as far as this process can see; if it is
elsewhere, when it has been silent for a while. A holder that was paused for so long that another run took its folder
ends when it goes on.
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
from meshdsl.training.saving.storage import DEADLINE, LOCK, SharedFile, is_remote, reported
from meshdsl.util.exit_status import LOST
from meshdsl.util.text import seconds_text

CHECKPOINTS, METRICS, EVENTS = "checkpoints", "metrics.jsonl", "events.jsonl"  # in a run's folder
PROFILE = "profile"  # there too
HEARTBEAT, STALE = 5.0, 60.0  # seconds between two touches, and without one after which the holder is gone
VISIBLE = 20.0  # seconds in which a file of one process reaches the others, over a network file system
_FAILED = (OSError, ValueError, RuntimeError)  # what storage raises


class _InUse(ArgumentError):
    """Another run holds the folder."""


_held: "set[FolderLock]" = set()  # by this process


def give_back() -> None:
    """Gives back the folders that this process holds, before it ends without leaving their contexts."""
    for lock in list(_held):
        lock.__exit__(None, None, None)


class FolderLock:
    """Holds the folder of a run for this process; a context manager.

    Args:
      folder: a local folder, or one in a bucket.

    Raises:
      ArgumentError: another run holds it, or it cannot be written; the message names the process and its machine.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        self._generation = b""  # of the file as this process has written it
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> "FolderLock":
        with reported(f"{self.folder} cannot be the folder of a run", ArgumentError):
            self._file = SharedFile(self.folder, LOCK)
            while not self._generation:  # as long as others are faster
                content, found = self._file.read()
                _check_free(self.folder, content)
                self._generation = self._file.replace(self._text(), found)
        _held.add(self)
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        _held.discard(self)
        self._heart.join(timeout=DEADLINE)
        with suppress(*_FAILED):
            self._file.replace(None, self._generation)

    def _text(self) -> bytes:
        return json.dumps({**_this_process(), "token": self.token, "seen": time.time()}).encode()

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT):
            if fault := self._lost():
                print(f"{self.folder} {fault}; this run ends", file=sys.stderr, flush=True)
                os._exit(LOST)

    def _lost(self) -> str:
        """Says that this process is alive; returns how the folder was lost, if it was.

        It is not where storage does not answer for a while.
        """
        with suppress(*_FAILED):
            written = self._file.replace(self._text(), self._generation)
            content, found = (None, written) if written else self._file.read()
            if written or _holder(content).get("token") == self.token:
                self._generation = found
            elif not self._ended.is_set():
                return "was removed, or another run took and left it" if content is None else "was taken by another run"
        return ""


def check_free(folder: Path | str) -> None:
    """Raises ArgumentError if another run holds the folder, or nobody can say."""
    with reported(f"{folder} cannot be the folder of a run", ArgumentError):
        _check_free(folder, SharedFile(folder, LOCK).read()[0])


def _check_free(folder: Path | str, content: bytes | None) -> None:
    holder = _holder(content)
    quiet = max(0.0, time.time() - holder.get("seen", 0.0))
    if not holder or quiet > STALE or (_is_here(holder) and not _is_running(holder)):
        return
    who = f"process {holder.get('pid')} on {holder.get('host')}, seen {seconds_text(quiet)} ago"
    raise _InUse(
        f"{folder} is in use by {who}: wait for it ({STALE:g} s if it is gone), or --folder names another place"
    )


@contextmanager
def shared_folder(folder: Path | str, supervised: bool = False) -> Iterator[None]:
    """Holds the folder in the first process, and makes sure that all processes see it; all have to call this.

    Args:
      folder: a local folder, or one in a bucket.
      supervised: whether a supervisor started this process.

    Raises:
      ArgumentError: another run holds it, or some processes see another folder of this name; raised in all of them.
    """
    lock, fault = FolderLock(folder), ""
    first = jax.process_index() == 0
    if first:
        try:
            _hold(lock, supervised or jax.process_count() > 1)
        except ArgumentError as error:
            fault = str(error)
    try:
        _agree(folder, lock, fault)
        yield
    finally:
        if first and not fault:
            lock.__exit__(*sys.exc_info())


def _hold(lock: FolderLock, waits: bool) -> None:
    """Holds a folder.

    Args:
      lock: of the folder.
      waits: until its holder is gone, for this process may have been started again on another machine.
    """
    end = time.monotonic() + (STALE + HEARTBEAT if waits else 0.0)
    while True:
        try:
            lock.__enter__()
            return
        except _InUse:
            if time.monotonic() >= end:
                raise
            time.sleep(HEARTBEAT)


def _agree(folder: Path | str, lock: FolderLock, fault: str) -> None:
    if jax.process_count() == 1:
        if fault:
            raise ArgumentError(fault)
        return
    token = np.frombuffer(bytes.fromhex(lock.token), np.uint8)
    held, of_first = multihost_utils.broadcast_one_to_all((np.array(not fault), token))
    if not held:
        raise ArgumentError(fault or f"process 0 cannot hold {folder}, and says why")
    sees = _appears(folder, bytes(np.asarray(of_first)).hex())
    blind = np.flatnonzero(~multihost_utils.process_allgather(np.array(sees))).tolist()
    if blind:
        who = f"processes {', '.join(map(str, blind))} do" if len(blind) > 1 else f"process {blind[0]} does"
        place = folder if is_remote(folder) else Path(folder).resolve()
        raise ArgumentError(f"{who} not see what process 0 writes to {place}: give a folder that all share")


def _appears(folder: Path | str, token: str) -> bool:
    file, end = SharedFile(folder, LOCK), time.monotonic() + VISIBLE
    while True:
        with suppress(*_FAILED):
            if _holder(file.read()[0]).get("token") == token:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.1)


# ---- Processes -------------------------------------------------------------------------------------------------------


def _holder(content: bytes | None) -> dict[str, Any]:
    """What a lock says of its holder; nothing if there is none, or if it does not say when the holder was seen."""
    try:
        found = json.loads(content or b"")
        return {**found, "seen": float(found["seen"]), "pid": int(found["pid"])}
    except (ValueError, TypeError, KeyError, OverflowError):
        return {}


def _this_process() -> dict[str, Any]:
    return {**_machine(), "pid": os.getpid(), "started": _started(os.getpid())}


def _machine() -> dict[str, Any]:
    """What tells the processes that this one can see from others: containers may have one name, and one kernel."""
    kernel = namespace = ""
    with suppress(OSError):  # of Linux
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "kernel": kernel, "namespace": namespace}


def _is_here(holder: dict[str, Any]) -> bool:
    return _machine().items() <= holder.items()


def _is_running(holder: dict[str, Any]) -> bool:
    """Whether a process that would be here is: another one may have its number."""
    pid = int(holder.get("pid", 0))
    return is_alive(pid) and _started(pid) == holder.get("started")


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty where this cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


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
