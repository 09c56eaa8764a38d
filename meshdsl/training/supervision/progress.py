"""Whether a run makes progress, seen from outside: its supervisor reads the files that its first process writes.

Steps that have become a line of ``metrics.jsonl`` are done. Before the
first step of a launch, after a step that an evaluation or a checkpoint follows, and after the last step there is more
to do than a step, so more time is allowed.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from meshdsl.training.observing.events import FIRST_STEP, LAST_STEP, read_events
from meshdsl.training.saving.folder import EVENTS, METRICS

_TAIL = 16384  # bytes of the metrics that are read


@dataclass(frozen=True)
class Patience:
    """How long processes may do no step before they are said to hang.

    Args:
      step: seconds for a step. None takes ``medians`` times the median of the last steps, at least ``least``, and
        ``start`` where something else than a step is due.
      start: seconds from the launch to the first step, and for an evaluation, a checkpoint and the end of a run.
      save_every: steps between checkpoints.
      evaluate_every: steps between evaluations.
      medians: multiple of the median.
      least: seconds.
      sink: steps in one dispatch, whose lines come at once.
    """

    step: float | None = None
    start: float = 1800.0
    save_every: int = 50
    evaluate_every: int = 50
    medians: float = 20.0
    least: float = 60.0
    sink: int = 1

    def allowed(self, last: list[dict[str, Any]]) -> float:
        """The seconds that may pass after these lines of metrics, the newest last, until there is another one."""
        if self.step is not None:
            return self.step
        steps = [line for line in last if "seconds" in line]
        if not steps:
            return self.start
        done, evaluated = steps[-1]["step"], "evaluation" in last[-1]
        if done % self.save_every == 0 or (done % self.evaluate_every == 0 and not evaluated):
            return self.start
        return max(self.least, self.medians * self.sink * float(median(line["seconds"] for line in steps)))


class Progress:
    """The progress of the processes of one launch.

    Args:
      folder: of the run.
      patience: how long they may do no step.
    """

    def __init__(self, folder: Path, patience: Patience, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._patience, self._clock = folder, patience, clock
        self._before = len(read_events(folder))  # of earlier launches
        self._sizes = (0, 0)  # of the events and the metrics
        self._changed = clock()  # when there was a sign of a step, as seen here
        self._first = self._last = False

    @property
    def has_stepped(self) -> bool:
        """Whether they did a step."""
        self._look()
        return self._first

    @property
    def reached(self) -> int:
        """The last step of all launches."""
        file = self._folder / METRICS
        steps = [line["step"] for line in (_tail(file) if file.exists() else ()) if "seconds" in line]
        return max(steps, default=0)

    def silence(self) -> tuple[float, float]:
        """Seconds without a step so far, and as many as are allowed."""
        self._look()
        silence = self._clock() - self._changed
        if not self._first or self._last:
            return silence, self._patience.start
        soonest = self._patience.step or self._patience.least
        if silence < soonest:  # without reading the file
            return silence, soonest
        file = self._folder / METRICS
        return silence, self._patience.allowed(_tail(file) if file.exists() else [])

    def _look(self) -> None:
        """Notices that the files have grown; clocks of machines that share them need not agree."""
        sizes = _size(self._folder / EVENTS), _size(self._folder / METRICS)
        if sizes[0] != self._sizes[0]:
            kinds = {each["event"] for each in read_events(self._folder)[self._before :]}
            self._first, self._last = FIRST_STEP in kinds, LAST_STEP in kinds
        if self._first and sizes != self._sizes:
            self._changed = self._clock()
        self._sizes = sizes


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _tail(file: Path) -> list[dict[str, Any]]:
    """The last lines of the file, as far as they are complete: a killed process leaves half a line."""
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL))
        lines = opened.read().split(b"\n")
    first = 0 if file.stat().st_size <= _TAIL else 1
    found = []
    for line in lines[first:-1]:
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
