"""The supervisor of processes on this machine that train together: the end of one ends all, and all start again.

    launch ── first step ── ... steps ... ── fault ──▶ launch           (as ``Supervision`` allows)
                  └─ plans for fewer are made (``contingency``)

``start`` launches the processes and waits until they end, or hang (``progress``). ``members`` decides who goes on. It
writes what happens to ``events.jsonl`` (``events``), and at the end says how long the run stood still.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from types import FrameType

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.contingency import LOG, Contingency, plan_file
from meshdsl.training.events import FAULT, LAUNCH, PLANNED, STOP, add_event, downtimes, read_events
from meshdsl.training.launchers import ADDRESS, COUNT, INDEX
from meshdsl.training.members import Members, smaller_meshes
from meshdsl.training.progress import Patience, Progress
from meshdsl.util.exit_status import BAD_INPUT, INFEASIBLE, NON_FINITE, PEER_ENDED, STOPPED

PARENT = "MESHDSL_PARENT"  # process that started this one, and with which it ends
PLANNED_FILE = "MESHDSL_PLAN"  # file of a plan that was made for this launch
DEVICES = "JAX_LOCAL_DEVICE_IDS"  # GPUs of this machine that a process uses
STACKS = signal.SIGUSR1  # on which a process writes the stacks of its threads
HOUR = 3600.0
FINAL = (BAD_INPUT, INFEASIBLE, NON_FINITE)  # exit statuses of a process that would end so again
KILLED = -signal.SIGKILL
_POLL, _LOOK = 0.05, 0.5  # seconds between two looks at the processes, and at the files of the run


@dataclass(frozen=True)
class Supervision:
    """How processes are supervised.

    Args:
      restarts: most restarts within an hour, of all processes together.
      least: fewest processes to go on with; None: all.
      grow_after: seconds of training with fewer after which all are tried again; doubled when that fails.
      grace: seconds in which they save and end on SIGTERM, before they are killed.
      patience: when they hang; without restarts only if it states the time of a step.
    """

    restarts: int = 0
    least: int | None = None
    grow_after: float = 600.0
    grace: float = 120.0
    patience: Patience = field(default_factory=Patience)

    @property
    def sees_hangs(self) -> bool:
        """Whether processes that hang are ended."""
        return self.restarts > 0 or self.patience.step is not None


def start(command: Sequence[str], mesh: Mesh, count: int, folder: Path, supervision: Supervision | None = None) -> int:
    """Runs ``count`` processes of a Python command on this machine, and returns an exit status.

    It is 0 if all end well, 1 if one fails, and the status of a process whose failure would repeat (``FINAL``). SIGTERM
    and Ctrl-C are forwarded to all; the status is then 128 and the signal, as of one process. The output of the first
    process is shown, that of the others is in ``folder/process-1.log`` and so on.

    Args:
      command: arguments of Python.
      mesh: of all processes.
      count: number of processes.
      folder: of the run.
      supervision: when they are started again, with ``--resume``, and when fewer; by default never.
    """
    folder.mkdir(parents=True, exist_ok=True)
    run = _SupervisedRun(command, mesh, count, folder, supervision or Supervision())
    previous = {kind: signal.signal(kind, run.forward) for kind in (signal.SIGTERM, signal.SIGINT)}
    before = len(read_events(folder))
    try:
        status = run.run()
    finally:
        run.kill()
        for kind, handler in previous.items():
            signal.signal(kind, handler)
    for each in downtimes(read_events(folder)[before:]):
        print(each, file=sys.stderr)
    return status


@dataclass(frozen=True)
class _End:
    """How the processes of a launch ended.

    Args:
      status: of the command, if this is the end of it.
      fault: what failed; empty if nothing did.
      after: seconds from there until it was seen, or from the signal to stop until all had ended.
      who: position of the process that failed, if that is known.
      grows: whether they were stopped to start more of them.
    """

    status: int
    fault: str = ""
    after: float = _POLL
    who: int | None = None
    grows: bool = False


class _SupervisedRun:
    """The processes of a command, launch after launch."""

    def __init__(self, command: Sequence[str], mesh: Mesh, count: int, folder: Path, supervision: Supervision) -> None:
        self.command, self.mesh, self.folder, self.supervision = command, mesh, folder, supervision
        self.members = Members(count, supervision.least or count, supervision.grow_after)
        self.launch: _Launch | None = None
        self.received = 0  # signal
        self._meshes = {count: mesh}  # by number of processes
        self._contingencies: dict[int, Contingency] = {}  # by number of processes that plans are below

    @property
    def present(self) -> int:
        """The number of processes now."""
        return len(self.members.present)

    def run(self) -> int:
        rmtree(self.folder / "plans", ignore_errors=True)  # of another command
        failures: list[float] = []
        while True:
            end = self._run_once(again=self.launch is not None)
            if end.grows:
                continue
            if end.fault and not self.received:
                print(end.fault, file=sys.stderr)
            if not end.fault or self.received:
                break
            if not self.members.is_growing:  # whose failure costs a short while, at growing intervals
                failures = [at for at in failures if time.monotonic() - at < HOUR] + [time.monotonic()]
                if end.status in FINAL or len(failures) > self.supervision.restarts:
                    break
                print(f"restart {len(failures)} of at most {self.supervision.restarts} per hour", file=sys.stderr)
            before, enough = self.present, self.members.failed(end.who, self._plannable)
            if self.received:  # meanwhile
                break
            if not enough:
                print(self._too_few(), file=sys.stderr)
                break
            if self.present < before:  # and no step was done since the restart before
                print(self._fewer(), file=sys.stderr)
        if self.received and end.status in (STOPPED, KILLED):
            return 128 + self.received
        return 1 if end.status == KILLED else end.status

    def _run_once(self, again: bool) -> _End:
        """Launches those present, and waits until they have ended; if that was to start more of them, takes these."""
        mesh = self._meshes[self.present]
        add_event(self.folder, LAUNCH, mesh=str(mesh), processes=self.present)
        launch = self.launch = _Launch(self, mesh, again)
        if self.received:  # meanwhile
            launch.stop(self.supervision.grace)
        stepped = grows = False
        looked = 0.0
        while (end := launch.ended()) is None:
            time.sleep(_POLL)
            if time.monotonic() - looked < _LOOK:
                continue
            looked = time.monotonic()
            if not stepped and launch.progress.has_stepped:
                stepped = True
                self.members.stepped()
            if stepped and not self.received:
                self._plan_fewer()
                if self.members.may_grow and not grows:
                    grows = True
                    launch.stop(self.supervision.grace)
        if not stepped and launch.progress.has_stepped:
            self.members.stepped()
        grows = grows and end.status == STOPPED and not self.received
        if grows:
            self.members.grow()
        what = f"stopped to start all {self.present} processes again" if grows else end.fault.partition("\n")[0]
        if end.fault:
            add_event(self.folder, FAULT, what=what, after=round(end.after, 3))
        elif end.status == STOPPED:
            add_event(self.folder, STOP, what=what or "stopped", after=round(end.after, 3))
        if grows:
            print(what, file=sys.stderr)
        return replace(end, grows=grows)

    # ---- Fewer processes ----

    def _plan_fewer(self) -> None:
        """Goes on to plan for one process fewer, or as many fewer as can be planned."""
        if self.supervision.restarts and self.members.least < self.present:
            self._contingency().advance()

    def _contingency(self) -> Contingency:
        if self.present not in self._contingencies:
            planned = [event for event in read_events(self.folder) if event["event"] == PLANNED]
            axes = [axis for axis in planned[-1]["batch"] if axis in self.mesh.names] if planned else []
            axis = axes[0] if axes else self.mesh.names[0]
            count = len(self.members.all)
            meshes = smaller_meshes(self.mesh, count, axis, self.present, self.members.least)
            own = {PARENT: str(os.getpid())}
            self._contingencies[self.present] = Contingency(self.command, self.folder, meshes, own)
        return self._contingencies[self.present]

    def _plannable(self) -> int:
        fewer = self._contingency()
        fewer.wait(self.supervision.patience.start, lambda: bool(self.received))
        if fewer.found is None:
            return 0
        processes, self._meshes[processes] = fewer.found
        return processes

    def _fewer(self) -> str:
        count, mesh = len(self.members.all), self._meshes[self.present]
        wait = f"all are tried again after {self.members.wait:g} s"
        return f"no step was done since: going on with {self.present} of {count} processes over {mesh}; {wait}"

    def _too_few(self) -> str:
        least, present = self.members.least, self.present
        why = f"no more than --min-processes {least} are left"
        if present > least:
            why = f"no mesh of {least} to {present - 1} processes can be planned ({self.folder / 'plans' / LOG})"
        return f"no step was done since, and {why}: the run ends"

    # ---- Signals ----

    def forward(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self.launch is not None:
            self.launch.stop(self.supervision.grace)

    def kill(self) -> None:
        for contingency in self._contingencies.values():
            contingency.end()
        if self.launch is not None:
            self.launch.end(signal.SIGKILL)


class _Launch:
    """Processes that were launched together.

    Args:
      run: whose members are launched.
      mesh: of theirs.
      again: whether there was a launch before.
    """

    def __init__(self, run: _SupervisedRun, mesh: Mesh, again: bool) -> None:
        self.folder, self.supervision = run.folder, run.supervision
        command = [*run.command, "--resume"] if again and "--resume" not in run.command else list(run.command)
        if mesh != run.mesh:
            command += ["--mesh", str(mesh)]
        slots, devices = run.members.present, mesh.size // run.present
        common = {ADDRESS: f"127.0.0.1:{_free_port()}", COUNT: str(len(slots)), PARENT: str(os.getpid())}
        common |= {PLANNED_FILE: str(plan_file(run.folder, mesh))} if again else {}
        self.progress = Progress(run.folder, self.supervision.patience)
        self._alive = time.monotonic()
        self._asked, self._deadline = 0.0, math.inf
        self.processes = []
        for index, slot in enumerate(slots):
            own = {INDEX: str(index)}
            if len(run.members.all) > 1:
                own[DEVICES] = ",".join(str(slot * devices + i) for i in range(devices))
            self.processes.append(_start(command, {**common, **own}, index, run.folder, "a" if again else "w"))

    def end(self, kind: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(kind)

    def stop(self, grace: float) -> None:
        """Asks them to save and end."""
        self._asked, self._deadline = time.monotonic(), time.monotonic() + grace
        self.end(signal.SIGTERM)

    def ended(self) -> _End | None:
        """How they ended; then all have, for the others would wait forever. None while they run."""
        since, self._alive = self._alive, time.monotonic()
        is_stopping = self._deadline < math.inf
        running = any(process.poll() is None for process in self.processes)
        ended = [None, 0, STOPPED]
        if running or is_stopping:
            ended.append(PEER_ENDED)  # the one that it means will have ended, too
        if is_stopping:
            ended.append(-signal.SIGTERM)  # before it could handle it
        failed = [i for i, process in enumerate(self.processes) if process.poll() not in ended]
        if failed:
            self._kill()
            first = min(failed, key=lambda i: _rank(self.processes[i].returncode))
            status = self.processes[first].returncode
            after = time.monotonic() - since
            return _End(status if status in FINAL else 1, self._failure(first), after, first)
        if not running:
            stopped = any(process.returncode for process in self.processes)
            return _End(STOPPED if stopped else 0, after=time.monotonic() - self._asked if is_stopping else 0.0)
        if time.monotonic() > self._deadline:
            self._kill()
            grace = self.supervision.grace
            return _End(KILLED, f"not ended {grace:g} s after SIGTERM: killed", grace)
        silence, allowed = self.progress.silence() if self.supervision.sees_hangs and not is_stopping else (0.0, 0.0)
        if silence > allowed:
            return self._hang(silence, allowed)
        return None

    def _hang(self, silence: float, allowed: float) -> _End:
        stopped = [i for i, process in enumerate(self.processes) if _state(process.pid) in ("T", "t", "D")]
        self.end(STACKS)
        time.sleep(2)  # to write them
        self._kill()
        fault = f"no step was done for {allowed:.3g} s; the processes wrote their stacks"
        return _End(1, fault, silence, stopped[0] if len(stopped) == 1 else None)

    def _kill(self) -> None:
        self.end(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _failure(self, index: int) -> str:
        status = self.processes[index].returncode
        text = f"process {index} of {len(self.processes)} ended with status {status}, the others were ended"
        return text if index == 0 else f"{text}\nits output: {self.folder / f'process-{index}.log'}"


def _start(
    command: Sequence[str], environment: dict[str, str], index: int, folder: Path, mode: str
) -> subprocess.Popen[bytes]:
    with nullcontext() if index == 0 else (folder / f"process-{index}.log").open(mode) as log:
        return subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **environment},
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it
        )


def _rank(status: int) -> int:
    """How likely others failed because of a process with this status, rather than the other way round; 0 is likely."""
    if status < 0 and status != -signal.SIGABRT:  # as which jax ends a process that has lost another one
        return 0
    if status == PEER_ENDED:
        return 3
    return 2 if status in FINAL else 1


def _state(pid: int) -> str:
    """State of a process, as Linux has it: R, S, D, T, ...; empty elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
