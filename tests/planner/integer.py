"""A planning problem as an integer program, solved by HiGHS: none of the planner's networks, eliminations or messages.

    x[n, s]      node n is in joint state s; one per node
    f[v, r, a]   reader r of value v is served over arc a of the layouts' graph: a unit flow from where x puts the
                 value's own layout to where x puts the reader's
    y[v, a]      arc a is paid, if any reader uses it

    minimise  sum of x * cost of the state  +  sum of y * cost of the arc * weight

Arcs lead between layouts from which moves go on; copies that are partial hang on them as leaves. Costs are the
model's in a ``unit`` that makes the whole about a million: HiGHS works with absolute tolerances.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix


@dataclass
class Rows:
    """Linear rows with their bounds, entry by entry."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, columns, values, low, high):
        row = len(self.low)
        self.entries += [(row, int(c), float(v)) for c, v in zip(columns, values, strict=True)]
        self.low.append(low)
        self.high.append(high)


class Whole:
    """The integer program of a model."""

    def __init__(self, model, unit):
        self.model, self.unit, self.rows = model, unit, Rows()
        self.costs, self.whole = [], []
        self.first = [self._node(n) for n in range(len(model.nodes))]
        for value in (v.id for v in model.problem.index.values):
            at, *readers = model.wiring.ends_of(value)
            if readers and len(model.domain(value).indices) > 1:
                self._value(value, at, readers)

    def solve(self, seconds):
        """Least cost, and what HiGHS proved it cannot be below."""
        rows, columns, values = zip(*self.rows.entries)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self.rows.low), len(self.costs)))
        found = milp(
            self.costs,
            integrality=self.whole,
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, self.rows.low, self.rows.high),
            options={"mip_rel_gap": 1e-9, "time_limit": seconds},
        )
        assert found.success, found.message
        return found.fun * self.unit, found.mip_dual_bound * self.unit

    def _columns(self, costs, whole):
        start = len(self.costs)
        self.costs += (np.asarray(costs) / self.unit).tolist()
        self.whole += [whole] * (len(self.costs) - start)
        return np.arange(start, len(self.costs))

    def _node(self, n):
        states = self.model.states[n]
        columns = self._columns(self.model.unary[n][tuple(states.T)], 1)
        self.rows.add(columns, np.ones(columns.size), 1, 1)
        return columns

    def _value(self, value, at, readers):
        closure, weight = self.model.domain(value), self.model.weight(value)
        size = len(closure.indices)
        arcs = [(a, b, closure.transit_costs[a, b]) for a in range(size) for b in range(size) if a != b]
        arcs += [(a, size + b, closure.costs[a, b]) for a in range(size) for b in np.flatnonzero(closure.partial)]
        arcs = [arc for arc in arcs if np.isfinite(arc[2])]
        paid = self._columns([cost * weight for *_, cost in arcs], 1)
        ends = np.array([(a, b) for a, b, _ in arcs])
        for reader in readers:
            flow = self._columns(np.zeros(len(arcs)), 0)
            for used, bought in zip(flow, paid):
                self.rows.add([used, bought], [1, -1], -np.inf, 0)
            self._conserve(flow, ends, closure, at, reader)

    def _conserve(self, flow, ends, closure, at, reader):
        """What flows into a layout flows out, but where the value is made, and where it is read."""
        size = len(closure.indices)
        for layout in range(2 * size):
            columns = [*flow[ends[:, 1] == layout], *flow[ends[:, 0] == layout]]
            values = [1.0] * int((ends[:, 1] == layout).sum()) + [-1.0] * int((ends[:, 0] == layout).sum())
            leaf = layout >= size
            made = [] if leaf else self._in(at, layout)
            read = self._in(reader, layout - size * leaf) if leaf == bool(closure.partial[layout - size * leaf]) else []
            columns, values = [*columns, *made, *read], [*values, *[1.0] * len(made), *[-1.0] * len(read)]
            if columns:
                self.rows.add(columns, values, 0, 0)

    def _in(self, end, layout):
        """Columns of the states in which a port has a layout."""
        n, port = end
        return self.first[n][self.model.layout_ids(n, port, self.model.states[n].T) == layout]
