"""One supervised run of ``meshdsl train`` that is disturbed, and what has to hold at its end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from meshdsl.training.saving.folder import is_alive

ROOT = Path(__file__).parent.parent.parent
PROGRAM = Path(__file__).parent / "program.py"
EVERY, HANG, GRACE, GROW = 5, 5, 20, 2  # steps between checkpoints; seconds of --hang-timeout, --grace, --grow-after
LIMIT = 120.0  # seconds from a fault to the next step, whatever the fault is


class Wrong(AssertionError):
    """What must not happen in a disturbed run."""


class Disturbed:
    """A run of ``count`` processes in a folder.

    Args:
      folder: of the run; new.
      count: processes, each with one device.
      steps: of the run.
      rng: draws who is hit.
    """

    def __init__(self, folder: Path, count: int, steps: int, rng: random.Random) -> None:
        self.folder, self.count, self.steps, self.rng = folder, count, steps, rng
        self.meshes = {count}  # numbers of devices that it has run on
        folder.mkdir(parents=True)
        self.devices(count)
        self.start()

    # ---- the command -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the command, which resumes where there is a checkpoint."""
        out = (self.folder / "output.txt").open("a")
        self.supervisor = subprocess.Popen(
            _command(self.folder, self.count, self.steps), **_surroundings(self.folder, out)
        )

    def end(self) -> int:
        """Waits for the command, and returns its status."""
        try:
            status = self.supervisor.wait(timeout=LIMIT + self.steps)
        except subprocess.TimeoutExpired:
            raise Wrong(f"not ended {LIMIT + self.steps:g} s after the last fault\n{self.said()}") from None
        if left := self.alive():
            raise Wrong(f"processes {left} outlive the command")
        return status

    def clear(self) -> None:
        """Kills whatever is left of it."""
        for pid in (self.supervisor.pid, *self.alive()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.supervisor.wait()

    # ---- what is seen from outside -----------------------------------------------------------------------------------

    def pids(self) -> dict[int, int]:
        """The number and process id of the training processes that are alive."""
        found = {}
        for file in self.folder.glob("process-*[0-9]"):
            with suppress(ValueError, OSError):
                found[int(file.name.split("-")[1])] = int(file.read_text())
        return {index: pid for index, pid in found.items() if is_alive(pid)}

    def alive(self) -> list[int]:
        """All processes of the run, by what is in their environment."""
        mark, found = f"CHAOS_FOLDER={self.folder}".encode(), []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (each / "environ").read_bytes().split(b"\0") and is_alive(int(each.name)):
                    found.append(int(each.name))
        return found

    def saved(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(int(p.name) for p in (self.folder / "checkpoints").glob("*") if p.name.isdigit())

    def losses(self) -> dict[int, float]:
        """The loss of every step."""
        return losses(self.folder)

    def said(self) -> str:
        """The end of what the command printed."""
        return "\n".join((self.folder / "output.txt").read_text(errors="replace").splitlines()[-40:])

    def wait(self, what: str, until: Callable[[], bool], limit: float = LIMIT) -> None:
        """Waits until something holds; Wrong after the limit, or if the command ends before."""
        start = time.monotonic()
        while not until():
            if self.supervisor.poll() is not None:
                raise Wrong(f"ended with status {self.supervisor.returncode} before {what}\n{self.said()}")
            if time.monotonic() - start > limit:
                raise Wrong(f"{what}: not within {limit:g} s\n{self.said()}")
            time.sleep(0.05)

    # ---- faults ------------------------------------------------------------------------------------------------------

    def devices(self, count: int) -> None:
        """Says how many of the processes find a device."""
        (self.folder / "devices").write_text(str(count))

    def kill(self) -> None:
        """Kills one process."""
        os.kill(self._one(), signal.SIGKILL)

    def pause(self) -> None:
        """Stops one process, as a machine that stands still."""
        os.kill(self._one(), signal.SIGSTOP)

    def stuck(self) -> None:
        """One process waits in its input, until the hang is seen."""
        self._spoil_input("wait")

    def raised(self) -> None:
        """The input of one process raises."""
        self._spoil_input("raise")

    def _spoil_input(self, how: str) -> None:
        before = self.pids()
        file = self.folder / f"{how}-{self.rng.choice(list(before))}"
        file.touch()
        self.wait("the processes are ended", lambda: not set(before.values()) & set(self.pids().values()))
        file.unlink()

    def stop(self) -> None:
        """SIGTERM, and the command again."""
        self.supervisor.send_signal(signal.SIGTERM)
        status = self.end()
        if status not in (143, 0):
            raise Wrong(f"status {status} after SIGTERM, not 143\n{self.said()}")
        if status:
            self.start()

    def orphaned(self) -> None:
        """Kills the supervisor; its processes end by themselves, and the command is given again."""
        self.supervisor.kill()
        self.supervisor.wait()
        start = time.monotonic()
        while left := self.alive():
            if time.monotonic() - start > 30:
                raise Wrong(f"processes {left} outlive their supervisor by 30 s")
            time.sleep(0.1)
        self.start()

    def damaged(self) -> None:
        """Flips a byte of the newest checkpoint, or cuts one of its files, and kills one process."""
        newest = self.saved()[-1]
        files = [p for p in (self.folder / "checkpoints" / str(newest)).rglob("*") if p.is_file() and p.stat().st_size]
        file = self.rng.choice(files)
        content = bytearray(file.read_bytes())
        if self.rng.random() < 0.5:
            content[self.rng.randrange(len(content))] ^= 1 << self.rng.randrange(8)
        else:
            del content[self.rng.randrange(len(content)) :]
        file.write_bytes(content)
        self.kill()

    def shrunk(self) -> None:
        """Takes away the device of the last process; what is left goes on, until it is there again."""
        if self.count < 2:
            return self.kill()
        self.devices(self.count - 1)
        self.meshes.add(self.count - 1)
        os.kill(self.pids()[max(self.pids())], signal.SIGKILL)
        step = max(self.losses())
        self.wait("fewer processes go on", lambda: max(self.losses()) > step + 1 and len(self.pids()) < self.count)
        self.devices(self.count)

    def _one(self) -> int:
        return self.rng.choice(list(self.pids().values()))

    # ---- the verdict -------------------------------------------------------------------------------------------------

    def judge(self, undisturbed: dict[int, dict[int, float]]) -> float:
        """Compares all losses with the undisturbed run, and returns the largest difference, of the first loss.

        Args:
          undisturbed: losses of undisturbed runs, by number of processes.

        Raises:
          Wrong: a loss differs; on one mesh by any bit, on several by more than 1e-6.
        """
        own, other = self.losses(), undisturbed[self.count]
        if list(own) and sorted(own) != sorted(other):
            raise Wrong(f"{len(own)} of {len(other)} losses")
        difference = max(abs(own[step] - other[step]) for step in other) / other[1]
        if not np.isfinite(difference) or difference > (1e-6 if len(self.meshes) > 1 else 0):
            at = next(step for step in other if own[step] != other[step])
            raise Wrong(f"the loss of step {at} is {own[at]!r}, undisturbed {other[at]!r}")
        return difference


FAULTS: dict[str, Callable[[Disturbed], None]] = {
    "killed": Disturbed.kill,
    "stands still": Disturbed.pause,
    "stuck in input": Disturbed.stuck,
    "input raises": Disturbed.raised,
    "stopped": Disturbed.stop,
    "supervisor killed": Disturbed.orphaned,
    "checkpoint damaged": Disturbed.damaged,
    "device lost": Disturbed.shrunk,
}


def losses(folder: Path) -> dict[int, float]:
    """The loss of every step in the metrics of a run; the last one written counts."""
    found = {}
    with suppress(FileNotFoundError):
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            with suppress(ValueError):  # a process was killed while it wrote the line
                line = json.loads(text)
                if "loss" in line:
                    found[line["step"]] = line["loss"]
    return found


def undisturbed(folder: Path, count: int, steps: int) -> dict[int, float]:
    """The losses of a run of so many processes without a fault."""
    run = Disturbed(folder, count, steps, random.Random(0))
    try:
        if status := run.end():
            raise Wrong(f"an undisturbed run of {count} processes ends with {status}\n{run.said()}")
        return run.losses()
    finally:
        run.clear()


def disturb(run: Disturbed, name: str) -> tuple[float, int]:
    """One fault, after at least one more checkpoint; returns the seconds until a step is done again, and steps lost.

    Raises:
      Wrong: it takes too long, the run ends, or goes on before the newest checkpoint.
    """
    before = run.saved()[-1] if run.saved() else 0
    run.wait("another checkpoint", lambda: bool(run.saved()) and run.saved()[-1] > before)
    time.sleep(run.rng.uniform(0, 0.5))
    saved, reached = run.saved(), max(run.losses())
    start, size = time.monotonic(), (run.folder / "output.txt").stat().st_size
    FAULTS[name](run)

    def resumed() -> list[int]:
        with (run.folder / "output.txt").open("rb") as file:
            file.seek(size)
            text = file.read().decode(errors="replace")
        return [int(line.split()[3]) for line in text.splitlines() if line.startswith("resumed after step ")]

    run.wait(f"resumed after {name}", lambda: bool(resumed()))
    written = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    run.wait("a step", lambda: (run.folder / "metrics.jsonl").stat().st_mtime_ns > written)
    least = saved[-2] if name == "checkpoint damaged" and len(saved) > 1 else saved[-1]
    if resumed()[0] < least:
        raise Wrong(f"resumed after step {resumed()[0]}, and the checkpoint after step {least} was complete")
    return time.monotonic() - start, max(reached - resumed()[0], 0)


def _command(folder: Path, count: int, steps: int) -> list[str]:
    options = {
        "--mesh": f"data={count}",
        "--processes": count,
        "--restarts": 1000,
        "--min-processes": 1,
        "--hang-timeout": HANG,
        "--grace": GRACE,
        "--grow-after": GROW,
        "--save-every": EVERY,
        "--keep": 3,
        "--steps": steps,
        "--folder": folder,
    }
    program = str(ROOT / "tests" / "chaos" / "program.py")
    return [
        sys.executable,
        "-m",
        "meshdsl",
        "train",
        program,
        "--resume",
        *(str(x) for o in options.items() for x in o),
    ]


def _surroundings(folder: Path, out) -> dict:
    own = {"PYTHONPATH": str(ROOT), "CHAOS_FOLDER": str(folder), "COLUMNS": "200"}
    environment = {name: x for name, x in {**os.environ, **own}.items() if name != "JAX_NUM_CPU_DEVICES"}
    return {"cwd": ROOT, "env": environment, "stdout": out, "stderr": subprocess.STDOUT}
