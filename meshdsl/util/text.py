"""Text for people: numbers with units, safe names, tables."""

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import wrap

# ---- Numbers and names -----------------------------------------------------------------------------------------------


_JOINER = "\u200d"  # the zero-width joiner of emoji


def bytes_text(n: float) -> str:
    """Returns bytes with a decimal unit and three digits: ``1.05 MB``."""
    return _scaled(n, ("B", "kB", "MB", "GB", "TB", "PB")) if n else "0 B"


def seconds_text(seconds: float) -> str:
    """Returns seconds with a unit and three digits: ``12.3 ms``."""
    if 0 < seconds < 5e-9:
        return f"{_digits(seconds * 1e9)} ns"
    return _scaled(seconds * 1e6, ("us", "ms", "s")) if seconds else "0 s"


def percent_text(part: float) -> str:
    """Returns a share with two digits: ``26%``, ``4.7%``, ``0.049%``; a tiny one is not rounded to ``0%``."""
    if 0 < part < 1e-5:
        return "below 0.001%"
    return f"{100 * part:.0f}%" if part >= 0.0995 else f"{100 * part:.2g}%"


def count_text(n: int, noun: str) -> str:
    """Returns a number of things: ``1 array``, ``3 arrays``."""
    return f"{n} {noun}" + ("" if n == 1 else "s")


def change_text(change: float) -> str:
    """Returns a relative change with its sign: ``+26%``, ``-0.049%``; no change is ``0%``."""
    return ("+" if change > 0 else "-" if change < 0 else "") + percent_text(abs(change))


def visible(text: str, allowed: str = "") -> str:
    """Returns the text with characters that control a terminal (escapes, changes of direction) escaped: ``\\x1b``.

    Args:
      text: any text, such as a name from the user's program.
      allowed: control characters to leave as they are.
    """
    return (
        text
        if text.isprintable()
        else "".join(c if c in allowed or not _is_control(c) else c.encode("unicode_escape").decode() for c in text)
    )


def _is_control(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c != _JOINER


def _scaled(value: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{_digits(value)} {unit}"
        value /= 1000.0
    return f"{_digits(value)} {units[-1]}"


def _digits(value: float) -> str:
    if value == int(value) and value < 1000:
        return str(int(value))
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


# ---- Tables ----------------------------------------------------------------------------------------------------------


WIDTH = 120  # characters of a line, in files and pipes
_GAP = 2  # spaces between columns
_LAST_COLUMN_WIDTH = 24  # characters, at least, even if lines then exceed WIDTH
_CELL_WIDTH = 160  # characters; a longer cell loses its middle
_ROOM = 40  # characters of the last column, if it has so many, below which a terminal shows it below its row
_INDENT = 4  # spaces before the columns of a row that go below it
_terminal: ContextVar[int | None] = ContextVar("width of the terminal", default=None)


@contextmanager
def terminal_width(characters: int) -> Iterator[None]:
    """Within it, tables and ``wrapped`` text are as wide as a terminal of this many characters."""
    token = _terminal.set(characters)
    try:
        yield
    finally:
        _terminal.reset(token)


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the rows as lines of aligned columns; the last column wraps below itself.

    On a terminal that is too narrow for that, the columns that have no room go on lines of their own, below their row.
    """
    rows = [[*map(_cell, row[:-1]), visible(row[-1])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = sum(widths[:-1]) + _GAP * len(widths[:-1])
    terminal = _terminal.get()
    if terminal is not None and left + min(widths[-1], _ROOM) > terminal:
        yield from _stacked(rows, widths, terminal)
        return
    width = max((terminal or WIDTH) - left, _LAST_COLUMN_WIDTH)
    for row in rows:
        start = "".join(text.ljust(width + _GAP) for text, width in zip(row[:-1], widths, strict=False))
        first, *rest = wrap(row[-1], width, break_long_words=False, break_on_hyphens=False) or [""]
        yield (start + first).rstrip()
        yield from (" " * left + line for line in rest)


def _stacked(rows: Sequence[Sequence[str]], widths: Sequence[int], terminal: int) -> Iterator[str]:
    """Yields the rows, of each as many columns beside one another as there is room for, the others below."""
    ends = [sum(widths[:n]) + _GAP * (n - 1) for n in range(1, len(widths))]
    beside = max(sum(end <= terminal for end in ends), 1)
    for row in rows:
        yield (" " * _GAP).join(text.ljust(width) for text, width in zip(row[:beside], widths, strict=False)).rstrip()
        below = (" " * _GAP).join(filter(None, map(str.strip, row[beside:])))
        yield from _lines_of(below, terminal, " " * _INDENT, " " * _INDENT)


def wrapped(text: str) -> str:
    """Returns the text with lines that are too long for the terminal continued below, one step further in."""
    terminal = _terminal.get()
    if terminal is None:
        return text
    rows = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + _INDENT)
        rows += _lines_of(line, terminal, "", indent) if len(line) > terminal else [line]
    return "\n".join(rows)


def _lines_of(text: str, width: int, first: str, others: str) -> list[str]:
    return wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(text: str) -> str:
    shown = visible(text)
    half = _CELL_WIDTH // 2
    return f"{shown[:half]}...{shown[-half:]}" if len(shown) > _CELL_WIDTH else shown
