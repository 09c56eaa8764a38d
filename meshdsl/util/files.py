"""Reading files that others wrote: regular files of a limited size, so that no read waits or fills the memory."""

import errno
from pathlib import Path

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
