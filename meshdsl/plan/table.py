"""Plain text tables of at most 120 columns."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

from meshdsl.units import visible

WIDTH = 120
_GAP = 2
_LEAST = 24
_LONGEST = 160  # characters of a cell; what is longer loses its middle


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, columns aligned; the last column wraps below itself."""
    rows = [[*map(_cell, row[:-1]), visible(row[-1])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = sum(widths[:-1]) + _GAP * len(widths[:-1])
    room = max(WIDTH - left, _LEAST)
    for row in rows:
        start = "".join(text.ljust(width + _GAP) for text, width in zip(row[:-1], widths, strict=False))
        first, *rest = wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        yield (start + first).rstrip()
        yield from (" " * left + line for line in rest)


def _cell(text: str) -> str:
    shown = visible(text)
    half = _LONGEST // 2
    return f"{shown[:half]}...{shown[-half:]}" if len(shown) > _LONGEST else shown
