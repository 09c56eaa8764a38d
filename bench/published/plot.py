"""Scatter plots of predicted against measured seconds, as SVG."""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from bench.published.score import Scored

SIZE, EDGE = 560, 60
COLOURS = ("#3b6ea8", "#c0504d", "#6a994e", "#e08e2b", "#7b5ea7", "#4a4e54")
_TEXT = 'font-family="system-ui, sans-serif" font-size="11" fill="#5c6570"'


class Point(NamedTuple):
    """A circle of the plot: measured and predicted seconds, group, whether it is filled, and its tooltip."""

    measured: float
    predicted: float
    group: int
    filled: bool
    title: str


def scatter(rows: Sequence[Scored], tables: Sequence[str]) -> str:
    """Returns the plot of scored (filled) and fitted (hollow) rows, with a band of 10% around equality."""
    circles = [Point(c.measured, p.seconds, tables.index(c.table), not c.fitted, c.label) for c, p in rows]
    return points(circles, tables, band=0.1)


def points(rows: Sequence[Point], groups: Sequence[str], band: float) -> str:
    """Returns predicted against measured seconds on logarithmic axes, with a relative band around equality."""
    values = [seconds for row in rows for seconds in row[:2]]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    at = lambda seconds: EDGE + (log10(seconds) - low) / (high - low) * (SIZE - 2 * EDGE)  # noqa: E731
    parts = [*_frame(range(low, high + 1), at, band), *(_circle(row, at) for row in rows), *_legend(groups)]
    label = "predicted against measured seconds per step, both logarithmic"
    head = f'<svg role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}">'
    return "\n".join([head, f'<rect width="{SIZE}" height="{SIZE}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _frame(powers: Sequence[int], at: Callable[[float], float], band: float) -> Iterator[str]:
    first, last = at(10.0 ** powers[0]), at(10.0 ** powers[-1])
    for factor, style in ((1 - band, "#d5dae0"), (1.0, "#5c6570"), (1 + band, "#d5dae0")):
        shift = at(factor) - at(1.0)
        ends = f"M{first:.1f} {SIZE - first - shift:.1f}L{last:.1f} {SIZE - last - shift:.1f}"
        yield f'<path d="{ends}" stroke="{style}"/>'
    for power in powers:
        x = at(10.0**power)
        lines = f"M{x:.1f} {SIZE - first:.1f}V{SIZE - last:.1f}M{first:.1f} {SIZE - x:.1f}H{last:.1f}"
        yield f'<path d="{lines}" stroke="#eef0f2"/>'
        yield f'<text x="{x:.1f}" y="{SIZE - EDGE + 16}" text-anchor="middle" {_TEXT}>{10.0**power:g} s</text>'
        yield f'<text x="{EDGE - 8}" y="{SIZE - x + 4:.1f}" text-anchor="end" {_TEXT}>{10.0**power:g} s</text>'
    yield f'<text x="{SIZE / 2}" y="{SIZE - EDGE + 34}" text-anchor="middle" {_TEXT}>measured</text>'
    yield f'<text x="{EDGE}" y="{EDGE - 12}" {_TEXT}>predicted</text>'


def _circle(row: Point, at: Callable[[float], float]) -> str:
    fill = COLOURS[row.group] if row.filled else "none"
    centre = f'cx="{at(row.measured):.1f}" cy="{SIZE - at(row.predicted):.1f}"'
    return f'<circle {centre} r="3.5" stroke="{COLOURS[row.group]}" fill="{fill}"><title>{row.title}</title></circle>'


def _legend(tables: Sequence[str]) -> Iterator[str]:
    for i, table in enumerate(tables):
        y = EDGE + 8 + 16 * i
        yield f'<circle cx="{EDGE + 14}" cy="{y}" r="3.5" fill="{COLOURS[i]}"/>'
        yield f'<text x="{EDGE + 24}" y="{y + 4}" {_TEXT}>{table}</text>'
