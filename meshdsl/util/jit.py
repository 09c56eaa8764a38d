"""Compiled loops: importing this module imports numba, which takes seconds, so only ``*kernels.py`` files do.

Those files are themselves imported inside functions, when a plan is searched for.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit_cached(function: _Function) -> _Function:
    """Compiles a function to machine code that is cached on disk and releases the interpreter lock.

    Values are assumed to be no NaN and zeros to have no sign, so that the compiler may reorder minima and vectorise
    them; sums keep their order.
    """
    made: Any = njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})(function)
    return cast("_Function", made)
