"""The supervisor of processes on this machine that train together: the end of one ends all, and all start again.

``start`` launches the processes, waits for them, and starts them again as ``Supervision`` says.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshdsl.training.folder import METRICS
from meshdsl.training.launchers import ADDRESS, COUNT, INDEX
from meshdsl.util.exit_status import BAD_INPUT, INFEASIBLE, NON_FINITE, STOPPED

PARENT = "MESHDSL_PARENT"  # process that started this one, and with which it ends
STACKS = signal.SIGUSR1  # on which a process writes the stacks of its threads
HOUR = 3600.0
FINAL = (BAD_INPUT, INFEASIBLE, NON_FINITE)  # exit statuses of a process that would end so again


@dataclass(frozen=True)
class Supervision:
    """How processes are supervised.

    Args:
      restarts: most restarts within an hour, of all processes together.
      hang: seconds without a step, after the first one, after which they hang; None never.
      grace: seconds in which they save and end on SIGTERM, before they are killed.
    """

    restarts: int = 0
    hang: float | None = None
    grace: float = 120.0


def start(command: Sequence[str], count: int, folder: Path, supervision: Supervision | None = None) -> int:
    """Runs ``count`` processes of a Python command on this machine, and returns an exit status.

    It is 0 if all end well, 1 if one fails, and the status of a process whose failure would repeat (``FINAL``). SIGTERM
    and Ctrl-C are forwarded to all; the status is then 128 and the signal, as of one process. The output of the first
    process is shown, that of the others is in ``folder/process-1.log`` and so on.

    Args:
      command: arguments of Python.
      count: number of processes.
      folder: of the run.
      supervision: when they are started again, with ``--resume``; by default never.
    """
    folder.mkdir(parents=True, exist_ok=True)
    supervision = supervision or Supervision()
    group = _Group(command, count, folder, supervision)
    previous = {kind: signal.signal(kind, group.forward) for kind in (signal.SIGTERM, signal.SIGINT)}
    failures: list[float] = []
    try:
        while True:
            group.launch(again=bool(failures))
            status, fault = group.wait()
            failures = [at for at in failures if time.monotonic() - at < HOUR] + [time.monotonic()]
            if not fault or group.received or status in FINAL or len(failures) > supervision.restarts:
                break
            print(f"{fault}\nrestart {len(failures)} of at most {supervision.restarts} per hour", file=sys.stderr)
        if fault and not group.received:
            print(fault, file=sys.stderr)
        return 128 + group.received if group.received and status in (STOPPED, -signal.SIGKILL) else status
    finally:
        group.end(signal.SIGKILL)
        for kind, handler in previous.items():
            signal.signal(kind, handler)


class _Group:
    """The processes of one command."""

    def __init__(self, command: Sequence[str], count: int, folder: Path, supervision: Supervision) -> None:
        self.command, self.count, self.folder, self.supervision = command, count, folder, supervision
        self.processes: list[subprocess.Popen[bytes]] = []
        self.received = 0  # signal
        self._deadline = math.inf

    def launch(self, again: bool) -> None:
        address = f"127.0.0.1:{_free_port()}"
        command = [*self.command, "--resume"] if again and "--resume" not in self.command else self.command
        self._launched = time.time()
        mode = "a" if again else "w"
        self.processes = [_start(command, address, self.count, i, self.folder, mode) for i in range(self.count)]
        if self.received:  # meanwhile
            self.end(signal.SIGTERM)

    def forward(self, number: int, frame: FrameType | None) -> None:
        self.received, self._deadline = number, time.monotonic() + self.supervision.grace
        self.end(signal.SIGTERM)

    def end(self, kind: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(kind)

    def wait(self) -> tuple[int, str]:
        """Waits for all, and returns a status and what failed; then all are ended, for they would wait forever."""
        while True:
            running = any(process.poll() is None for process in self.processes)
            ended = (None, 0, STOPPED, *((-signal.SIGTERM,) if self.received else ()))  # before it could handle it
            failed = [i for i, process in enumerate(self.processes) if process.poll() not in ended]
            if failed:
                self._kill()
                first = min(failed, key=lambda i: self.processes[i].returncode in FINAL)  # others fail without it
                status = self.processes[first].returncode
                return status if status in FINAL else 1, self._failure(first)
            if not running:
                stopped = any(process.returncode for process in self.processes)
                return STOPPED if stopped else 0, ""
            if self._hangs():
                self.end(STACKS)
                time.sleep(2)  # to write them
                self._kill()
                return 1, f"no step was done for {self.supervision.hang:g} s; the processes wrote their stacks"
            if time.monotonic() > self._deadline:
                self._kill()
                return -signal.SIGKILL, f"not ended {self.supervision.grace:g} s after SIGTERM: killed"
            time.sleep(0.05)

    def _hangs(self) -> bool:
        """Whether a step was done since the start, and none for as long as is allowed."""
        file = self.folder / METRICS  # which grows with the steps
        if self.supervision.hang is None or not file.exists():
            return False
        last = file.stat().st_mtime
        return last > self._launched and time.time() - last > self.supervision.hang

    def _kill(self) -> None:
        self.end(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _failure(self, index: int) -> str:
        status = self.processes[index].returncode
        text = f"process {index} of {self.count} ended with status {status}, the others were ended"
        return text if index == 0 else f"{text}\nits output: {self.folder / f'process-{index}.log'}"


def _start(
    command: Sequence[str], address: str, count: int, index: int, folder: Path, mode: str
) -> subprocess.Popen[bytes]:
    own = {ADDRESS: address, COUNT: str(count), INDEX: str(index), PARENT: str(os.getpid())}
    log = None if index == 0 else (folder / f"process-{index}.log").open(mode)
    return subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, **own},
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
