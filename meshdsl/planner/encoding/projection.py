"""A bound for meshes whose joint states are too many: the same problem seen on a part of the axes.

The axes are dealt into parts. On each part a plan leaves a trace: the rows that every node takes
there. A part charges its share of what the nodes cost, whatever the best the other axes could do,
and of every move between layouts what it costs at least, shared between the parts in which it
changes something. So the minima of all parts together are no more than any plan costs.
"""

import numpy as np

from meshdsl.planner.costs.reshard_cost import Axes, Groups, LayoutDomains, ReshardCosts
from meshdsl.planner.objective import CostedPlan
from meshdsl.planner.problem.model import Model, ReshardCostsByValue, SearchHints
from meshdsl.util.arrays import Costs, Ids, object_id


class Projection(Model):
    """A model on one of the parts into which the mesh axes are dealt; its costs are lower bounds."""

    def __init__(self, whole: Model, part: Axes, parts: Groups) -> None:
        self.problem, self.mesh, self.nodes, self.scale = whole.problem, whole.mesh, whole.nodes, whole.scale
        self.deadline, self.wiring, self.limits = whole.deadline, whole.wiring, whole.limits
        self.tables, self.axes = whole.tables, tuple(whole.axes[axis] for axis in part)
        self.orders, self.width, self._part = [self.axes] * len(self.nodes), len(part), part
        others = tuple(axis for axis in range(whole.width) if axis not in part)
        every = {object_id(unit): unit for unit in whole.unary}  # those of equal nodes are one object
        shares = {key: np.floor(unit.min(axis=others) / len(parts)) for key, unit in every.items()}
        self.unary = [shares[object_id(unit)] for unit in whole.unary]
        self._distances = {d: _Projected(d, part, parts) for d in whole.reshard_costs.distinct}
        self.reshard_costs = ReshardCostsByValue(list(self._distances.values()), whole.reshard_costs.index_of)
        self._finite, self._closures, self._twins, self.hints = {}, LayoutDomains(), whole._twins, SearchHints()
        self._begin()

    def seen(self, choice: CostedPlan) -> CostedPlan:
        """A plan's rows on these axes, with its whole cost."""
        return CostedPlan(choice.rows[:, self._part], choice.cost, {})


def projections(model: Model) -> list[Projection]:
    """One on each two of the mesh axes."""
    parts = tuple(model.parallel_axes[i : i + 2] for i in range(0, len(model.parallel_axes), 2))
    return [Projection(model, part, parts) for part in parts]


class _Projected(ReshardCosts):
    """What moves cost at least on some axes; layouts go by their placements there, whatever their order."""

    def __init__(self, whole: ReshardCosts, part: Axes, parts: Groups) -> None:
        self._whole, self._parts, self._known_edges = whole, parts, {}
        sizes = (whole.rank + 4,) * len(part)
        self._number = np.ravel_multi_index(tuple(whole.codes[:, axis] for axis in part), sizes)
        present = np.unique(self._number[whole.feasible])
        self.rank, self.codes = whole.rank, np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=1)
        self.feasible, self._sizes = present, sizes

    def _edges(self, partial: bool) -> tuple[Ids, Ids, Costs]:
        """Each real move, as it is seen here: the parts in which it changes a placement share its price."""
        source, target, price = self._whole.edges(partial)
        codes = self._whole.codes
        changed = codes[source] != codes[target]
        parts = sum(changed[:, part].any(axis=1).astype(np.float64) for part in self._parts)
        ends = self._number[source], self._number[target]
        here = ends[0] != ends[1]
        return ends[0][here], ends[1][here], np.floor(price[here] / parts[here])

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Layout numbers by placement codes; one past the last where there is none."""
        ids = np.full(len(self.codes), len(self.codes))
        ids[self.feasible] = self.feasible
        return ids.reshape(self._sizes)
