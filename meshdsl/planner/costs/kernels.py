"""Compiled loops: cheapest reshards between layouts, and the layouts of all ports of a plan."""

import numpy as np

from meshdsl.util.arrays import Ids
from meshdsl.util.jit import Costs, Ints, njit_cached


@njit_cached
def bellman_ford(source: Ints, target: Ints, price: Costs, costs: Costs) -> None:
    """Lowers costs to those after any number of edges: passes over all edges until none improves (Bellman 1958).

    Args:
      source, target, price: [edges].
      costs: [layouts, rows], before any edge; updated.
    """
    ends, rows = costs.shape
    fresh = np.ones(ends, dtype=np.bool_)  # lowered since the edges from there were relaxed
    improved = True
    while improved:
        improved = False
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
                    fresh[t] = improved = True


@njit_cached
def lookup_port_layouts(rows: Ids, nodes: Ids, codes: Ids, begins: Ids, tables: Ids, at: Ids, bases: Ids) -> Ids:
    """Returns the layout of every port, looked up by its placement codes on all mesh axes.

    Args:
      rows: [nodes, mesh axes], the state of a plan.
      nodes: [ports], the node of each.
      codes: the placement codes of the rows of all ports; those of a port begin at ``begins``.
      tables: layouts by placement codes, one table after the other; that of a port begins at ``at`` and has ``bases``
        entries per axis.
    """
    found = np.empty(nodes.size, dtype=np.intp)
    for port in range(nodes.size):
        place = 0
        for axis in range(rows.shape[1]):
            place = place * bases[port] + codes[begins[port] + rows[nodes[port], axis]]
        found[port] = tables[at[port] + place]
    return found
