"""Numbers with units, three digits each; and names as they can be shown."""

import unicodedata
from collections.abc import Sequence

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
