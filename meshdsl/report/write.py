"""Writing what was made, with errors in plain words."""

from os import PathLike
from pathlib import Path

from meshdsl.errors import ArgumentError, MeshDSLError, is_a


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a file; ArgumentError for what is no path, MeshDSLError if it cannot be written."""
    if not isinstance(path, str | PathLike):
        raise ArgumentError(f"{is_a(path)}, not the path of a file to write")
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise MeshDSLError(f"cannot write {str(path)!r}: {error.strerror}") from error
