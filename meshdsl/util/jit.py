"""How loops are compiled; whoever imports this imports the compiler."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Costs = NDArray[np.float64]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def njit_cached(function: _Function) -> _Function:
    """The function as machine code, kept on disk; a minimum may be taken in any order."""
    made: Any = njit(cache=True, nogil=True, fastmath={"nnan", "nsz"})(function)
    return cast("_Function", made)
