"""Bytes sent by the plan of every strategy in examples/strategies, against its published formula.

python -m bench.strategies writes docs/evidence/strategies.md; steps are planned but not run, so no devices are needed.
"""

import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import summarised, table, versions
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan import Plan
from meshdsl.util.text import bytes_text

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "examples" / "strategies").glob("*.py"))
PAGE = ROOT / "docs" / "evidence" / "strategies.md"
HEADER = ["strategy", "mesh", "collective", "runs", "bytes of the plan", "published", "its bytes", "equal", "memory"]
INTRODUCTION = """# Strategies from the literature

Each strategy is one file of `examples/strategies/`: a step for one device and the one line of layouts below, or none
where the planner finds it alone. Bytes are what one device sends per step, from the plan. The published formula, whose
source is cited in the file, is evaluated at the sizes of the step; where a paper counts per layer or matmul, these are
summed. The table lists everything a strategy sends, and each runs on 8 virtual CPU devices as planned, with the numbers
of one device (`tests/examples/test_strategies.py`).

Sizes are small and the planned devices slow, as stated in the files: the ratios of latency, bandwidth and FLOP/s decide
between strategies that send equal bytes. With a higher latency, for example, the reduce-scatters and all-gathers of
ZeRO become the all-reduces of data parallelism.
"""


class Strategy:
    """One file of the gallery and its planning problem."""

    def __init__(self, file: Path) -> None:
        self.name, self.module = file.stem, runpy.run_path(str(file))
        self.title = self.module["__doc__"].splitlines()[0]
        self.program: Program = self.module["program"]
        self.mesh: Mesh = self.module["mesh"]

    def sharded(self) -> Sharded:
        """Returns the step over the file's mesh."""
        return parallelize(self.program.step, self.mesh, self.program.layouts, memory=self.module.get("memory"))

    def published(self) -> dict[str, tuple[str, float]]:
        """Returns formula and value at the file's sizes, by kind of collective and mesh axes."""
        formulas: dict[str, str] = self.module["published"]
        return {what: (text, eval(text, {}, dict(self.module["sizes"]))) for what, text in formulas.items()}

    def line(self) -> str:
        """Returns the layouts pinned by the file, as markdown."""
        pins = self.program.layouts or {}
        return ", ".join(f"`{glob}: {layout}`" for glob, layout in pins.items()) or "none, found by the planner"

    def devices(self) -> str:
        """Returns mesh, speed, links and memory limit, as markdown."""
        t = self.mesh.topology
        links = "; ".join(
            (f"{n.devices} devices with " if n.devices else "") + f"{n.latency:.0e} s and {n.bandwidth:.0e} B/s"
            for n in t.links
        )
        limit = self.module.get("memory")
        return f"`{self.mesh}` of {t.flops32:.0e} FLOP/s, links of {links}" + (f", `memory={limit}`" if limit else "")


def sent_by_collective(plan: Plan) -> tuple[Counter[str], Counter[str]]:
    """Returns bytes that one device sends per step, and executions, by kind of collective and mesh axes."""
    total, runs = Counter[str](), Counter[str]()
    for c in plan.collectives:
        what = f"{c.kind} over {', '.join(c.axes)}"
        total[what] += c.bytes * c.trips
        runs[what] += c.trips
    return total, runs


def rows(strategy: Strategy, plan: Plan) -> Iterator[list[Any]]:
    """Yields one row per kind and axes that the plan or the formula has."""
    total, runs = sent_by_collective(plan)
    published = strategy.published()
    name, mesh, memory = f"[{strategy.name}](#{strategy.name})", f"`{strategy.mesh}`", bytes_text(plan.memory)
    for what in dict.fromkeys((*published, *total)):
        formula, value = published.get(what, ("none", 0))
        equal = "yes" if value == total[what] else "no"
        yield [name, mesh, what, runs[what], f"{total[what]:,}", f"`{formula}`", f"{value:,.0f}", equal, memory]
        name = mesh = memory = ""


def main() -> None:
    """Plans every strategy and writes the page."""
    table_rows: list[list[Any]] = []
    parts: list[str] = []
    for strategy in map(Strategy, FILES):
        plan = strategy.sharded().plan(*strategy.program.args)
        table_rows += rows(strategy, plan)
        parts.append(
            f"## {strategy.name}\n\n{strategy.title}\n\nPinned: {strategy.line()}. Planned for {strategy.devices()}.\n"
        )
        print(f"{strategy.name}: planned", flush=True)
    command = f"`python -m bench.strategies` ({versions()})"
    text = "\n".join([INTRODUCTION, table(HEADER, table_rows), "", command, "", *parts])
    PAGE.write_text(summarised(text, *short(table_rows)))


def short(table_rows: list[list[Any]]) -> Iterator[str]:
    """Yields the summary of the page."""
    equal = sum(row[HEADER.index("equal")] == "yes" for row in table_rows)
    strategies = f"{len(FILES)} strategies of the literature, from ZeRO to DiLoCo,"
    yield f"{strategies} are the step of one device and at most one line of layouts."
    yield f"In {equal} of {len(table_rows)} rows the bytes of the plan equal the published formula."


if __name__ == "__main__":
    main()
