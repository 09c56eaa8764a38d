"""Numbers with units, three digits each; and names as they can be shown."""

import unicodedata
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from textwrap import wrap

from meshdsl.errors import ArgumentError, MeshDSLError, is_a

# ---- Units -----------------------------------------------------------------------------------------------------------


_JOINER = "\u200d"  # joins emoji


def bytes_text(n: float) -> str:
    """Bytes with a decimal unit and three digits: ``1.05 MB``."""
    return _scaled(n, 1000.0, ("B", "kB", "MB", "GB", "TB", "PB")) if n else "0 B"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit and three digits: ``12.3 ms``."""
    return _scaled(seconds * 1e6, 1000.0, ("us", "ms", "s")) if seconds else "0 s"


def visible(text: str, kept: str = "") -> str:
    """The text with what a terminal would obey (control characters, turns of direction) written out: ``\\x1b``.

    Args:
      kept: characters to leave as they are.
    """
    return text if text.isprintable() else "".join(c if c in kept or not _obeyed(c) else _escaped(c) for c in text)


def _obeyed(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c != _JOINER


def _escaped(c: str) -> str:
    return c.encode("unicode_escape").decode()


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


# ---- Table -----------------------------------------------------------------------------------------------------------
# Plain text tables of at most 120 columns.


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


# ---- Write -----------------------------------------------------------------------------------------------------------
# Writing what was made, with errors in plain words.


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a file; ArgumentError for what is no path, MeshDSLError if it cannot be written."""
    if not isinstance(path, str | PathLike):
        raise ArgumentError(f"{is_a(path)}, not the path of a file to write")
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise MeshDSLError(f"cannot write {str(path)!r}: {error.strerror}") from error
