"""What a command prints: its result on standard output, progress and everything else on standard error.

Standard output has the result alone. Whatever else would be written to it, by the program's own code or by a solver
in C, goes to standard error, where progress is shown.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console

from meshdsl.errors import ArgumentError
from meshdsl.util.terminal import Work, print_fitted, terminal

JSON_VERSION = 1  # of what --json prints; raised when a field is renamed, removed or means something else

out = terminal()
progress = Console(stderr=True, highlight=False)


def check_writable(*files: Path | None) -> None:
    """Refuses files that cannot be written, before anything takes time."""
    for file in files:
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            fault = "it is a folder" if file.is_dir() else f"there is no folder {str(file.parent)!r}; make it first"
            raise ArgumentError(f"cannot write {str(file)!r}: {fault}")


@contextmanager
def working(text: str) -> Iterator[Work]:
    """Shows what is being done, on a terminal, and keeps standard output for the result."""
    with output_to_stderr(), Work(progress, text) as work:
        yield work


@contextmanager
def output_to_stderr() -> Iterator[None]:
    """Sends standard output to standard error, that of Python and that of compiled code."""
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        libc.fflush(None)  # text that C keeps for later would come out after the end
        os.dup2(kept, 1)
        os.close(kept)


def show(command: str, text: object, facts: Mapping[str, Any], as_json: bool) -> None:
    """Prints the text, or the facts as one JSON object that starts with its format and version.

    On a terminal the text is as wide as the terminal, and kinds of collectives have colours; elsewhere it is plain.
    """
    if as_json:
        head = {"format": f"meshdsl {command} --json", "version": JSON_VERSION}
        print(json.dumps(_plain({**head, **facts}), indent=2, allow_nan=False))
    else:
        print_fitted(out, lambda: str(text))


def _plain(value: Any) -> Any:
    """The value with ``None`` for numbers that JSON lacks: infinite ones, and NaN."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
