"""Compiled loops: importing this module imports numba, which takes seconds, so only ``*kernels.py`` files do.

Those files are themselves imported inside functions, when a plan is searched for. The first plan on a machine compiles
them, which takes some ten seconds, and is logged by the logger ``meshdsl.compile`` at level INFO.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numba.core import event
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit_cached(function: _Function) -> _Function:
    """Compiles a function to machine code that is cached on disk and releases the interpreter lock.

    Values are assumed to be no NaN and zeros to have no sign, so that the compiler may reorder minima and vectorise
    them; sums keep their order. Where no cache can be written, neither beside the sources nor in the user's folder of
    caches, every process compiles anew.
    """
    options: Any = {"nogil": True, "fastmath": {"nnan", "nsz"}}
    try:
        made: Any = njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no place for a cache
        made = njit(**options)(function)
    return cast("_Function", made)


class _CompileLog(event.Listener):
    """Logs the compilation of loops of this package; those that a cache has are not compiled."""

    def on_start(self, event: Any) -> None:
        """Logs the name of a function that is compiled now."""
        function = event.data["dispatcher"].py_func
        if function.__module__.startswith("meshdsl."):
            logging.getLogger("meshdsl.compile").info("compiling %s", function.__qualname__)

    def on_end(self, event: Any) -> None:
        """Nothing to be said."""


event.register("numba:compile", _CompileLog())  # type: ignore[no-untyped-call]
