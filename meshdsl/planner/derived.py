"""What is made of arrays, made once."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from meshdsl.planner.exact import Costs


class Derived:
    """Arrays made from other arrays, each made once: equal parts of a model stay the same objects.

    Results are known by the identity of the arrays they come from, which are kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def get(self, how: Hashable, sources: tuple[Any, ...], make: Callable[..., Any]) -> Any:
        """``make(*sources)``, remembered under ``how`` and the sources."""
        key = (how, *map(id, sources))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = (make(*sources), sources)
        return found[0]

    def copy(self) -> "Derived":
        """What is made from now on is kept apart."""
        other = Derived()
        other._known = dict(self._known)
        return other

    def plus(self, a: Costs, b: Costs) -> Costs:
        """The sum of two arrays."""
        return np.asarray(self.get("plus", (a, b), np.add))

    def turned(self, table: Costs) -> Costs:
        """The transpose; turned twice, the array itself."""
        other: Costs = self.get("turned", (table,), np.transpose)
        self._known["turned", id(other)] = (table, (other,))
        return other
