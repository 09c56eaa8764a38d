"""The layouts of a plan: a compiled loop over the ports of all nodes (``Ports``)."""

import numpy as np

from meshdsl.planner.compiled import compiled
from meshdsl.planner.exact import Ids


@compiled
def looked_up(rows: Ids, nodes: Ids, codes: Ids, begins: Ids, tables: Ids, at: Ids, bases: Ids) -> Ids:
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
