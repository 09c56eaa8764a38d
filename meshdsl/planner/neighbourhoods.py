"""A better plan from a known one: most operations are decided anew, exactly, while some hold; which ones is drawn.

Where few values disagree in many ways, messages settle badly and one mesh axis at a time is not enough. With a part of
the variables held the others are narrow enough to be eliminated over all axes at once (large neighbourhood search,
Shaw 1998). Each draw begins from the best states so far, so it never ends with worse ones; the draws are the same
every time.
"""

from collections.abc import Iterable

import numpy as np

from meshdsl.planner.clock import Clock
from meshdsl.planner.eliminate import Scope, eliminate
from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.joint import Joint
from meshdsl.planner.network import Network

_SEED = 1998
_LEAST, _MOST = 0.05, 0.5  # part of the variables that hold
_LARGEST = 1 << 20  # entries of the largest table
_WORK = 100_000_000  # entries of the networks of all draws together
_FEWEST, _DRAWS = 8, 200
_IDLE = 40  # draws without anything better


def improved(joint: Joint, best: Choice, evaluator: Evaluator) -> Choice:
    """A plan that is better than ``best``, or that one.

    Args:
      joint: the states in question, those of ``best`` among them.
    """
    network = joint.plans()
    search = _Search(network, _begin(joint, network, best))
    search.run(max(_FEWEST, min(_DRAWS, _WORK // max(1, network.entries))), joint.model.clock)
    found = evaluator.exact(evaluator.evaluate(joint.rows(network.named(network.order, search.states))))
    return min(best, found, key=lambda choice: choice.cost)


def _begin(joint: Joint, network: Network, best: Choice) -> Ints:
    """The states that the nodes have in a plan, by position in order; hubs come later."""
    places = {}
    for v in (v for v in network.order if v < len(joint.states)):
        places[v] = int(np.flatnonzero((joint.states[v].rows == best.rows[v]).all(axis=1))[0])
    return np.array([places.get(v, -1) for v in network.order], dtype=np.int64)


class _Search:
    """The best states so far of a network's variables, by position.

    Args:
      states: to begin with, -1 for those that are to be decided first.
    """

    def __init__(self, network: Network, states: Ints) -> None:
        self.domains, self.tables = network.listed()
        self.states, self.cost = np.maximum(states, 0), np.inf
        self._random = np.random.default_rng(_SEED)
        self._decide(states >= 0)

    def run(self, draws: int, clock: Clock) -> None:
        """Draw who holds, so many times at most."""
        idle = 0
        for _ in range(draws):
            part = self._random.uniform(_LEAST, _MOST)
            idle = 0 if self._decide(self._random.random(len(self.domains)) < part) else idle + 1
            if idle == _IDLE or clock.is_up():
                break

    def _decide(self, held: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> bool:
        """Decide all variables but those that hold; whether that is better."""
        sizes = np.where(held, 1, self.domains).tolist()
        start = np.where(held, 0, self.states).tolist()
        found = eliminate(sizes, self._cut(held.tolist()), start, _LARGEST)
        better = found.cost < self.cost
        if found.cost <= self.cost:
            self.states, self.cost = np.where(held, self.states, found.states), found.cost
        return better

    def _cut(self, held: list[bool]) -> Iterable[tuple[Scope, Costs]]:
        """The tables at the states that hold."""
        at = [slice(s, s + 1) if holds else slice(None) for s, holds in zip(self.states.tolist(), held, strict=True)]
        return ((scope, table[tuple(at[v] for v in scope)]) for scope, table in self.tables)
