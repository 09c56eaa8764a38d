"""The layouts of a tensor that are in question, and what it costs to move between them."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.distances import Distances
from meshdsl.planner.exact import Costs, Ids


class Closure:
    """Reshard costs between some layouts of tensors of one shape.

    Layouts go by their place in ``active`` (numbers in ``distances``); the last row and
    column of ``costs`` are infinite and stand for all others. Moves lead ``through`` some layouts.
    """

    def __init__(self, distances: Distances, active: Ids, through: Ids, number: int) -> None:
        self.distances, self.active, self.through, self.number = distances, active, through, number
        self._ids: dict[tuple[str, ...], Ids] = {}

    @property
    def costs(self) -> Costs:
        """What the cheapest moves cost."""
        return self._both[1]

    @property
    def inner(self) -> Costs:
        """The same for moves that make nothing partial: from where they end, moves may go on."""
        return self._both[0]

    @cached_property
    def _both(self) -> tuple[Costs, Costs]:
        inner, whole = self.distances.rows(self.active, self.through, self.active)
        return _with_none(inner), _with_none(whole)

    @cached_property
    def fitting(self) -> Ids:
        """All of the layouts."""
        return np.arange(self.active.size)

    @cached_property
    def placed(self) -> Ids:
        """Placement codes of the layouts, one column per mesh axis."""
        return self.distances.codes[self.active]

    @cached_property
    def partial(self) -> NDArray[np.bool_]:
        """Which of the layouts are partial."""
        return np.asarray((self.placed > self.distances.rank).any(axis=1))

    @cached_property
    def nothing(self) -> Costs:
        """No cost for any layout."""
        return np.zeros(self.active.size)

    def between(self, sources: Ids, targets: Ids, inner: bool = False) -> Costs:
        """Reshard costs from each of some layouts to each of others, to stay there or to go on from there."""
        return np.asarray((self.inner if inner else self.costs)[sources[:, None], targets])

    @cached_property
    def local_bytes(self) -> Costs:
        """Bytes that one device holds in each layout."""
        return np.append(self.distances.bytes * self.distances.shares[self.active], np.inf)

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Places of layouts by placement codes, axes of one dim in ``order``, major first."""
        if order not in self._ids:
            self._ids[order] = self.places[self.distances.ids(order)]
        return self._ids[order]

    @cached_property
    def places(self) -> Ids:
        """Places of layouts by their numbers in ``distances``, and of what is no layout."""
        places = np.full(len(self.distances.codes) + 1, self.active.size)
        places[self.active] = self.fitting
        return places


def _with_none(costs: Costs) -> Costs:
    """With a row and a column for layouts that are not in question."""
    return np.pad(costs, ((0, 1), (0, 1)), constant_values=np.inf)
