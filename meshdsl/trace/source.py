"""Where an operation comes from: the user's line, and the name stack."""

import sysconfig
from functools import cache, lru_cache
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import jax

from meshdsl.ir.graph import Source

_OWN = Path(__file__).resolve().parent.parent
_INTERNAL = (str(Path(jax.__file__).parent) + "/", sysconfig.get_path("stdlib") + "/")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_TRACE = str(_OWN / "trace") + "/"
_BESIDE = (
    _OWN if (_OWN / "layouts").exists() else _OWN.parent
)  # of layouts, lowering and models: installed, or a checkout
# Models and training code of this package are programs like any other. Everything else of it serves programs.
_PROGRAMS = (f"{_BESIDE}/models/", f"{_OWN}/training/")
_PACKAGE = (f"{_OWN}/", f"{_BESIDE}/layouts/", f"{_BESIDE}/lowering/")
_KNOWN = 1 << 12  # places
_NOWHERE = Source()


class SourceContext(NamedTuple):
    """Where an operation stands: the name stack around it and the user's line."""

    scope: str = ""
    source: Source = _NOWHERE

    def at(self, info: Any) -> "SourceContext":
        """The place of an equation with this ``source_info``, in a body or call that stands here.

        A function that jax has traced before and kept has lost its callers. If no line of the
        user's is left in it, its equations have the line of the call.
        """
        return _placed(self, info.name_stack, info.traceback)


@lru_cache(_KNOWN)
def _placed(around: SourceContext, name_stack: Any, traceback: Any) -> SourceContext:
    """As ``SourceContext.at``; equal layers, called from one line, ask the same again and again."""
    own = str(name_stack)
    scope = f"{around.scope}/{own}" if around.scope and own else around.scope or own
    return SourceContext(scope, _source_of(traceback, around.source))


def _source_of(traceback: Any, call: Source) -> Source:
    """The innermost line of the user's in the ``traceback`` of an equation, else the line of the ``call``.

    Frames of jax, of the standard library and of this package's own functions never count;
    frames of installed packages count if there is nothing else. Frames outside ``trace`` are not
    looked at: who asked for the trace is not who wrote the operation.
    """
    if traceback is None:
        return call
    library = call if call.file else None
    for code, position in zip(*traceback.raw_frames(), strict=True):
        kind = _kind(code.co_filename)
        if kind == "trace":
            break
        if kind == "user":
            return _source(traceback, code, position)
        if kind == "library" and library is None:
            library = _source(traceback, code, position)
    return library or _NOWHERE


def raised_at(error: Exception) -> Source:
    """The innermost line of the user's that an error came through, or else of a library's."""
    lines = [(_kind(frame.f_code.co_filename), frame, line) for frame, line in walk_tb(error.__traceback__)]
    for wanted in ("user", "library"):
        for kind, frame, line in reversed(lines):
            if kind == wanted:
                return Source(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return _NOWHERE


def _source(traceback: Any, code: Any, position: int) -> Source:
    return Source(code.co_filename, traceback.code_addr2line(code, position), code.co_qualname)


@cache
def _kind(file: str) -> str:
    if file.startswith(_TRACE):
        return "trace"
    if file.startswith(_PROGRAMS):
        return "user"
    if file.startswith((*_PACKAGE, "<")):
        return "internal"
    if any(part in file for part in _INSTALLED):
        return "internal" if file.startswith(_INTERNAL[0]) else "library"
    return "internal" if file.startswith(_INTERNAL) else "user"
