"""Metrics of a run: one line of JSON per step and per evaluation in ``metrics.jsonl``, and the curves drawn from it.

    {"step": 50, "loss": 6.1, "seconds": 0.4, "input seconds": 0.01, "tokens/s": 5120.0}
    {"step": 50, "evaluation": {"held-out loss": 6.3}}

``seconds`` is the time since the step before was over, with that of input, checkpoints and evaluations in it. Lines
reach the file within half a second of the next one, and before an evaluation and a checkpoint. What is no finite number
is null. A run that resumes from a checkpoint drops the lines of later steps, which it will do again.
"""

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

COLORS = ("#1b4f91", "#b3541e", "#3d7a4e", "#7a4d8b")  # of the curves
Metrics = dict[str, float]
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

    Args:
      file: None in a process that does not write.
      done: steps whose lines the file keeps.
    """

    def __init__(self, file: Path | None, done: int) -> None:
        self.history = History()
        self._file, self._flushed = None, 0.0
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            lines = [line for line in _lines(file) if line["step"] <= done]
            _write(file, lines)
            for line in lines:
                self.history.add(line)
            self._file = file.open("a")

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def step(self, step: int, loss: float, **more: float) -> None:
        """Adds one step."""
        self._add({"step": step, "loss": loss if math.isfinite(loss) else None, **more})

    def evaluation(self, step: int, metrics: Metrics) -> None:
        """Adds an evaluation of the state after ``step`` steps."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._add({"step": step, "evaluation": finite})

    def _add(self, line: dict[str, Any]) -> None:
        self.history.add(line)
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            if time.monotonic() - self._flushed > _FLUSH:
                self.flush()

    def flush(self) -> None:
        """Writes the lines that are still in memory."""
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()


def _lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of the file; a process killed while writing leaves half a line at the end."""
    if not file.exists():
        return []
    *complete, _ = file.read_text().split("\n")
    return [json.loads(line) for line in complete]


def _write(file: Path, lines: list[dict[str, Any]]) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if file.exists():  # its time is that of the last step, which a supervisor reads
        os.utime(temporary, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    os.replace(temporary, file)


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
