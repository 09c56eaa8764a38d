"""The exact part of the encoding: nodes, and values with at most two consumers.

Three components, each given to the next: ``Domains`` (the states of nodes, and the layouts of their ports),
``HubTables`` (tables of what resharding and memory cost between layouts), and ``HubEncoder``, which adds values to a
network.

A *hub* is an auxiliary variable at the fork of a value's resharding tree. Its states are the layouts of the value's
domain, from which reshard steps continue. Consumers may also share one copy that was made partial, from which no step
continues: a hub has a state for each such copy as well, after the layouts.
"""

from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.costs.fixed_point import scale_costs
from meshdsl.planner.costs.reshard_cost import Surcharge
from meshdsl.planner.mrf.network import Memo, Network
from meshdsl.planner.objective import memory_cost_key, node_memory_cost
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.ports import End
from meshdsl.planner.problem.variables import map_classes
from meshdsl.util.arrays import Costs, Ids, group_by, intern_ids, object_id

# ---- Domains ---------------------------------------------------------------------------------------------------------

Remaining = Mapping[int, Ids]  # by node, the states that are not pruned, by position among those of the model


@dataclass(frozen=True, eq=False)
class NodeStates:
    """Joint signatures of a node, as row numbers per mesh axis, and the cost of each by itself."""

    rows: Assignment
    cost: Costs


class Domains:
    """The states of a model's nodes; equal nodes share their arrays.

    Args:
      remaining: nodes of which only some states remain; all other nodes have those of the model.

    Attributes:
      states: by node.
    """

    def __init__(self, model: Model, remaining: Remaining) -> None:
        self._model, self._remaining = model, remaining
        self._known: dict[Hashable, NodeStates] = {}
        self._layouts: dict[Hashable, Ids] = {}
        self.states = map_classes(model.representative, self._all_states)
        for n, at in remaining.items():
            states = self.states[n]
            key = (object_id(states), at.tobytes())
            if key not in self._known:
                self._known[key] = NodeStates(states.rows[at], states.cost[at])
            self.states[n] = self._known[key]

    def at(self, model: Model) -> "Domains":
        """Returns the same domains for a view of the model at other memory prices, which do not affect them."""
        other = copy(self)
        other._model = model
        return other

    def remaining(self, network: Network) -> Remaining:
        """Returns the states that a network has not pruned, for the next builder; eliminated nodes keep theirs."""
        pruned = {n: network.labels[n] for n in network.unary if n < len(self.states) and n in network.labels}
        return {
            **self._remaining,
            **{n: self._remaining[n][at] if n in self._remaining else at for n, at in pruned.items()},
        }

    def rows(self, chosen: Ids) -> Assignment:
        """Returns the plan in which every node has the state at this position; entries of other variables follow."""
        rows = self._model.first_states.copy()
        for nodes in self._classes:
            rows[nodes] = self.states[nodes[0]].rows[chosen[nodes]]
        return rows

    def positions(self, n: int, row: Ids) -> Ids:
        """Returns the positions of the states of a node that are ``row``."""
        return np.flatnonzero((self.states[n].rows == row).all(axis=1))

    def layouts(self, end: End) -> Ids:
        """Returns the layout of a port in every state of its node, by place in the value's domain of layouts."""
        n, port = end
        model, states = self._model, self.states[n]
        domain = model.domains[model.port_costs(end)]
        key = (object_id(states), port, domain.number, model.orders[n])
        if key not in self._layouts:
            self._layouts[key] = model.layout_ids(n, port, states.rows.T)
        return self._layouts[key]

    @cached_property
    def _classes(self) -> list[Ids]:
        """Nodes by equal states."""
        return group_by(intern_ids(map(object_id, self.states)))

    def _all_states(self, n: int) -> NodeStates:
        model = self._model
        rows, unit = model.states[n], model.unary[n]
        key = (object_id(rows), object_id(unit))
        if key not in self._known:
            self._known[key] = NodeStates(rows, unit[tuple(rows.T)])
        return self._known[key]


# ---- Tables ----------------------------------------------------------------------------------------------------------


class HubTables:
    """Tables of a value's reshard costs, over all its iterations, and of its memory prices; equal values share them.

    Layouts are given by place in the value's domain. ``weight`` multiplies costs.
    """

    def __init__(self, model: Model, memo: Memo) -> None:
        self.model, self.memo = model, memo

    # ---- resharding

    def moves(self, value: int, sources: Ids, targets: Ids, weight: float = 1.0, inner: bool = False) -> Costs:
        """Returns the cost of resharding from each source to each target.

        Args:
          inner: the target is a fork, where the value may not be partial, instead of a consumer.
        """
        domain, times = self.model.domain(value), self.model.weight(value) * weight
        key = ("moves", domain.number, times, inner)
        made: Costs = self.memo.get(
            key, (sources, targets), lambda a, b: scale_costs(domain.between(a, b, inner), times)
        )
        return made

    def new_hub(self, network: Network, value: int, after: int) -> int:
        """Adds a hub to a network, positioned behind another variable, and returns its number."""
        domain = self.model.domain(value)

        def with_partial_copies(states: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([states, states[domain.partial]])

        return network.new_variable(
            self.memo.get("hub", (domain.zeros,), with_partial_copies),
            self.memo.get("hub", (domain.codes,), with_partial_copies),
            after,
        )

    def to_hub(self, value: int, sources: Ids, weight: float) -> Costs:
        """Returns the cost of resharding from each source to each state of a hub."""
        domain, partial = self.model.domain(value), self._partial_layouts(value)

        def make(at: Ids, forks: Ids) -> Costs:
            return scale_costs(np.hstack([domain.between(at, forks, True), domain.between(at, partial)]), weight)

        weight *= self.model.weight(value)
        made: Costs = self.memo.get(("to hub", domain.number, weight), (sources, domain.indices), make)
        return made

    def from_hub(self, value: int, targets: Ids, weight: float) -> Costs:
        """Returns the cost of resharding from each state of a hub to each layout of a consumer."""
        partial, moves = (
            self._partial_layouts(value),
            self.moves(value, self.model.domain(value).indices, targets, weight),
        )

        def make(moves: Costs, read: Ids) -> Costs:
            return np.vstack([moves, np.where(partial[:, None] == read[None], 0.0, np.inf)])

        made: Costs = self.memo.get("from hub", (moves, targets), make)
        return made

    def surcharges(self, value: int, what: Surcharge, sources: Ids, targets: Ids, share: float) -> Costs:
        """Returns a share of what resharding from each source to each target costs beyond its price."""
        domain, times = self.model.domain(value), self.model.weight(value) * share

        def make(own: Ids, at: Ids) -> Costs:
            return scale_costs(domain.beyond(what)[own[:, None], at], times)

        made: Costs = self.memo.get((what, domain.number, times), (sources, targets), make)
        return made

    # ---- memory: a price per byte

    def stored_moves(self, value: int, sources: Ids, targets: Ids, price: float) -> Costs:
        """Returns the cost of resharding and of storing one layout on the way, the cheapest one."""
        every = self._stored_between_all(value, price)
        made: Costs = self.memo.get("stored", (every, sources, targets), lambda t, a, b: t[a[:, None], b])
        return made

    def stored_from_hub(self, value: int, targets: Ids, price: float) -> Costs:
        """Returns the same from each state of a hub to each layout of a consumer."""
        partial = self._partial_layouts(value)
        moves = self.stored_moves(value, self.model.domain(value).indices, targets, price)

        def make(moves: Costs, read: Ids) -> Costs:
            same = partial[:, None] == read[None]
            return np.vstack([moves, np.where(same, self._stored(value, price)[read][None], np.inf)])

        made: Costs = self.memo.get(("stored from hub", price), (moves, targets), make)
        return made

    def copy_prices(self, value: int, made: Ids, read: Ids, price: float) -> Costs:
        """Returns the cost of storing a consumer's copy: none where it reads the layout that the producer makes."""

        def make(own: Ids, at: Ids) -> Costs:
            return np.where(own[:, None] == at[None], 0.0, self._stored(value, price)[at][None])

        found: Costs = self.memo.get(("copy", self.model.domain(value).number, price), (made, read), make)
        return found

    def waiting_prices(self, value: int, made: Ids, read: Ids, price: float) -> Costs:
        """Returns the cost of storing a value until a consumer reads it.

        That is the value itself where the consumer reads it as it is made, and else the smallest layout of all.
        """
        least = self.model.scale.pack(np.asarray(price * self.model.reshard_costs[value].least_bytes))

        def make(own: Ids, at: Ids) -> Costs:
            return np.where(own[:, None] == at[None], self._stored(value, price)[own][:, None], least)

        found: Costs = self.memo.get(("waiting", self.model.domain(value).number, price), (made, read), make)
        return found

    def _stored_between_all(self, value: int, price: float) -> Costs:
        """Returns ``stored_moves`` between all layouts: over every middle m, the paths to and from m and m itself."""
        domain, weight = self.model.domain(value), self.model.weight(value)

        def make(inner: Costs, costs: Costs) -> Costs:
            to_middle, onward, stored = (
                scale_costs(inner, weight),
                scale_costs(costs, weight),
                self._stored(value, price),
            )
            least = onward + stored
            for m in domain.indices:
                np.minimum(least, to_middle[:, m, None] + (stored[m] + onward[m])[None], out=least)
            return least

        made: Costs = self.memo.get(("stored", weight, price), (domain.transit_costs, domain.costs), make)
        return made

    def _stored(self, value: int, price: float) -> Costs:
        return self.model.scale.pack(price * self.model.domain(value).local_bytes)

    def _partial_layouts(self, value: int) -> Ids:
        domain = self.model.domain(value)
        return np.asarray(domain.indices[domain.partial])


# ---- Encoder ---------------------------------------------------------------------------------------------------------

FORK = 3  # ends of a value with two consumers, for which one hub is exact


class HubEncoder:
    """Adds nodes and values of a model to networks, at the model's present memory prices.

    Variable n is node n; hubs have later numbers.
    """

    def __init__(self, model: Model, domains: Domains, memo: Memo) -> None:
        self.model, self.domains, self.memo, self.tables = model, domains, memo, HubTables(model, memo)
        self.ends, self._surcharges = model.wiring.ends_of, model.surcharges

    def is_wide(self, value: int) -> bool:
        """Whether a value has more consumers than one hub serves exactly."""
        return len(self.ends(value)) > FORK and len(self.model.domain(value).indices) > 1

    def add_node(self, network: Network, n: int, priced: bool) -> None:
        """Adds a node; what it pays for memory is part of its cost if it is ``priced``."""
        states, model = self.domains.states[n], self.model

        def make(unit: Costs, rows: Assignment) -> Costs:
            return np.asarray(node_memory_cost(model, n)[tuple(rows.T)])

        cost = states.cost
        if priced:
            price: Costs = self.memo.get(("paid", memory_cost_key(model, n)), (model.unary[n], states.rows), make)
            cost = self.memo.sum(cost, price)
        network.add_variable(n, cost, states.rows)

    def add_outside_node(self, network: Network, n: int) -> None:
        """Adds a node whose cost is counted elsewhere."""
        states = self.domains.states[n]
        network.add_variable(n, self.memo.get("nothing", (states.cost,), np.zeros_like), states.rows)

    def add_value(self, network: Network, value: int) -> None:
        """Adds the tables of a value and of its memory prices; of a wide value only the latter."""
        if len(self.model.domain(value).indices) == 1:
            return
        source, *consumers = self.ends(value)
        if len(consumers) == 1:
            own, read, price = (
                self.domains.layouts(source),
                self.domains.layouts(consumers[0]),
                self.model.prices.path_copy.get(consumers[0]),
            )
            table = self.tables.stored_moves(value, own, read, price) if price else self.tables.moves(value, own, read)
            network.add(source[0], consumers[0][0], table)
        elif consumers and not self.is_wide(value):
            self.add_hub(network, value, dict.fromkeys(consumers, 1.0))
        prices = self.model.prices
        for consumer in consumers:
            copied, waiting = prices.copy.get(consumer), prices.waiting.get(consumer)
            shares = [(what, ends[consumer]) for what, ends in self._surcharges if consumer in ends]
            if copied or waiting or shares:
                own, read = self.domains.layouts(source), self.domains.layouts(consumer)
            for what, share in shares:
                network.add(source[0], consumer[0], self.tables.surcharges(value, what, own, read, share))
            if copied:
                network.add(source[0], consumer[0], self.tables.copy_prices(value, own, read, copied))
            if waiting:
                network.add(source[0], consumer[0], self.tables.waiting_prices(value, own, read, waiting))

    def add_hub(self, network: Network, value: int, shares: Mapping[End, float], weight: float = 1.0) -> None:
        """Connects the producer and some consumers to one hub.

        Args:
          shares: by consumer, the part of its own reshard that counts.
          weight: of all these costs.
        """
        source, layouts = self.ends(value)[0], self.domains.layouts
        hub = self.tables.new_hub(network, value, source[0])
        network.add(source[0], hub, self.tables.to_hub(value, layouts(source), weight))
        for consumer, share in shares.items():
            if price := self.model.prices.path_copy.get(consumer):
                network.add(hub, consumer[0], self.tables.stored_from_hub(value, layouts(consumer), price))
            elif share:
                network.add(hub, consumer[0], self.tables.from_hub(value, layouts(consumer), share * weight))

    def add_chain(self, network: Network, value: int) -> None:
        """Connects the consumers to a chain of hubs in program order, the last hub to two of them."""
        source, *consumers = self.ends(value)
        before, at, domain, layouts = (
            source[0],
            self.domains.layouts(source),
            self.model.domain(value),
            self.domains.layouts,
        )
        forks = domain.indices
        for consumer in consumers[:-1]:
            hub = network.new_variable(domain.zeros, domain.codes, before)
            network.add(before, hub, self.tables.moves(value, at, forks, 1.0, True))
            network.add(hub, consumer[0], self.tables.moves(value, forks, layouts(consumer)))
            before, at = hub, forks
        network.add(before, consumers[-1][0], self.tables.moves(value, at, layouts(consumers[-1])))

    def stake(self, value: int) -> float:
        """Returns the most that one reshard of a value can cost."""
        costs = self.model.domain(value).costs
        return float(costs[np.isfinite(costs)].max()) * self.model.weight(value)
