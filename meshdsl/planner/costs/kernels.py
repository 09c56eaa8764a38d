"""Cheapest paths between layouts: a compiled loop (``distances``)."""

import numpy as np

from meshdsl.util.arrays import Ids
from meshdsl.util.jit import Costs, Ints, njit_cached

# ---- Relaxed ---------------------------------------------------------------------------------------------------------


@njit_cached
def bellman_ford(source: Ints, target: Ints, price: Costs, costs: Costs) -> None:
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


# ---- Looked up -------------------------------------------------------------------------------------------------------
# The layouts of a plan: a compiled loop over the ports of all nodes (``Ports``).


@njit_cached
def lookup_port_layouts(rows: Ids, nodes: Ids, codes: Ids, begins: Ids, tables: Ids, at: Ids, bases: Ids) -> Ids:
    """Look up the layouts of ports by their placement codes on all mesh axes.

    Args:
      rows: per node and axis. nodes: per port, its own. codes: of rows; per port they begin at ``begins``.
      tables: one after the other; per port its own begins at ``at`` and has so many entries per axis (``bases``).
    """
    found = np.empty(nodes.size, dtype=np.intp)
    for port in range(nodes.size):
        place = 0
        for axis in range(rows.shape[1]):
            place = place * bases[port] + codes[begins[port] + rows[nodes[port], axis]]
        found[port] = tables[at[port] + place]
    return found
