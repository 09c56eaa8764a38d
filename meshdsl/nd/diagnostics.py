"""Errors of named dims: tensors by their names in the user's source, and the user's line.

    no dim 'embd' in hidden[batch=32 seq=128 embed=512]: did you mean 'embed'?
      at model.py:12: md.sum(hidden, over="embd")

The names are read from the source text of the call, and only once an error is certain. Without source text, or for an
operand that is longer than a name, the letters x, y, z stand for the operands.
"""

import ast
import linecache
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from meshdsl.errors import DimError, MeshDSLError, faults

_OWN = ("meshdsl.nd.", "jax.", "flax.", "numpy.")
_LONGEST = 24  # characters of an operand that is shown as it is written


def fail(rows: Sequence[str] | str, kind: type[MeshDSLError] = DimError) -> MeshDSLError:
    """Return an error with these faults and the user's line."""
    rows = [rows] if isinstance(rows, str) else rows
    frame = _user_frame()
    where = [f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}: {_running(frame)}"] if frame else []
    return kind(faults(rows[0], [*rows[1:], *where]))


def absent(name: str, label: str, tensor: Any) -> str:
    """Return the fault that ``tensor`` has no dim ``name``."""
    close = get_close_matches(name, tensor.dims, n=1, cutoff=0.5)
    return f"no dim {name!r} in {label}{described(tensor)}" + (f": did you mean {close[0]!r}?" if close else "")


def described(tensor: Any) -> str:
    """Return ``[batch=32 embed=512]`` for a named tensor."""
    return f"[{shown(tensor.dims, tensor.array.shape)}]"


def shown(names: Sequence[str], sizes: Sequence[object]) -> str:
    """Return ``batch=32 seq=128`` for names and sizes."""
    return " ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def labels(count: int, first: int = 0) -> list[str]:
    """Return the running operation's operands as they are written at the user's line, from argument ``first`` on."""
    frame = _user_frame()
    written = _operands(frame)[first:] if frame else []
    found = [*written, *[""] * count][:count]
    letters = iter([letter for letter in ("x", "y", "z") if letter not in found])
    return [text or next(letters, f"operand {i}") for i, text in enumerate(found)]


def _user_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(_OWN):
        frame = frame.f_back
    return frame


def _operands(frame: FrameType) -> list[str]:
    """Return the operands as they are written, "" for those that are no names."""
    call = _parsed(_running(frame))
    written: list[ast.expr] = []
    if isinstance(call, ast.Call):
        written = [x for arg in call.args for x in (arg.elts if isinstance(arg, ast.List | ast.Tuple) else [arg])]
    elif isinstance(call, ast.BinOp):
        written = [call.left, call.right]
    elif isinstance(call, ast.Compare):
        written = [call.left, *call.comparators]
    one_each = takewhile(lambda x: not isinstance(x, ast.Starred), written)
    texts = [ast.unparse(x) if isinstance(x, ast.Name | ast.Attribute | ast.Subscript) else "" for x in one_each]
    return [text if len(text) <= _LONGEST else "" for text in texts]


def _running(frame: FrameType) -> str:
    """Return the text of the expression that the frame evaluates."""
    start, end, first, last = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    if start is None or end is None or first is None or last is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(start, end + 1)]
    lines[-1] = lines[-1][:last]
    lines[0] = lines[0][first:]
    return b"".join(lines).decode()


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError:
        return None
