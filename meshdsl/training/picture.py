"""The curves of a run as a picture."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from meshdsl.training.record import History

COLORS = ("#1b4f91", "#b3541e", "#3d7a4e", "#7a4d8b")


def draw_curves(history: History, file: Path, levels: dict[str, float] | None = None) -> Path:
    """Draw the losses over steps, and below them other metrics, into ``file`` (PNG, SVG or PDF by its suffix).

    Args:
      levels: name -> loss, drawn as dashed lines to compare with.
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
