"""How what values and memory cost is drawn in a network: tables between those that make values, hubs, and readers."""

from collections.abc import Sequence

import numpy as np

from meshdsl.planner.derived import Derived
from meshdsl.planner.exact import Costs
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.network import Network
from meshdsl.planner.paying import paid, terms
from meshdsl.planner.stars import Stars
from meshdsl.planner.states import InQuestion, Left
from meshdsl.planner.wiring import End

FORK = 3  # ends of a value with two readers, for which one hub is exact


class Drawn(InQuestion):
    """Draws the values of a model, at its present memory prices.

    Args:
      left: nodes of which only some states are in question.
    """

    def __init__(self, model: Model, left: Left) -> None:
        super().__init__(model, left)
        self._ends = model.wiring.ends

    def _derive(self, derived: Derived) -> None:
        """Make all tables from now on from what is derived already."""
        self._derived, self._stars = derived, Stars(self.model, derived)

    def _is_wide(self, value: int) -> bool:
        """Whether a value has more readers than one hub serves exactly."""
        return len(self._ends(value)) > FORK and len(self.model.closure(value).fitting) > 1

    def _price(self, n: int) -> Costs:
        """What node n pays for memory in its states; nodes that pay alike get the same array."""
        rows, model = self.states[n].rows, self.model

        def make(unit: Costs, rows: Assignment) -> Costs:
            return np.asarray(paid(model, n)[tuple(rows.T)])

        found: Costs = self._derived.get(("paid", terms(model, n)), (model.units[n], rows), make)
        return found

    def _add(self, network: Network, value: int) -> None:
        """Add the tables of a value, unless it has many readers."""
        source, *readers = self._ends(value)
        if len(self.model.closure(value).fitting) == 1 or not readers:
            return
        if len(readers) == 1:
            own, read, kept = self.read(source), self.read(readers[0]), self.model.prices.kept.get(readers[0])
            table = self._stars.keeping(value, own, read, kept) if kept else self._stars.moves(value, own, read)
            network.add(source[0], readers[0][0], table)
        elif not self._is_wide(value):
            self._star(network, value, dict.fromkeys(readers, 1.0))

    def _add_prices(self, network: Network, value: int) -> None:
        """What a copy for a reader costs where memory is short, and the value itself that waits for it."""
        prices, (source, *readers) = self.model.prices, self._ends(value)
        paying = [reader for reader in readers if reader in prices.read or reader in prices.later]
        if not paying or len(self.model.closure(value).fitting) == 1:
            return
        own = self.read(source)
        for reader in paying:
            read = self.read(reader)
            if copied := prices.read.get(reader):
                network.add(source[0], reader[0], self._stars.copied(value, own, read, copied))
            if waiting := prices.later.get(reader):
                network.add(source[0], reader[0], self._stars.waiting(value, own, read, waiting))

    def _star(self, network: Network, value: int, parts: dict[End, float], weight: float = 1.0) -> None:
        """Some readers on one hub; a part of each one's own moves counts."""
        source = self._ends(value)[0]
        hub = self._stars.new(network, value, source[0])
        network.add(source[0], hub, self._stars.to(value, self.read(source), weight))
        for reader, part in parts.items():
            if kept := self.model.prices.kept.get(reader):
                network.add(hub, reader[0], self._stars.keeping_onward(value, self.read(reader), kept))
            elif part:
                network.add(hub, reader[0], self._stars.onward(value, self.read(reader), part * weight))

    def _chain(self, network: Network, value: int, source: End, readers: Sequence[End]) -> None:
        """Each hub serves one reader and the next hub; the last one serves two readers."""
        before, at, closure = source[0], self.read(source), self.model.closure(value)
        layouts = closure.fitting
        for reader in readers[:-1]:
            hub = network.new(closure.nothing, closure.placed, before)
            network.add(before, hub, self._stars.moves(value, at, layouts, 1.0, True))
            network.add(hub, reader[0], self._stars.moves(value, layouts, self.read(reader)))
            before, at = hub, layouts
        network.add(before, readers[-1][0], self._stars.moves(value, at, self.read(readers[-1])))

    def _stake(self, value: int) -> float:
        """The most that one move of a value can cost."""
        costs = self.model.closure(value).costs
        return float(costs[np.isfinite(costs)].max()) * self.model.trips(value)
