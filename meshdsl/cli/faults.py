"""What ends a command: one message for what is wrong with what was given, and its status.

Errors of meshdsl say themselves what does not fit. Anything else that comes out of the program's own code, while its
file is read or its step traced, is told with the line that raised it. What comes from nowhere in it is a fault of
meshdsl, and keeps its traceback.
"""

import sysconfig
from pathlib import Path
from traceback import extract_tb

from meshdsl.errors import CheckError, MemoryLimitError, MeshDSLError, VerifyError

_OWN = Path(__file__).resolve().parent.parent
_PARTS = tuple(f"{folder}/" for folder in (_OWN, _OWN.parent / "lowering", _OWN.parent / "layouts"))
_LIBRARIES = (*_PARTS, sysconfig.get_path("stdlib") + "/", sysconfig.get_path("purelib") + "/", "<")
_JAX_FILTERS = "-----"  # how jax's note on the frames that it removed begins


def status_of(error: Exception) -> int:
    """1 if something does not hold, 2 if what was given is not right."""
    return 1 if isinstance(error, MemoryLimitError | VerifyError | CheckError) else 2


def message_of(error: Exception) -> str:
    """What to say of an error; empty if it is a fault of meshdsl itself."""
    if isinstance(error, MeshDSLError):
        return str(error)
    place = _place(error)
    if not place:
        return ""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith(_JAX_FILTERS)]
    rows = [f"{place}: {type(error).__name__}: {said}", *(f"  {note}" for note in notes)]
    return "\n".join([*rows, "meshdsl --debug ... shows the traceback"])


def _place(error: Exception) -> str:
    """The innermost line that is in no library; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return _short(error.filename, error.lineno)
    own = [each for each in extract_tb(error.__traceback__) if not each.filename.startswith(_LIBRARIES)]
    return _short(own[-1].filename, own[-1].lineno) if own else ""


def _short(file: str, line: int | None) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line}"
