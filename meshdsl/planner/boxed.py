"""A network of which only some states of each node are in question: a *box*, decided exactly over and over again."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from meshdsl.planner.eliminate import eliminate
from meshdsl.planner.exact import Ids
from meshdsl.planner.joint import Joint
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.network import Network
from meshdsl.planner.prices import Prices

Box = Mapping[int, Ids]  # by node, its states in question, by position; all those of others

_LARGEST = 1 << 16  # entries of the largest table


class Decided(NamedTuple):
    """The best plan of a box, or one near it, and its cost in the network if that was decided exactly, else -inf."""

    rows: Assignment
    cost: float


def boxable(model: Model) -> Joint:
    """The networks of all states, in which nodes that have several stay."""
    model.focus()
    return Joint(model, stays=frozenset(n for n, states in enumerate(model.states) if len(states) > 1))


class Boxed:
    """Decides boxes of a network; nodes that it has lost are in none.

    Args:
      joint: whose network it is. known: a plan to begin from.
    """

    def __init__(self, joint: Joint, network: Network, known: Assignment) -> None:
        self._joint, self._network, self._order = joint, network, network.order
        domains, self._tables = network.listed()
        self._every = [np.arange(states) for states in domains]
        self._at = {v: i for i, v in enumerate(self._order)}
        self._incumbent = np.zeros(len(domains), dtype=np.intp)
        self.entries = 1 + sum(table.size for _, table in self._tables)
        self.begin(known)

    def begin(self, plan: Assignment) -> None:
        """From a plan: what cannot be decided exactly does as it does."""
        self.decided(self.held(plan, range(len(plan))))

    def held(self, plan: Assignment, nodes: Iterable[int]) -> Box:
        """The box in which some of the nodes do as in a plan."""
        states = self._joint.states
        return {n: np.flatnonzero((states[n].rows == plan[n]).all(axis=1)) for n in nodes if n in self._at}

    def decided(self, box: Box) -> Decided:
        """The best plan; its cost is infinite if there is none."""
        left, fewer = list(self._every), {self._at[n]: states for n, states in box.items()}
        for i, states in fewer.items():
            left[i] = states
        start = [int((states == i).argmax()) for states, i in zip(left, self._incumbent.tolist(), strict=True)]
        tables = (
            (scope, table if fewer.keys().isdisjoint(scope) else table[np.ix_(*(left[v] for v in scope))])
            for scope, table in self._tables
        )
        found = eliminate([states.size for states in left], tables, start, _LARGEST)
        self._incumbent = np.array([states[i] for states, i in zip(left, found.states.tolist(), strict=True)])
        rows = self._joint.rows(self._network.named(self._order, self._incumbent))
        return Decided(rows, self._network.constant + found.cost if found.exact else -np.inf)


def boxed(joint: Joint, prices: Prices, drawn: Callable[[Joint], Network], known: Assignment) -> Boxed:
    """A network of ``joint`` at prices of memory."""
    priced = joint.priced(joint.model.at(prices))
    return Boxed(priced, drawn(priced), known)
