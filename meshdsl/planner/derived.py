"""What is made of arrays, made once; and the ways in which the tables of a network are made."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.identity import identity


class Derived:
    """Arrays made from other arrays, each made once: equal parts of a model stay the same objects.

    Results are known by the identity of the arrays they come from, which are kept alive.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def get(self, how: Hashable, sources: tuple[Any, ...], make: Callable[..., Any]) -> Any:
        """``make(*sources)``, remembered under ``how`` and the sources."""
        key = (how, *map(identity, sources))
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
        self._known["turned", identity(other)] = (table, (other,))
        return other


def some(array: NDArray[Any], keep: Ids) -> NDArray[Any]:
    """Some entries."""
    return array[keep]


def merged(unary: Costs, other: Costs, between: Costs, image: Ids) -> Costs:
    """The table of a variable and another one, whose state ``image`` says."""
    return np.asarray(unary + other[image] + between[image, np.arange(image.size)])


def least(unary: Costs, table: Costs) -> Costs:
    """The cheapest state of a variable for each of its only neighbour's, as a table of one row."""
    return np.asarray((unary[:, None] + table).min(axis=0)[None])


def plus_row(unary: Costs, row: Costs) -> Costs:
    """A variable's table and one of one row."""
    return np.asarray(unary + row[0])


def least_of_two(unary: Costs, left: Costs, right: Costs) -> Costs:
    """The cheapest way from each state of one neighbour to each of the other's over the shared middle."""
    left = left + unary[:, None]
    if left.size * right.shape[1] <= 1 << 18:
        return np.asarray((left[:, :, None] + right[:, None, :]).min(axis=0))
    found: Costs = left[0][:, None] + right[0][None]
    for from_left, from_right in zip(left[1:], right[1:], strict=True):
        np.minimum(found, from_left[:, None] + from_right[None], out=found)
    return found
