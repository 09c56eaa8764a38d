"""What a network has lost: the variables that were eliminated, whose best states follow from those of the others."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.exact import Costs

Labels = NDArray[np.intp]
UNDECIDED = np.iinfo(np.intp).max  # no table has this state, so reading what is not decided yet is an error


@dataclass(frozen=True)
class Gone:
    """A variable that was eliminated: its states and tables at that time, by neighbour."""

    variable: int
    labels: Labels | None
    unary: Costs
    ends: tuple[tuple[int, Labels | None, Costs], ...]

    def decode(self, chosen: Labels) -> None:
        """Add its best state, given those of the variables that were left, by label."""
        cost = self.unary
        for w, labels, table in self.ends:
            at = chosen[w]
            cost = cost + table[:, at if labels is None else np.searchsorted(labels, at)]
        best = int(cost.argmin())
        chosen[self.variable] = best if self.labels is None else self.labels[best]


@dataclass(frozen=True)
class Stamped:
    """What was eliminated of a network before it was added, so many times.

    Args:
      numbers: [copies, names], what its variables ``names`` are called.
    """

    trail: "list[Gone | Stamped]"
    names: list[int]
    numbers: Labels

    def decode(self, chosen: Labels) -> None:
        """Add the best states of all copies, given those of the variables that were left; their names are kept."""
        column = {v: i for i, v in enumerate(self.names)}
        states: dict[int, Labels] = {}

        def of(v: int) -> Labels:
            if v not in states:
                states[v] = chosen[self.numbers[:, column[v]]]
            return states[v]

        for gone in reversed(self.trail):
            assert isinstance(gone, Gone), "what is added has nothing added to it"
            cost = np.broadcast_to(gone.unary[:, None], (gone.unary.size, len(self.numbers)))
            for w, _, table in gone.ends:
                cost = cost + table[:, of(w)]
            states[gone.variable] = cost.argmin(axis=0)
            if gone.variable in column:
                chosen[self.numbers[:, column[gone.variable]]] = states[gone.variable]
