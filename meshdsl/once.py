"""What follows from an object alone is worked out once, and kept as long as the object is."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
R = TypeVar("R")


def once(make: Callable[[T], R]) -> Callable[[T], R]:
    """A function of one object, a graph say, that is called once for each; what it returns must not keep hold of it."""
    known: WeakKeyDictionary[T, R] = WeakKeyDictionary()

    @wraps(make)
    def found(of: T) -> R:
        if of not in known:
            known[of] = make(of)
        return known[of]

    return found
