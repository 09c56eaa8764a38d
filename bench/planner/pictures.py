"""Plots of optimality gaps and planning times."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
_COLORS = ("#1b4f91", "#b3541e", "#3d7a4e")
_SMALLEST = 1e-6  # position of a gap of 0 on the logarithmic axis


def draw_gaps(rows: Rows, file: Path) -> None:
    """Draws the cumulative distribution of gaps, by number of mesh axes."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    panel = figure.subplots()
    for axes, color in zip((1, 2, 3), _COLORS, strict=True):
        gaps = sorted(max(r["gap"], _SMALLEST) for r in rows if r["mesh"].count("=") == axes)
        parts = [(i + 1) / len(gaps) for i in range(len(gaps))]
        panel.step(
            [_SMALLEST / 2, *gaps, 1e-1],
            [0.0, *parts, 1.0],
            where="post",
            color=color,
            label=f"{axes} axis" if axes == 1 else f"{axes} axes",
        )
    panel.set(xscale="log", xlabel=f"gap (0 drawn at {_SMALLEST:g})", ylabel="part of the plans", ylim=(0, 1.02))
    panel.axvline(1e-2, color="#999999", linestyle="--", linewidth=1)
    panel.legend(loc="lower right", frameon=False)
    _save(figure, file)


def draw_times(rows: Rows, file: Path) -> None:
    """Draws planning seconds over equations on logarithmic axes, with a line of slope one."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    panel = figure.subplots()
    equations, seconds = [r["equations"] for r in rows], [r["seconds"] for r in rows]
    panel.plot(equations, seconds, "o-", color=_COLORS[0], label="planning")
    if rows:
        slope = [seconds[-1] * n / equations[-1] for n in equations]
        panel.plot(equations, slope, "--", color="#999999", label="linear")
    panel.set(xscale="log", yscale="log", xlabel="equations", ylabel="processor seconds")
    panel.legend(frameon=False)
    _save(figure, file)


def _save(figure: Figure, file: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": file.stem}):
        figure.savefig(file, metadata={"Date": None})
