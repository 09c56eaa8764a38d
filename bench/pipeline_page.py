"""Writes docs/evidence/pipelines.md and its picture: measured parts replace the text between marks, prose is preserved.

<!-- schedules -->
a table
<!-- end of schedules -->
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from bench.report import machine
from meshdsl.schedules.pipelined import Pipelined

DOCS = Path(__file__).parent.parent / "docs" / "evidence"
PAGE, PICTURE = DOCS / "pipelines.md", DOCS / "pipelines.svg"
_COLORS = {"F": "#6f8fb5", "B": "#1b4f91"}
_QUIET = 0.5  # load average over one minute below which the machine counts as quiet


def machine_line() -> str:
    """Returns the machine and its load; to be called before the benchmark starts."""
    load = os.getloadavg()[0]
    state = "quiet" if load < _QUIET else f"busy: a load of {load:.1f} when it began"
    return f"Machine: {machine()}; {state}."


def write(parts: Mapping[str, str], page: Path = PAGE) -> None:
    """Replaces the text between the marks of every part; raises ValueError for a part without marks."""
    text = page.read_text()
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{page} has no {begin} ... {end}")
        between = f"{begin}\n{part.strip()}\n{end}"
        text = pattern.sub(lambda _, between=between: between, text)
    page.write_text(text)


def draw(pipeline: Pipelined, file: Path = PICTURE) -> None:
    """Draws the forward and backward tasks of every rank in lockstep, to scale, labelled by microbatch."""
    timing = pipeline.forecast.lockstep_timing
    figure = Figure(figsize=(9.5, 0.35 * pipeline.ranks + 0.7), layout="constrained")
    panel = figure.subplots()
    for rank, tasks in enumerate(timing.schedule.ranks):
        for task in tasks:
            begin, length = timing.begin[task], timing.end[task] - timing.begin[task]
            panel.barh(rank, length, left=begin, height=0.8, color=_COLORS.get(task.kind, "#3d7a4e"), edgecolor="white")
            if length > timing.seconds / 60:
                panel.text(
                    begin + length / 2, rank, str(task.microbatch), ha="center", va="center", size=6, color="white"
                )
    panel.set(xlabel="seconds", yticks=range(pipeline.ranks), xlim=(0, timing.seconds))
    panel.set_yticklabels([f"rank {rank}" for rank in range(pipeline.ranks)])
    panel.invert_yaxis()
    with matplotlib.rc_context({"svg.hashsalt": file.stem, "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None, "Title": str(pipeline)})
