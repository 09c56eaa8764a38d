"""Cheapest paths between layouts: a compiled loop (``distances``)."""

import numpy as np

from meshdsl.planner.compiled import Costs, Ints, compiled


@compiled
def relax(source: Ints, target: Ints, price: Costs, costs: Costs) -> None:
    """Make costs [ends, rows] those after any number of moves: passes over all moves until none helps.

    Args:
      source: per move, where it begins. target: where it leads. price: what it costs.
    """
    ends, rows = costs.shape
    fresh = np.ones(ends, dtype=np.bool_)  # lowered since the moves from there were looked at
    helped = True
    while helped:
        helped = False
        known = fresh.copy()
        fresh[:] = False
        for i in range(source.size):
            s, t = source[i], target[i]
            if known[s] or fresh[s]:
                before, after, paid, lower = costs[s], costs[t], price[i], False
                for j in range(rows):
                    found = before[j] + paid
                    lower |= found < after[j]
                    after[j] = min(after[j], found)
                if lower:
                    fresh[t] = helped = True
