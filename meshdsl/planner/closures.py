"""Closures of a model: of all layouts, of those near a plan, or of the plan's own.

Each has a number of its own, by which what follows from it is known.
"""

from collections.abc import Iterable, Mapping
from itertools import count

from meshdsl.planner.closure import Closure
from meshdsl.planner.distances import Distances
from meshdsl.planner.exact import Ids
from meshdsl.planner.near import Groups, between


class Closures:
    """Makes closures, and knows those that are asked for again."""

    def __init__(self) -> None:
        self._numbers = count()
        self._wholes: dict[Distances, Closure] = {}
        self._held: dict[tuple[Distances, bytes], Closure] = {}

    def whole(self, distances: Iterable[Distances], few: bool) -> dict[Distances, Closure]:
        """Of all layouts; if they are ``few``, as on two mesh axes, made once."""
        found = self._wholes if few else {}
        for d in distances:
            if d not in found:
                found[d] = Closure(d, d.fitting, d.fitting, next(self._numbers))
        return found

    def near(self, read: Mapping[Distances, Ids], groups: Groups) -> dict[Distances, Closure]:
        """Of layouts that are read, with moves through those near them."""
        return {d: self._between(d, layouts, groups) for d, layouts in read.items()}

    def held(self, read: Iterable[tuple[Distances, Ids]]) -> dict[Distances, Closure]:
        """Of the layouts that a plan has, and nothing new; those of plans that have the same ones are one."""
        found = {}
        for d, layouts in read:
            key = d, layouts.tobytes()
            if key not in self._held:
                self._held[key] = self._between(d, layouts, ())
            found[d] = self._held[key]
        return found

    def let_go(self) -> None:
        """Of those of plans."""
        self._held.clear()

    def _between(self, distances: Distances, layouts: Ids, groups: Groups) -> Closure:
        return Closure(distances, layouts, between(distances, layouts, groups), next(self._numbers))
