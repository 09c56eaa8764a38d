"""Where an operation comes from: the user's line, and the name stack.

Every file on the call stack is user code, an installed library, or internal: jax, the standard library, this package.
Of this package only the folders in ``_PROGRAMS`` count as user code, so a new internal file never becomes the source of
an operation by accident.
"""

import inspect
import sysconfig
from functools import cache, lru_cache
from pathlib import Path
from traceback import walk_stack, walk_tb
from typing import Any, NamedTuple

import jax

from meshdsl.ir.graph import Source

_OWN = Path(__file__).resolve().parent.parent
_INTERNAL = (str(Path(jax.__file__).parent) + "/", sysconfig.get_path("stdlib") + "/")
_SHARD_MAP = inspect.unwrap(jax.shard_map).__code__.co_filename
_INSTALLED = ("/site-packages/", "/dist-packages/")
_TRACE = str(_OWN / "trace") + "/"
# layouts, lowering and models are in the package once it is installed, and next to it in a checkout
_SIBLINGS = _OWN if (_OWN / "layouts").exists() else _OWN.parent
_PROGRAMS = (f"{_SIBLINGS}/models/", f"{_OWN}/training/")
_PACKAGE = (f"{_OWN}/", f"{_SIBLINGS}/layouts/", f"{_SIBLINGS}/lowering/")
_CACHE_SIZE = 1 << 12  # places: name stack and traceback of an equation
_NOWHERE = Source()


class SourceContext(NamedTuple):
    """The name stack around an operation, the user's line, and the axes (with sizes) of the shard_maps around it."""

    scope: str = ""
    source: Source = _NOWHERE
    manual: tuple[tuple[str, int], ...] = ()

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The names of the manual axes."""
        return tuple([name for name, _ in self.manual])

    def at(self, info: Any) -> "SourceContext":
        """Returns the context of an equation with this ``source_info`` in a body or call with this context.

        A function whose jaxpr jax has cached has lost its callers. If its traceback has no user line, its equations
        get the line of the call.
        """
        return _context(self, info.name_stack, info.traceback)


@lru_cache(_CACHE_SIZE)
def _context(around: SourceContext, name_stack: Any, traceback: Any) -> SourceContext:
    """As ``SourceContext.at``; cached, since equal layers called from one line have equal contexts."""
    own = str(name_stack)
    scope = f"{around.scope}/{own}" if around.scope and own else around.scope or own
    return SourceContext(scope, _source_of(traceback, around.source), around.manual)


def _source_of(traceback: Any, call: Source) -> Source:
    """Returns the innermost user line in the ``traceback`` of an equation, else the line of the ``call``.

    Internal frames never count; frames of libraries count if there is no user frame. Frames outside ``trace`` are
    ignored: the caller of the trace did not write the operation.
    """
    if traceback is None:
        return call
    library = call if call.file else None
    for code, position in zip(*traceback.raw_frames(), strict=True):
        kind = file_kind(code.co_filename)
        if kind == "trace":
            break
        if kind == "user":
            return _source(traceback, code, position)
        if kind == "library" and library is None:
            library = _source(traceback, code, position)
    return library or _NOWHERE


def raised_at(error: Exception) -> Source:
    """Returns the innermost user line that an error passed through, else the innermost line of a library."""
    lines = [(file_kind(frame.f_code.co_filename), frame, line) for frame, line in walk_tb(error.__traceback__)]
    for wanted in ("user", "library"):
        for kind, frame, line in reversed(lines):
            if kind == wanted:
                return Source(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return _NOWHERE


def raised_in_shard_map(error: Exception) -> bool:
    """Returns whether an error was raised in the body of a ``jax.shard_map``.

    jax may hide its frames from tracebacks (``jax_traceback_filtering``); they are then found below the last one shown.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    below = (frame for frame, _ in walk_stack(frames[-1]))
    return any(frame.f_code.co_filename == _SHARD_MAP for frame in (*frames, *below))


def defined_at(function: Any) -> Source:
    """Returns the first line of a function, also inside ``partial`` or ``jax.jit``; of an object, of its call."""
    while function is not None and not hasattr(function, "__code__"):
        inner = (getattr(function, name, None) for name in ("func", "__wrapped__", "__func__"))
        call = type(function).__call__ if callable(function) else None
        function = next((x for x in (*inner, call) if x is not None and x is not function), None)
    code = getattr(function, "__code__", None)
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname) if code else _NOWHERE


def _source(traceback: Any, code: Any, position: int) -> Source:
    return Source(code.co_filename, traceback.code_addr2line(code, position), code.co_qualname)


@cache
def file_kind(file: str) -> str:
    """Returns "user", "library", "trace", or "internal" for files of jax, the standard library and this package."""
    if file.startswith(_TRACE):
        return "trace"
    if file.startswith(_PROGRAMS):
        return "user"
    if file.startswith((*_PACKAGE, "<")):
        return "internal"
    if any(part in file for part in _INSTALLED):
        return "internal" if file.startswith(_INTERNAL[0]) else "library"
    return "internal" if file.startswith(_INTERNAL) else "user"
