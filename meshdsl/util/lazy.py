"""Values that are worked out when they are first read, as they may never be."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

# ---- Later -----------------------------------------------------------------------------------------------------------


T = TypeVar("T")


class Lazy(Generic[T]):
    """A value, made when it is first asked for; compared, copied and pickled as what it is.

    Args:
      make: called once at most, and let go of with all that it holds.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: T | None = None

    @classmethod
    def known(cls, value: T) -> "Lazy[T]":
        """One that is there already."""
        return cls(lambda: value)

    @property
    def value(self) -> T:
        """The value."""
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made  # type: ignore[return-value]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lazy.known, (self.value,)


# ---- Once ------------------------------------------------------------------------------------------------------------
# What follows from an object alone is worked out once, and kept as long as the object is.


R = TypeVar("R")


def memoize_by_object(make: Callable[[T], R]) -> Callable[[T], R]:
    """A function of one object, a graph say, that is called once for each; what it returns must not keep hold of it."""
    known: WeakKeyDictionary[T, R] = WeakKeyDictionary()

    @wraps(make)
    def found(of: T) -> R:
        if of not in known:
            known[of] = make(of)
        return known[of]

    return found
