"""The scatter plot of predicted against measured seconds, as SVG."""

from collections.abc import Callable, Iterator, Sequence
from math import ceil, floor, log10

from bench.published.score import Scored

SIZE, EDGE = 560, 60
COLOURS = ("#3b6ea8", "#c0504d", "#6a994e", "#e08e2b", "#7b5ea7", "#4a4e54")
_TEXT = 'font-family="system-ui, sans-serif" font-size="11" fill="#5c6570"'


def scatter(rows: Sequence[Scored], tables: Sequence[str]) -> str:
    """Both axes logarithmic; full circles are scored, empty ones fitted; the band is 10% either way."""
    values = [seconds for case, found in rows for seconds in (case.measured, found.seconds)]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    at = lambda seconds: EDGE + (log10(seconds) - low) / (high - low) * (SIZE - 2 * EDGE)  # noqa: E731
    parts = [*_frame(range(low, high + 1), at), *(_circle(row, tables, at) for row in rows), *_legend(tables)]
    label = "predicted against measured seconds per step, both logarithmic"
    head = f'<svg role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg" width="{SIZE}" height="{SIZE}">'
    return "\n".join([head, f'<rect width="{SIZE}" height="{SIZE}" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def _frame(powers: Sequence[int], at: Callable[[float], float]) -> Iterator[str]:
    first, last = at(10.0 ** powers[0]), at(10.0 ** powers[-1])
    for factor, style in ((0.9, "#d5dae0"), (1.0, "#5c6570"), (1.1, "#d5dae0")):
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


def _circle(row: Scored, tables: Sequence[str], at: Callable[[float], float]) -> str:
    case, found = row
    colour = COLOURS[tables.index(case.table)]
    fill = "none" if case.fitted else colour
    place = f'cx="{at(case.measured):.1f}" cy="{SIZE - at(found.seconds):.1f}"'
    return f'<circle {place} r="3.5" stroke="{colour}" fill="{fill}"><title>{case.label}</title></circle>'


def _legend(tables: Sequence[str]) -> Iterator[str]:
    for i, table in enumerate(tables):
        y = EDGE + 8 + 16 * i
        yield f'<circle cx="{EDGE + 14}" cy="{y}" r="3.5" fill="{COLOURS[i]}"/>'
        yield f'<text x="{EDGE + 24}" y="{y + 4}" {_TEXT}>{table}</text>'
