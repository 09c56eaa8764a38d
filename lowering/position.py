"""Where a device stands on a mesh axis.

An axis may also be one in time: its "devices" take turns in a loop, and a position on it is the loop's counter.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

import jax
from jax import lax

_NONE: Mapping[str, jax.Array] = MappingProxyType({})
_TURNS: ContextVar[Mapping[str, jax.Array]] = ContextVar("turns", default=_NONE)


def position(axis: str) -> jax.Array:
    """The position of this device on ``axis``, as an int32 scalar."""
    turns = _TURNS.get()
    return turns[axis] if axis in turns else lax.axis_index(axis)


@contextmanager
def taking_turns(axis: str, turn: jax.Array) -> Iterator[None]:
    """While this is traced, ``axis`` is one in time, and it is this turn."""
    token = _TURNS.set({**_TURNS.get(), axis: turn})
    try:
        yield
    finally:
        _TURNS.reset(token)
