"""Nodes that are twins: of equal kind, run as often, under equal statements.

What is true of one is true of all of them, so it is worked out for the first and known for the others.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from meshdsl.planner.arrays import equal, first_of, numbered, occurring
from meshdsl.planner.exact import Ids
from meshdsl.planner.identity import identity
from meshdsl.planner.node import Node

T = TypeVar("T")


class Twins:
    """``first``: per node, the first whose twin it is; ``kinds``: a number, the same whatever is stated.

    Args:
      like: of the same nodes under other statements.
    """

    def __init__(self, nodes: Sequence[Node], like: "Twins | None" = None) -> None:
        # placements, not pins: those are equal whatever the order in which axes are stated
        stated = numbered(
            [
                (node.pin.placements, node.split, node.asked) if node.pin.placements or node.split or node.asked else ()
                for node in nodes
            ]
        )
        self.kinds: Ids = like.kinds if like else _kinds(nodes)
        self.first = first_of(equal((self.kinds, stated)))
        self._firsts: list[int] = self.first.tolist()
        self._once: list[int] = occurring(self.first).tolist()

    def each(self, make: Callable[[int], T]) -> list[T]:
        """What ``make`` says of every node, having been asked about one of each that are twins."""
        known = {n: make(n) for n in self._once}
        return [known[n] for n in self._firsts]

    def numbered(self, said: Callable[[int], Hashable]) -> Ids:
        """Per node, a number for what is said of it and of its twins alike, the same for what is equal."""
        found = np.empty_like(self.first)
        found[self._once] = numbered(map(said, self._once))
        return np.asarray(found[self.first])

    def in_states(self, rows: Ids) -> Ids:
        """Per node, the first that is its twin and in the same state.

        Args:
          rows: per node and mesh axis, its state.
        """
        asked = self.first
        for column in rows.T:
            asked = asked * (rows.max() + 1) + column
        _, once, places = np.unique(asked, return_index=True, return_inverse=True)
        return np.asarray(once[places])


def _kinds(nodes: Sequence[Node]) -> Ids:
    """Per node, a number for its kind and how often it runs."""
    return equal((numbered([identity(node.kind) for node in nodes]), numbered([node.trips for node in nodes])))


def each_of(firsts: Ids, make: Callable[[int], T]) -> list[T]:
    """What ``make`` says of every node, having been asked about the first of each that are alike."""
    known = {n: make(n) for n in occurring(firsts).tolist()}
    return [known[n] for n in firsts.tolist()]
