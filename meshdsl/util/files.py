"""Reading regular files of a limited size, so that no read blocks or exhausts memory; writing text files."""

import errno
from os import PathLike
from pathlib import Path

from meshdsl.errors import ArgumentError, MeshDSLError, is_a
from meshdsl.util.text import bytes_text


def read_regular(path: str | Path, limit: int) -> bytes:
    """Returns the content of a file.

    Args:
      path: of the file.
      limit: most bytes that it may have.

    Raises:
      OSError: it cannot be read, is no regular file (a device, a pipe, a folder), or is too large.
    """
    file = Path(path)
    size = file.stat().st_size
    if not file.is_file():
        raise OSError(errno.EINVAL, "Is a directory" if file.is_dir() else "not a regular file", str(path))
    if size > limit:
        raise OSError(
            errno.EFBIG, f"{bytes_text(size)}, more than such a file may have ({bytes_text(limit)})", str(path)
        )
    return file.read_bytes()


def write_text(path: str | PathLike[str], text: str) -> None:
    """Writes a file in UTF-8.

    Raises:
      ArgumentError: if ``path`` is no path.
      MeshDSLError: if the file cannot be written.
    """
    if not isinstance(path, str | PathLike):
        raise ArgumentError(f"{is_a(path)}, not the path of a file to write")
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise MeshDSLError(f"cannot write {str(path)!r}: {error.strerror}") from error
