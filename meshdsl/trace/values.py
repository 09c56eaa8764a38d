"""What goes into a step and comes out of it: arrays, and when it runs, arrays that hold values.

Shapes without values can be planned, lowered and verified, not run; so can an array whose
buffer is gone. XLA does not look: on the CPU it reads the freed memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from meshdsl.errors import TraceError, faults, is_a


def check_values(name: str, paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """TraceError names every argument that is a shape without values, or an array that is gone."""
    found = list(zip(paths, leaves, strict=True))
    shapes = [f"{path}: {_typed(x)} without values" for path, x in found if isinstance(x, jax.ShapeDtypeStruct)]
    gone = [f"{path}: {_typed(x)} was donated to an earlier call, or deleted" for path, x in found if is_gone(x)]
    if shapes or gone:
        what = "shapes" if shapes else "arrays that are gone"
        remedy = "plan, lower and verify take shapes" if shapes else "go on with what that call returned"
        raise TraceError(faults(f"{name} cannot run on {what}:", [*shapes, *gone], remedy))


def is_gone(x: Any) -> bool:
    """Whether the array's buffer was given up."""
    asked = getattr(x, "is_deleted", None)  # of jax's arrays; quicker than asking whether it is one
    return asked is not None and not isinstance(x, jax.core.Tracer) and asked()


def check_arrays(title: str, found: Iterable[tuple[str, Any]], remedy: str) -> None:
    """TraceError names everything that is no array."""
    rows = [f"{path or 'the result'}: {_alien(x)}" for path, x in found if not _is_array(x)]
    if rows:
        raise TraceError(faults(title, rows, remedy))


def check_captured(name: str, captured: Sequence[Any]) -> None:
    """TraceError names the arrays that a step changes in place behind its arguments."""
    rows = [f"a value that it closes over: {_alien(x)}" for x in captured if isinstance(x, jax.Ref)]
    if rows:
        raise TraceError(faults(f"{name} cannot be planned:", rows))


def _typed(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _alien(x: Any) -> str:
    if isinstance(x, jax.Ref):
        return f"{_typed(x)} can be changed in place (jax.Ref); pass its value, and return the new one"
    if hasattr(x, "dtype"):
        return f"an array of {x.dtype} holds no numbers"
    return f"{is_a(x)}, not an array"


def _is_array(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return isinstance(x, bool | int | float | complex) or (
        dtype is not None
        and hasattr(x, "shape")
        and getattr(dtype, "kind", "V") not in "OSUmM"
        and not isinstance(x, jax.Ref)
    )
