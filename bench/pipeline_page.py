"""docs/pipelines.md and its picture: what a run measured goes between the marks that name it; the words around stay.

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

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURE = DOCS / "pipelines.md", DOCS / "pipelines.svg"
_COLORS = {"F": "#6f8fb5", "B": "#1b4f91"}
_QUIET = 0.5  # programs at work, on average over a minute, below which a machine is called quiet


def circumstances() -> str:
    """Where, and beside what else; to be asked before anything runs."""
    load = os.getloadavg()[0]
    state = "quiet" if load < _QUIET else f"busy: a load of {load:.1f} when it began"
    return f"Machine: {machine()}; {state}."


def write(parts: Mapping[str, str], page: Path = PAGE) -> None:
    """Put every part between its marks; ValueError if there are none."""
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
    """Forwards and backwards of every rank in lockstep, to scale, each with its microbatch."""
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
