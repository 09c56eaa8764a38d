"""Plans for fewer processes, made while a run trains, so that going on with fewer does not wait for planning.

Planning needs no devices: a process of low priority runs the command of the run with ``--plan-ahead`` on a CPU, and
saves the plan under ``plans/`` in the folder of the run. It is made for the topology of the plan that is running.
Meshes that cannot be planned, for they do not divide the batch, say, are passed over.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.joining.launchers import PARENT
from meshdsl.training.observing.events import add_event

PLAN_AHEAD = "--plan-ahead"
LOG = "planning.log"


def plan_file(folder: Path, mesh: Mesh) -> Path:
    """Where a supervised run keeps its plan for a mesh."""
    return folder / "plans" / f"{mesh}.json"


class Contingency:
    """The largest mesh of fewer processes that has a plan.

    Args:
      command: arguments of Python that run the command.
      folder: of the run.
      meshes: candidates by their number of processes, the largest first.
    """

    def __init__(self, command: Sequence[str], folder: Path, meshes: dict[int, Mesh]) -> None:
        self._command, self._folder = command, folder
        self._left: Iterator[tuple[int, Mesh]] = iter(meshes.items())
        self._candidate: tuple[int, Mesh] | None = next(self._left, None)
        self._planning: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self.is_ready = False

    @property
    def found(self) -> tuple[int, Mesh] | None:
        """Number of processes and mesh, if it is ready and there is one."""
        return self._candidate if self.is_ready else None

    def advance(self) -> None:
        """Starts to plan, or looks whether that has ended; it does not wait."""
        if self.is_ready:
            return
        if self._candidate is None or plan_file(self._folder, self._candidate[1]).exists():
            self.is_ready = True
        elif self._planning is None:
            self._planning, self._started = self._start(self._candidate[1]), time.monotonic()
        elif (status := self._planning.poll()) is not None:
            seconds = round(time.monotonic() - self._started, 3)
            add_event(self._folder, "planned ahead", mesh=str(self._candidate[1]), seconds=seconds, status=status)
            self._planning = None
            if status == 0:
                self.is_ready = True
            else:
                self._candidate = next(self._left, None)

    def wait(self, seconds: float, is_stopped: Callable[[], bool]) -> None:
        """Waits until it is ready, for at most so long; what takes longer is passed over."""
        end = time.monotonic() + seconds
        while not self.is_ready and not is_stopped():
            self.advance()
            time.sleep(0.05)
            if time.monotonic() > end:
                self.end()
                end = time.monotonic() + seconds

    def end(self) -> None:
        """Ends the planning."""
        if self._planning is not None:
            self._planning.kill()
            self._planning.wait()

    def _start(self, mesh: Mesh) -> subprocess.Popen[bytes]:
        place = plan_file(self._folder, mesh)
        place.parent.mkdir(exist_ok=True)
        log: TextIO
        with (place.parent / LOG).open("a") as log:
            return subprocess.Popen(
                [sys.executable, *self._command, "--mesh", str(mesh), PLAN_AHEAD],
                env={**os.environ, PARENT: str(os.getpid()), "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
