"""The processes of one launch on this machine: started, watched, stopped and killed together."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.joining.launchers import ADDRESS, COUNT, DEVICES, INDEX, PARENT, STACKS
from meshdsl.training.supervision.contingency import plan_file
from meshdsl.util.exit_status import BAD_INPUT, INFEASIBLE, NON_FINITE, PEER_ENDED, STOPPED

PLANNED_FILE = "MESHDSL_PLAN"  # of a plan that was made for this launch
FINAL = (BAD_INPUT, INFEASIBLE, NON_FINITE)  # exit statuses of a process that would end so again
KILLED = -signal.SIGKILL
_WRITING = 2.0  # seconds in which stacks are written


@dataclass(frozen=True)
class Command:
    """What is launched, again and again.

    Args:
      arguments: of Python.
      mesh: of all processes.
      hosts: number of machines.
      each: number of processes on each; those of machine ``i`` are numbered from ``i * each``.
      folder: of the run.
      grace: seconds in which processes save and end on SIGTERM, before they are killed.
    """

    arguments: tuple[str, ...]
    mesh: Mesh
    hosts: int
    each: int
    folder: Path
    grace: float

    @property
    def count(self) -> int:
        """The number of all processes."""
        return self.hosts * self.each

    def parse(self, mesh: str) -> Mesh:
        """A mesh of fewer processes, as its text in an order says, with the topology of the command."""
        return Mesh.parse(mesh, self.mesh.topology if self.mesh.states_topology else None)


@dataclass(frozen=True)
class Launch:
    """One launch, on all machines.

    Args:
      number: of the launch.
      present: the processes that are launched; the first one is process 0.
      mesh: of theirs.
      address: where they meet.
      again: whether there was a launch before.
    """

    number: int
    present: tuple[int, ...]
    mesh: Mesh
    address: str
    again: bool


@dataclass(frozen=True)
class End:
    """How the processes of a launch ended.

    Args:
      status: of the command, if this is the end of it.
      fault: what failed; empty if nothing did.
      after: seconds from there until it was seen, or from the signal to stop until all had ended.
      who: the process that failed, if that is known.
      lost: processes of machines that are gone; None if no machine is.
    """

    status: int
    fault: str = ""
    after: float = 0.0
    who: int | None = None
    lost: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """How likely the others failed because of this one, rather than the other way round; 0 is likely."""
        if self.lost is not None or (self.status < 0 and self.status != -signal.SIGABRT):
            return 0  # jax aborts a process that has lost another one
        if self.status == PEER_ENDED:
            return 3
        return 2 if self.status in FINAL else 1


class Processes:
    """The processes of a launch that are on this machine.

    Args:
      command: what is launched.
      launch: the launch.
      host: number of this machine.
    """

    def __init__(self, command: Command, launch: Launch, host: int) -> None:
        self._command, self._launch = command, launch
        self._alive = time.monotonic()
        self._asked, self._deadline = 0.0, math.inf
        own = [slot for slot in launch.present if slot // command.each == host]
        self._processes = {slot: self._start(slot) for slot in own}
        self._groups = [process.pid for process in self._processes.values()]  # that have not been killed

    def end(self, kind: signal.Signals) -> None:
        """Sends a signal to those that run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(kind)

    def stop(self) -> None:
        """Asks them to save and end, once."""
        if self._deadline < math.inf:
            return
        self._asked, self._deadline = time.monotonic(), time.monotonic() + self._command.grace
        self.end(signal.SIGTERM)

    def kill_now(self) -> None:
        """Kills them and what they have started, also of those that have ended; it does not wait."""
        while self._groups:
            with suppress(ProcessLookupError, PermissionError):  # all have ended, as Linux and macOS say it
                os.killpg(self._groups.pop(), signal.SIGKILL)

    def kill(self, stacks: bool = False) -> None:
        """Ends them, after they have written the stacks of their threads."""
        if stacks:
            self.end(STACKS)
            time.sleep(_WRITING)
        self.kill_now()
        for process in self._processes.values():
            process.wait()

    @property
    def frozen(self) -> list[int]:
        """Those that are stopped, or wait for a disk."""
        return [slot for slot, process in self._processes.items() if _state(process.pid) in ("T", "t", "D")]

    def ended(self) -> End | None:
        """How they ended; then all have, for the others would wait forever. None while they run."""
        since, self._alive = self._alive, time.monotonic()
        is_stopping = self._deadline < math.inf
        running = any(process.poll() is None for process in self._processes.values())
        ended = [None, 0, STOPPED]
        if running or is_stopping:
            ended.append(PEER_ENDED)  # the one that it means will have ended, too
        if is_stopping:
            ended.append(-signal.SIGTERM)  # before it could handle it
        failed = [slot for slot, process in self._processes.items() if process.poll() not in ended]
        if failed:
            self.kill()
            return min((self._failure(slot, time.monotonic() - since) for slot in failed), key=lambda end: end.rank)
        if not running:
            self.kill()  # what they have started
            stopped = any(process.returncode for process in self._processes.values())
            return End(STOPPED if stopped else 0, after=time.monotonic() - self._asked if is_stopping else 0.0)
        if time.monotonic() > self._deadline:
            self.kill()
            grace = self._command.grace
            return End(KILLED, f"not ended {grace:g} s after SIGTERM: killed", grace)
        return None

    def _failure(self, slot: int, after: float) -> End:
        status, index = self._processes[slot].returncode, self._launch.present.index(slot)
        text = f"process {index} of {len(self._launch.present)} ended with status {status}, the others were ended"
        log = "" if index == 0 else f"\nits output: {self._command.folder / f'process-{index}.log'}"
        return End(status, text + log, after, slot)

    def _start(self, slot: int) -> "subprocess.Popen[bytes]":
        launch, command = self._launch, self._command
        index, devices = launch.present.index(slot), command.mesh.size // command.count
        arguments = [*command.arguments]
        if launch.again and "--resume" not in arguments:
            arguments.append("--resume")
        if launch.mesh != command.mesh:
            arguments += ["--mesh", str(launch.mesh)]
        own = {ADDRESS: launch.address, COUNT: str(len(launch.present)), INDEX: str(index), PARENT: str(os.getpid())}
        if command.each > 1:
            first = slot % command.each * devices
            own[DEVICES] = ",".join(str(first + i) for i in range(devices))
        if launch.again:
            own[PLANNED_FILE] = str(plan_file(command.folder, launch.mesh))
        place = command.folder / f"process-{index}.log"
        with nullcontext() if index == 0 else place.open("a") as log:
            return subprocess.Popen(
                [sys.executable, *arguments],
                env={**os.environ, **own},
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
            )


class Machine:
    """This machine: its processes, launch after launch, and the signal that it received.

    Args:
      command: what is launched.
      host: number of this machine.

    Attributes:
      received: the signal, or 0.
    """

    def __init__(self, command: Command, host: int) -> None:
        self._command, self._host = command, host
        self._processes: Processes | None = None
        self.received = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal; Ctrl-C after another one ends the processes at once."""
        at_once, self.received = bool(self.received) and number == signal.SIGINT, number
        if self._processes is None:
            return
        if at_once:
            self._processes.kill_now()
        else:
            self._processes.stop()

    def launch(self, launch: Launch) -> Processes | None:
        """Starts the processes of a launch that belong here; None if there are none."""
        here = any(slot // self._command.each == self._host for slot in launch.present)
        self._processes = Processes(self._command, launch, self._host) if here else None
        if self.received and self._processes is not None:  # meanwhile
            self._processes.stop()
        return self._processes

    def kill(self) -> None:
        """Ends its processes."""
        if self._processes is not None:
            self._processes.kill()


def _state(pid: int) -> str:
    """State of a process, as Linux has it: R, S, D, T, ...; empty elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
