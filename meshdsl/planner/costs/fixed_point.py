"""Costs as exact integers.

Costs are compared lexicographically: first seconds, then the number of collectives and local steps. Both are packed
into one integer, ``seconds / unit * TIES + ties``, which a float64 represents exactly. So the solver needs one addition
and one minimum, infinity is free, sums do not depend on their order, and the same problem has the same plan on every
machine.
"""

from dataclasses import dataclass
from math import frexp

import numpy as np

from meshdsl.util.arrays import Costs

# Laws of the encoding, not tuning: 33 bits of seconds and 19 bits of ties fill the significand of a float64.
TIES = 2.0**19
COLLECTIVE_TIE, MOVE_TIE = 64.0, 1.0  # ties of a collective and of any reshard step
_PRECISION = 2.0**33  # units in the total that a scale is made for, at most
_RARELY = 2.0**-10  # a power of 2, so that products with it are exact


@dataclass(frozen=True)
class FixedPoint:
    """A scale of costs.

    Args:
      unit: seconds of one cost unit.
    """

    unit: float

    @classmethod
    def of(cls, seconds: float) -> "FixedPoint":
        """Returns a scale that resolves a total of about this many seconds.

        The unit is a power of 2, so that steps of about as many seconds have one scale, and tables in common.
        """
        return cls(2.0 ** frexp(max(seconds, 1e-9))[1] / _PRECISION)

    def pack(self, seconds: Costs, ties: "Costs | float" = 0.0) -> Costs:
        """Returns seconds and ties as exact costs."""
        packed: Costs = np.rint(seconds / self.unit) * TIES + ties
        return packed

    def seconds(self, cost: float) -> float:
        """Returns the seconds of a cost, without its ties."""
        return float(cost // TIES) * self.unit

    def cost(self, seconds: float) -> float:
        """Returns the least cost that takes these seconds; infinity stays infinite."""
        return float(np.ceil(seconds / self.unit) * TIES)


def weight_of(trips: int) -> float:
    """Returns by what costs in a loop count that runs so often.

    A loop that is expected not to run counts a little: with nothing, any layouts would do, however bad if it does run.
    """
    return trips or _RARELY


def scale_costs(costs: Costs, count: float) -> Costs:
    """Returns ``count`` times the costs; infinite costs, of impossible states, stay infinite even zero times."""
    return np.asarray(costs * count if count else np.where(np.isfinite(costs), 0.0, costs))
