"""Metrics of a run: lines of JSON in ``metrics.jsonl``, and the curves drawn from it.

    {"time": 1790000000.0, "step": 50, "loss": 6.1, "seconds": 0.4, "input seconds": 0.01, "tokens/s": 5120.0}
    {"time": 1790000000.1, "step": 50, "evaluation": {"held-out loss": 6.3}}
    {"time": 1790000009.0, "resumed after": 40}

The file only grows: a run that resumes from a checkpoint says after which step, and from there on its lines supersede
those of later steps above. ``read_metrics`` returns the lines that count. Lines reach the file within half a second of
the next one, and before an evaluation and a checkpoint. What is no finite number is null; ``time`` is in seconds since
1970.
"""

import json
import logging
import math
import os
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from matplotlib.figure import Figure

from meshdsl.errors import first_line

log = logging.getLogger("meshdsl")

COLORS = ("#1b4f91", "#b3541e", "#3d7a4e", "#7a4d8b")  # of the curves
Metrics = dict[str, float]
OnMetrics: TypeAlias = Callable[[int, Metrics], Any]  # steps done, values by name
_FLUSH = 0.5  # seconds after which lines reach the file


# ---- metrics.jsonl ---------------------------------------------------------------------------------------------------


@dataclass
class History:
    """The loss of every step, and ``(step, metrics)`` of every evaluation."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, Metrics]] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Adds one line of the file."""
        if "evaluation" in line:
            metrics = {name: math.nan if value is None else value for name, value in line["evaluation"].items()}
            self.evaluations.append((line["step"], metrics))
        else:
            self.losses.append(math.nan if line["loss"] is None else line["loss"])


class MetricsFile:
    """The file of a run, with the history of its first ``done`` steps; a context manager.

    Nothing is written before the first step is done, so that the file's time is always that of a step.

    Args:
      file: None in a process that does not write.
      done: steps whose lines still count.
      on_metrics: functions that are called with the steps done and the values of each line; one that raises an error
        is not called again, and a warning says so.
    """

    def __init__(self, file: Path | None, done: int, on_metrics: Iterable[OnMetrics] = ()) -> None:
        self.history = History()
        self._path, self._done, self._on_metrics = file, done, [*on_metrics]
        self._file: TextIOWrapper | None = None
        self._flushed = 0.0
        if file is not None and file.exists():
            for line in read_metrics(file):
                if line["step"] <= done:
                    self.history.add(line)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def step(self, step: int, loss: float, **more: float) -> None:
        """Adds one step."""
        self._add(step, {"loss": loss if math.isfinite(loss) else None, **more})
        self._call(step, {"loss": loss, **more})

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Adds an evaluation of the state after ``step`` steps."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._add(step, {"evaluation": finite})
        self._call(step, metrics)

    def _add(self, step: int, values: dict[str, Any]) -> None:
        line = {"time": round(time.time(), 3), "step": step, **values}
        self.history.add(line)
        if self._path is not None:
            self._file = self._file or self._opened(self._path)
            self._file.write(json.dumps(line) + "\n")
            if time.monotonic() - self._flushed > _FLUSH:
                self.flush()

    def _opened(self, path: Path) -> TextIOWrapper:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b")
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            resumed = {"time": round(time.time(), 3), "resumed after": self._done}
            file.write(b"" if file.read() == b"\n" else b"\n")  # a killed process left half a line
            file.write(json.dumps(resumed).encode() + b"\n")
        return TextIOWrapper(file)

    def _call(self, step: int, values: Metrics) -> None:
        for each in [*self._on_metrics]:
            try:
                each(step, dict(values))
            except Exception as error:  # of whatever a tracker does
                self._on_metrics.remove(each)
                name = getattr(each, "__name__", type(each).__name__)
                log.warning("%s is not called again: %s: %s", name, type(error).__name__, first_line(error))

    def flush(self) -> None:
        """Writes the lines that are still in memory."""
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()


def read_metrics(file: Path | str) -> list[dict[str, Any]]:
    """Returns the lines of steps and evaluations that count: none of a step that was done again after a resume.

    A process that is killed while writing leaves half a line, which is left out.

    Example:
      >>> losses = [line["loss"] for line in read_metrics("runs/digits/metrics.jsonl") if "loss" in line]
    """
    found: list[dict[str, Any]] = []
    for text in Path(file).read_text(errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "resumed after" in line:
            found = [each for each in found if each["step"] <= line["resumed after"]]
        else:
            found.append(line)
    return found


# ---- Loss spikes -----------------------------------------------------------------------------------------------------


class RecentLosses:
    """The last losses, and whether the next one is far above them.

    A loss is a spike if it is above their median by more than 8 times their median absolute deviation (of normally
    distributed losses 5.4 standard deviations) and by more than a tenth. The first 20 losses are none.
    """

    WINDOW, LEAST, DEVIATIONS, SHARE = 50, 20, 8.0, 0.1

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def spike_above(self, loss: float) -> float | None:
        """Adds a loss, and returns the median that it is far above; None if it is not."""
        if not math.isfinite(loss):
            return None
        usual = self._usual_below(loss) if len(self._sorted) >= self.LEAST else None
        if len(self._recent) == self.WINDOW:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(loss)
        insort(self._sorted, loss)
        return usual

    def _usual_below(self, loss: float) -> float | None:
        usual = median(self._sorted)  # of a sorted list, which is fast
        excess = loss - usual
        if excess <= self.SHARE * abs(usual):
            return None
        deviation = median(abs(x - usual) for x in self._sorted)
        return usual if excess > self.DEVIATIONS * deviation else None


# ---- Curves ----------------------------------------------------------------------------------------------------------


def draw_curves(history: History, file: Path, levels: dict[str, float] | None = None) -> Path:
    """Draws the losses over steps, and other metrics below, into ``file`` (PNG, SVG or PDF by its suffix).

    Args:
      history: the metrics.
      file: file to write; it is returned.
      levels: losses by name, drawn as dashed lines to compare with.
    """
    names = dict.fromkeys(name for _, metrics in history.evaluations for name in metrics)
    losses = [name for name in names if "loss" in name]
    others = [name for name in names if name not in losses]
    figure = Figure(figsize=(7, 4 + 2.5 * bool(others)), layout="constrained")
    panels = figure.subplots(1 + bool(others), squeeze=False, sharex=True)[:, 0]
    steps = range(1, len(history.losses) + 1)
    panels[0].plot(steps, history.losses, color="#9db4d0", linewidth=1, label="training loss")
    for name, level in (levels or {}).items():
        panels[0].axhline(level, color="#777777", linestyle="--", linewidth=1)
        panels[0].annotate(name, (len(history.losses), level), ha="right", va="bottom", fontsize=8, color="#555555")
    _draw(panels[0], history, losses, "loss")
    if others:
        _draw(panels[1], history, others, "held out")
    panels[-1].set_xlabel("step")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    return file


def _draw(axes: Any, history: History, names: list[str], title: str) -> None:
    for name, color in zip(names, COLORS * len(names), strict=False):
        points = [(step, metrics[name]) for step, metrics in history.evaluations if name in metrics]
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3, label=name)
    axes.set_ylabel(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
