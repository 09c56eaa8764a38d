"""Costs as exact integers.

Costs are compared lexicographically: first seconds, then the number of collectives and moves.
Both are packed into one integer, ``seconds / unit * TIES + ties``, held exactly in a float64, so
the solver needs one addition and one minimum, infinity is free, and the same problem gives the
same plan on every machine.
"""

from dataclasses import dataclass

import numpy as np

from meshdsl.util.arrays import Costs

TIES = 2.0**19
COLLECTIVE_TIE, MOVE_TIE = 64.0, 1.0
_PRECISION = 2.0**33


@dataclass(frozen=True)
class FixedPoint:
    """The size of one cost unit in seconds."""

    unit: float

    @classmethod
    def of(cls, seconds: float) -> "FixedPoint":
        """A scale that resolves a total of about this many seconds."""
        return cls(max(seconds, 1e-9) / _PRECISION)

    def pack(self, seconds: Costs, ties: "Costs | float" = 0.0) -> Costs:
        """Seconds (and ties) as exact costs."""
        packed: Costs = np.rint(seconds / self.unit) * TIES + ties
        return packed

    def seconds(self, cost: float) -> float:
        """The seconds of a cost, ties left out."""
        return float(cost // TIES) * self.unit


def scale_costs(costs: Costs, count: float) -> Costs:
    """Costs, so many times; what cannot be had stays infinite where it is needed no time."""
    return np.asarray(costs * count if count else np.where(np.isfinite(costs), 0.0, costs))
