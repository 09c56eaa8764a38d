"""Writes docs/evidence/predictions.md and its plot from scored rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bench.published import dgxc, maxtext, mosaic
from bench.published.case import Case, rows
from bench.published.plot import scatter
from bench.published.score import Scored, error, errors, kendall
from bench.report import summarised, table, versions
from meshdsl.layouts.topology import topology
from meshdsl.util.text import percent_text

DOCS = Path(__file__).parents[2] / "docs" / "evidence"
PAGE, PLOT, TEXT = DOCS / "predictions.md", DOCS / "predictions.svg", Path(__file__).parent / "introduction.md"
ERRORS = (
    "table",
    "hardware",
    "fitted rows",
    "median, 90th percentile",
    "scored rows",
    "median, 90th percentile",
    "goal",
)
RANKS = ("table", "half", "pairs ranked right", "wrong", "Kendall tau", "goal")
ROWS = ("row", "measured", "predicted", "error", "not hidden: planned one after the other", "of that sent", "gap")
LEFT = ("table", "rows", "why they are not scored")
GOAL, MOST, TAU = 0.10, 0.25, 0.8  # goals: median error, 90th percentile, Kendall tau
WAITING = "not planned yet: with stages, a row takes the planner up to minutes"
_WORST = 12  # rows in the table of the largest errors


def write_page(scored: Sequence[Scored], waiting: Sequence[Case] = ()) -> None:
    """Writes both files; rows of ``waiting`` have no prediction yet."""
    tables = list(dict.fromkeys(case.table for case, _ in scored))
    PLOT.write_text(scatter(scored, tables))
    worst = sorted((row for row in scored if not row[0].fitted), key=lambda row: -abs(error(row)))[:_WORST]
    parts = [
        TEXT.read_text().rstrip(),
        "## Errors\n",
        table(ERRORS, [_errors(name, hardware, scored) for name, hardware in _groups(scored)]),
        "\n![predicted against measured](predictions.svg)\n",
        "## Ranking\n",
        table(RANKS, [_ranks(name, half, scored) for name in tables for half in (True, False)]),
        "\n## The worst scored rows\n",
        table(ROWS, [_row(row) for row in worst]),
        "\n## What is not scored\n",
        table(LEFT, list(_left(waiting))),
        "\n## Every row\n",
        *(f"### {name}\n\n{table(ROWS, [_row(row) for row in scored if row[0].table == name])}\n" for name in tables),
        f"`python -m bench.published` ({versions()}).",
    ]
    PAGE.write_text(summarised("\n".join(parts) + "\n", *_short(scored)))


def _short(scored: Sequence[Scored]) -> Iterator[str]:
    judged = [row for row in scored if not row[0].fitted]
    found = [errors(row for row in judged if (row[0].table, row[0].hardware) == each) for each in _groups(judged)]
    medians, met = [each.median for each in found], sum(each.median <= GOAL and each.most <= MOST for each in found)
    yield f"{len(judged)} published runs on GPUs and TPUs to which nothing was fitted, and the times of their plans."
    yield f"By table and hardware, the median error is {min(medians):.0%} to {max(medians):.0%}; the goal of at most"
    yield f"{GOAL:.0%} in the median and {MOST:.0%} in nine of ten is met in {met} of {len(found)} groups."


def _groups(scored: Iterable[Scored]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((case.table, case.hardware) for case, _ in scored))


def _errors(name: str, hardware: str, scored: Iterable[Scored]) -> list[object]:
    here = [row for row in scored if (row[0].table, row[0].hardware) == (name, hardware)]
    halves = [[row for row in here if row[0].fitted is half] for half in (True, False)]
    fitted, judged = map(errors, halves)
    met = judged.errors and judged.median <= GOAL and judged.most <= MOST
    known = topology(hardware)
    curve = f"{hardware}: {known.flops16 / 1e12:.0f} TFLOP/s, half side {known.half_side:g}"
    return [
        name,
        curve,
        len(halves[0]),
        fitted,
        len(halves[1]),
        judged,
        "met" if met else "missed" if judged.errors else "",
    ]


def _ranks(name: str, half: bool, scored: Iterable[Scored]) -> list[object]:
    right, wrong = kendall([row for row in scored if row[0].table == name and row[0].fitted is half])
    if right + wrong == 0:
        return [name, "fitted" if half else "scored", 0, 0, "", ""]
    tau = (right - wrong) / (right + wrong)
    return [name, "fitted" if half else "scored", right, wrong, f"{tau:.2f}", "met" if tau >= TAU else "missed"]


def _row(row: Scored) -> list[object]:
    case, found = row
    half = " (fitted)" if case.fitted else ""
    seconds = (f"{x:.3f} s" for x in (case.measured, found.seconds))
    return [
        case.label + half,
        *seconds,
        f"{error(row):+.1%}",
        f"{found.planned:.3f} s",
        f"{found.sent:.3f} s",
        percent_text(found.gap),
    ]


def _left(waiting: Iterable[Case]) -> Iterable[list[object]]:
    for module in (dgxc, maxtext, mosaic):
        counts = Counter(reason for row in rows(module.TABLE) if (reason := module.reason(row)))
        yield from ([module.TABLE, number, why] for why, number in counts.items())
    yield from ([name, number, WAITING] for name, number in Counter(case.table for case in waiting).items())
