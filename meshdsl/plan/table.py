"""Plain text tables of at most 120 columns, and numbers with units."""

from collections.abc import Iterator, Sequence
from textwrap import wrap

WIDTH = 120
_GAP = 2
_LEAST = 24


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, columns aligned; the last column wraps below itself."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = sum(widths[:-1]) + _GAP * len(widths[:-1])
    room = max(WIDTH - left, _LEAST)
    for row in rows:
        start = "".join(text.ljust(width + _GAP) for text, width in zip(row[:-1], widths, strict=False))
        first, *rest = wrap(row[-1], room, break_long_words=False) or [""]
        yield (start + first).rstrip()
        yield from (" " * left + line for line in rest)


def bytes_text(n: float) -> str:
    """Bytes with a decimal unit and three digits: ``1.05 MB``."""
    return _scaled(n, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB")) if n else "0 B"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit and three digits: ``12.3 ms``."""
    return _scaled(seconds * 1e6, 1000.0, ("us", "ms", "s")) if seconds else "0 s"


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < 0.9995 * base:
            return f"{_digits(value)} {unit}"
        value /= base
    return f"{_digits(value)} {units[-1]}"


def _digits(value: float) -> str:
    if value == int(value) and value < 1000:
        return str(int(value))
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
