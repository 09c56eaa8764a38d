"""Tables of moves and of what copies cost, and stars: hubs of values, where their trees of moves fork.

A hub is in one of the layouts that are in question, from which moves go on. Readers may also all take one copy that
was made partial, from which no move goes on: a hub has states for such *copies* as well, after the layouts.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.costs.fixed_point import repeated
from meshdsl.planner.mrf.network import Memo, Network
from meshdsl.planner.objective import paid, terms
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.ports import End
from meshdsl.planner.problem.variables import each_of
from meshdsl.util.arrays import Costs, Ids, group_by, intern_ids, object_id

# ---- Stars -----------------------------------------------------------------------------------------------------------


class HubTables:
    """Tables of moves, on all trips of a value; equal values share them.

    ``part`` and ``weight`` are what the costs are multiplied by.
    """

    def __init__(self, model: Model, derived: Memo) -> None:
        self.model, self.derived = model, derived

    def moves(self, value: int, sources: Ids, targets: Ids, part: float = 1.0, inner: bool = False) -> Costs:
        """Cost of moving ``value`` from each of some layouts to each of others, to stay there or to go on (inner)."""
        closure, weight = self.model.closure(value), self.model.trips(value) * part
        how = ("moves", closure.number, weight, inner)
        made: Costs = self.derived.get(
            how, (sources, targets), lambda a, b: repeated(closure.between(a, b, inner), weight)
        )
        return made

    def new(self, network: Network, value: int, after: int) -> int:
        """Add a hub to a network, in order after another variable."""
        closure = self.model.closure(value)

        def with_copies(states: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([states, states[closure.partial]])

        return network.new_variable(
            self.derived.get("star", (closure.nothing,), with_copies),
            self.derived.get("star", (closure.placed,), with_copies),
            after,
        )

    def to(self, value: int, sources: Ids, weight: float) -> Costs:
        """Cost of moving to a hub."""
        closure, copies = self.model.closure(value), self._copies(value)

        def make(at: Ids, forks: Ids) -> Costs:
            return repeated(np.hstack([closure.between(at, forks, True), closure.between(at, copies)]), weight)

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
            there, onward, held = repeated(inner, trips), repeated(costs, trips), self._paid(value, price)
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


# ---- States ----------------------------------------------------------------------------------------------------------
# The states of nodes that are in question: what each costs, what it makes and reads, and the plans of them.


Left = Mapping[int, Ids]  # by node, the states that are left in question, by position among those of the model


@dataclass(frozen=True, eq=False)
class PortStates:
    """Joint signatures of a node, as row numbers per mesh axis, and what each costs by itself."""

    rows: Assignment
    cost: Costs


class Domains:
    """The states of a model's nodes.

    Args:
      left: nodes of which only some states are in question.
    """

    def __init__(self, model: Model, left: Left) -> None:
        self.model, self._left = model, left
        self._known: dict[Hashable, PortStates] = {}
        self._layouts: dict[Hashable, Ids] = {}
        self.states = each_of(model.alike, self._states)
        for n in left:
            self.states[n] = self._some(self.states[n], left[n])

    def left(self, network: Network) -> Left:
        """The states of nodes that a network has left, for another ``Joint``; nodes that it has lost keep all."""
        here = {n: network.labels[n] for n in network.unary if n < len(self.states) and n in network.labels}
        return {**self._left, **{n: self._left[n][at] if n in self._left else at for n, at in here.items()}}

    def rows(self, chosen: Ids) -> Assignment:
        """The plan that a state of every variable stands for."""
        return self._assigned(chosen[: len(self.states)])

    def _assigned(self, at: Ids) -> Assignment:
        """The plan of some states, by position, one per node."""
        rows = self.model.whole.copy()
        for nodes in self._alike:
            rows[nodes] = self.states[nodes[0]].rows[at[nodes]]
        return rows

    @cached_property
    def _alike(self) -> list[Ids]:
        """Nodes that have the same states in question."""
        return group_by(intern_ids(map(object_id, self.states)))

    def _states(self, n: int) -> PortStates:
        model = self.model
        key = (object_id(model.states[n]), object_id(model.units[n]))
        if key not in self._known:
            rows = model.states[n]
            self._known[key] = PortStates(rows, model.units[n][tuple(rows.T)])
        return self._known[key]

    def _some(self, states: PortStates, at: Ids) -> PortStates:
        """Some of a node's states; equal choices get the same arrays."""
        key = (object_id(states), at.tobytes())
        if key not in self._known:
            self._known[key] = PortStates(states.rows[at], states.cost[at])
        return self._known[key]

    def read(self, end: End) -> Ids:
        """Layout numbers of a node's port over the node's states."""
        n, port = end
        closure = self.model.closures[self.model.between((n, port))]
        key = (object_id(self.states[n]), port, closure.number, self.model.orders[n])
        if key not in self._layouts:
            self._layouts[key] = self.model.layout_ids(n, port, self.states[n].rows.T)
        return self._layouts[key]


# ---- Drawn -----------------------------------------------------------------------------------------------------------
# How what values and memory cost is drawn in a network: tables between those that make values, hubs, and readers.


FORK = 3  # ends of a value with two readers, for which one hub is exact


class HubEncoder(Domains):
    """Draws the values of a model, at its present memory prices.

    Args:
      left: nodes of which only some states are in question.
    """

    def __init__(self, model: Model, left: Left) -> None:
        super().__init__(model, left)
        self._ends = model.wiring.ends

    def _derive(self, derived: Memo) -> None:
        """Make all tables from now on from what is derived already."""
        self._derived, self._stars = derived, HubTables(self.model, derived)

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
            hub = network.new_variable(closure.nothing, closure.placed, before)
            network.add(before, hub, self._stars.moves(value, at, layouts, 1.0, True))
            network.add(hub, reader[0], self._stars.moves(value, layouts, self.read(reader)))
            before, at = hub, layouts
        network.add(before, readers[-1][0], self._stars.moves(value, at, self.read(readers[-1])))

    def _stake(self, value: int) -> float:
        """The most that one move of a value can cost."""
        costs = self.model.closure(value).costs
        return float(costs[np.isfinite(costs)].max()) * self.model.trips(value)
