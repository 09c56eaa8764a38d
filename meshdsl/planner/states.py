"""The states of nodes that are in question: what each costs, what it makes and reads, and the plans of them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from meshdsl.planner.arrays import grouped, numbered
from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.network import Network
from meshdsl.planner.twins import each_of
from meshdsl.planner.wiring import End

Left = Mapping[int, Ids]  # by node, the states that are left in question, by position among those of the model


@dataclass(frozen=True, eq=False)
class States:
    """Joint signatures of a node, as row numbers per mesh axis, and what each costs by itself."""

    rows: Assignment
    cost: Costs


class InQuestion:
    """The states of a model's nodes.

    Args:
      left: nodes of which only some states are in question.
    """

    def __init__(self, model: Model, left: Left) -> None:
        self.model, self._left = model, left
        self._known: dict[Hashable, States] = {}
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
        return grouped(numbered(map(identity, self.states)))

    def _states(self, n: int) -> States:
        model = self.model
        key = (identity(model.states[n]), identity(model.units[n]))
        if key not in self._known:
            rows = model.states[n]
            self._known[key] = States(rows, model.units[n][tuple(rows.T)])
        return self._known[key]

    def _some(self, states: States, at: Ids) -> States:
        """Some of a node's states; equal choices get the same arrays."""
        key = (identity(states), at.tobytes())
        if key not in self._known:
            self._known[key] = States(states.rows[at], states.cost[at])
        return self._known[key]

    def read(self, end: End) -> Ids:
        """Layout numbers of a node's port over the node's states."""
        n, port = end
        closure = self.model.closures[self.model.between((n, port))]
        key = (identity(self.states[n]), port, closure.number, self.model.orders[n])
        if key not in self._layouts:
            self._layouts[key] = self.model.layout_ids(n, port, self.states[n].rows.T)
        return self._layouts[key]
