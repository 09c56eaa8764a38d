"""Values computed on first use: one that may never be read, and results that belong to an object."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class Lazy(Generic[T]):
    """A value computed when it is first read; it compares, copies and pickles as the value itself.

    Args:
      make: computes the value. It is called at most once, and then released with everything that it refers to.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make: Callable[[], T] | None = make
        self._made: T | None = None

    @classmethod
    def known(cls, value: T) -> "Lazy[T]":
        """Returns a lazy value that is computed already."""
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


def memoize_by_object(make: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Returns ``make`` with its results stored for as long as its first argument, a graph say, lives.

    The first argument is told apart by identity and equality as the key of a dictionary, further ones by equality. A
    result must not refer to the first argument: it would keep it alive.

        @memoize_by_object
        def graph_index(graph: Graph) -> GraphIndex: ...
    """
    results: WeakKeyDictionary[T, dict[Hashable, R]] = WeakKeyDictionary()

    @wraps(make)
    def recall(of: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        known = results.get(of)
        if known is None:
            known = results[of] = {}
        key = (*args, *kwargs.items())
        if key not in known:
            known[key] = make(of, *args, **kwargs)
        return known[key]

    return recall
