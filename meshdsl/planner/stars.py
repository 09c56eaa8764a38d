"""Tables of moves and of what copies cost, and stars: hubs of values, where their trees of moves fork.

A hub is in one of the layouts that are in question, from which moves go on. Readers may also all take one copy that
was made partial, from which no move goes on: a hub has states for such *copies* as well, after the layouts.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.derived import Derived
from meshdsl.planner.exact import Costs, Ids, times
from meshdsl.planner.model import Model
from meshdsl.planner.network import Network


class Stars:
    """Tables of moves, on all trips of a value; equal values share them.

    ``part`` and ``weight`` are what the costs are multiplied by.
    """

    def __init__(self, model: Model, derived: Derived) -> None:
        self.model, self.derived = model, derived

    def moves(self, value: int, sources: Ids, targets: Ids, part: float = 1.0, inner: bool = False) -> Costs:
        """Cost of moving ``value`` from each of some layouts to each of others, to stay there or to go on (inner)."""
        closure, weight = self.model.closure(value), self.model.trips(value) * part
        how = ("moves", closure.number, weight, inner)
        made: Costs = self.derived.get(
            how, (sources, targets), lambda a, b: times(closure.between(a, b, inner), weight)
        )
        return made

    def new(self, network: Network, value: int, after: int) -> int:
        """Add a hub to a network, in order after another variable."""
        closure = self.model.closure(value)

        def with_copies(states: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([states, states[closure.partial]])

        return network.new(
            self.derived.get("star", (closure.nothing,), with_copies),
            self.derived.get("star", (closure.placed,), with_copies),
            after,
        )

    def to(self, value: int, sources: Ids, weight: float) -> Costs:
        """Cost of moving to a hub."""
        closure, copies = self.model.closure(value), self._copies(value)

        def make(at: Ids, forks: Ids) -> Costs:
            return times(np.hstack([closure.between(at, forks, True), closure.between(at, copies)]), weight)

        weight *= self.model.trips(value)
        made: Costs = self.derived.get(("to star", closure.number, weight), (sources, closure.fitting), make)
        return made

    def onward(self, value: int, targets: Ids, weight: float) -> Costs:
        """Cost of moving from a hub to a reader."""
        copies, moves = self._copies(value), self.moves(value, self.model.closure(value).fitting, targets, weight)

        def make(onward: Costs, read: Ids) -> Costs:
            return np.vstack([onward, np.where(copies[:, None] == read[None], 0.0, np.inf)])

        made: Costs = self.derived.get("from star", (moves, targets), make)
        return made

    def keeping(self, value: int, sources: Ids, targets: Ids, price: float) -> Costs:
        """Cost of moving from each of some layouts to each of others, and of keeping one on the way, per byte."""
        whole = self._keeping(value, price)
        made: Costs = self.derived.get("keeping", (whole, sources, targets), lambda t, a, b: t[a[:, None], b])
        return made

    def keeping_onward(self, value: int, targets: Ids, price: float) -> Costs:
        """The same from a hub to a reader."""
        copies, moves = self._copies(value), self.keeping(value, self.model.closure(value).fitting, targets, price)

        def make(onward: Costs, read: Ids) -> Costs:
            same = copies[:, None] == read[None]
            return np.vstack([onward, np.where(same, self._paid(value, price)[read][None], np.inf)])

        made: Costs = self.derived.get(("keeping from star", price), (moves, targets), make)
        return made

    def _keeping(self, value: int, price: float) -> Costs:
        """Between all layouts."""
        closure, trips = self.model.closure(value), self.model.trips(value)

        def make(inner: Costs, costs: Costs) -> Costs:
            there, onward, held = times(inner, trips), times(costs, trips), self._paid(value, price)
            least = onward + held
            for m in closure.fitting:
                np.minimum(least, there[:, m, None] + (held[m] + onward[m])[None], out=least)
            return least

        made: Costs = self.derived.get(("keeping", trips, price), (closure.inner, closure.costs), make)
        return made

    def copied(self, value: int, made: Ids, read: Ids, price: float) -> Costs:
        """What a copy costs at a price per byte where it is read in another layout than it is made in."""

        def make(own: Ids, at: Ids) -> Costs:
            return np.where(own[:, None] == at[None], 0.0, self._paid(value, price)[at][None])

        found: Costs = self.derived.get(("copied", self.model.closure(value).number, price), (made, read), make)
        return found

    def waiting(self, value: int, made: Ids, read: Ids, price: float) -> Costs:
        """What a value costs at a price per byte that waits to be read: itself, if it is read as it is made."""
        least = self.model.scale.pack(np.asarray(price * self.model.distances[value].least_bytes))

        def make(own: Ids, at: Ids) -> Costs:
            return np.where(own[:, None] == at[None], self._paid(value, price)[own][:, None], least)

        found: Costs = self.derived.get(("waiting", self.model.closure(value).number, price), (made, read), make)
        return found

    def _paid(self, value: int, price: float) -> Costs:
        return self.model.scale.pack(price * self.model.closure(value).local_bytes)

    def _copies(self, value: int) -> Ids:
        closure = self.model.closure(value)
        return np.asarray(closure.fitting[closure.partial])
