"""How a command ends with an error: its message and its exit status.

An error of meshdsl says itself what is wrong. Any other error that comes out of the program's own code, while its file
is read or its step traced, is reported with the line that raised it. An error without such a line is that of a full
disk, or a fault of meshdsl, which keeps its traceback.
"""

import errno
import sysconfig
from pathlib import Path
from traceback import extract_tb

from meshdsl.errors import CheckError, MemoryLimitError, MeshDSLError, NonFiniteError, VerifyError
from meshdsl.util.exit_status import BAD_INPUT, CHANGED, INFEASIBLE, NON_FINITE, OWN_FAULT

_PACKAGE = Path(__file__).resolve().parent.parent
_OWN = tuple(f"{folder}/" for folder in (_PACKAGE, _PACKAGE.parent / "lowering", _PACKAGE.parent / "layouts"))
_LIBRARIES = (*_OWN, sysconfig.get_path("stdlib") + "/", sysconfig.get_path("purelib") + "/", "<")
_JAX_FILTERS = "-----"  # the first characters of jax's note on the frames that it removed


def status_of(error: Exception) -> int:
    """The exit status of a command that ends with this error."""
    if isinstance(error, MemoryLimitError):
        return INFEASIBLE
    if isinstance(error, NonFiniteError):
        return NON_FINITE
    if isinstance(error, VerifyError | CheckError):
        return CHANGED
    return BAD_INPUT if message_of(error) else OWN_FAULT


def message_of(error: Exception) -> str:
    """The message that ends the command; empty if the error is a fault of meshdsl itself."""
    if isinstance(error, MeshDSLError):
        return str(error)
    line = _innermost_line(error)
    if not line:
        return f"{error}: make room, or write elsewhere" if _is_of_disk(error) else ""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_JAX_FILTERS)]
    rows = [f"{line}: {type(error).__name__}: {text}", *(f"  {note}" for note in notes)]
    return "\n".join([*rows, "meshdsl --debug ... shows the traceback"])


def _is_of_disk(error: Exception) -> bool:
    """Whether a disk is full, or cannot be written."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _innermost_line(error: Exception) -> str:
    """The innermost line of the traceback outside of libraries, as ``file.py:12``; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _line_text(error.filename, error.lineno)
    own = [frame for frame in extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
    return _line_text(own[-1].filename, own[-1].lineno) if own else ""


def _line_text(file: str, line: int | None) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
