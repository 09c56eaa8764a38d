"""A lower bound for meshes whose joint states are too many: the problem projected on pairs of mesh axes.

The axes are divided into parts. On each part a plan has a projection: the rows that every node takes there. Every part
counts its share of the cost of each node, minimised over the other axes, and of every reshard step between layouts at
least its cost, divided among the parts in which it changes a placement. So the sum of the minima of all parts is no
more than the cost of any plan.
"""

from dataclasses import dataclass

import numpy as np

from meshdsl.layouts.placement import REDUCTIONS
from meshdsl.planner.costs.reshard_cost import Axes, Groups, PricedEdges, ReshardCosts
from meshdsl.planner.objective import CostedPlan
from meshdsl.planner.problem.model import Model
from meshdsl.util.arrays import Ids, object_id


@dataclass(frozen=True)
class Projection:
    """A model on one part of the mesh axes, whose costs are lower bounds."""

    model: Model
    axes: Axes

    def plan(self, whole: CostedPlan) -> CostedPlan:
        """Returns the rows of a plan on these axes, with its whole cost."""
        return CostedPlan(whole.rows[:, self.axes], whole.cost, {})


def projections(model: Model) -> list[Projection]:
    """Returns the projections of a model on pairs of the axes that have more than one device."""
    axes = model.parallel_axes
    parts = tuple(axes[i : i + 2] for i in range(0, len(axes), 2))
    return [_project(model, part, parts) for part in parts]


def _project(model: Model, part: Axes, parts: Groups) -> Projection:
    others = tuple(axis for axis in range(model.width) if axis not in part)
    every = {object_id(unary): unary for unary in model.unary}  # those of equal nodes are one object
    shares = {key: np.floor(unary.min(axis=others) / len(parts)) for key, unary in every.items()}
    costs = {each: ProjectedCosts(each, part, parts) for each in model.reshard_costs.distinct}
    return Projection(model.on_axes(part, [shares[object_id(unary)] for unary in model.unary], costs), part)


class ProjectedCosts(ReshardCosts):
    """The least that reshard steps cost on a part of the axes.

    Layouts are numbered by their placements on these axes, whatever the order of axes in a dim. Only what domains of
    layouts need is defined: ``rank``, ``codes``, ``feasible``, ``edges`` and ``ids``. A projection has no memory prices
    and is never materialised, so sizes and the space of layouts are not read.
    """

    def __init__(self, whole: ReshardCosts, part: Axes, parts: Groups) -> None:
        self._whole, self._parts, self._known_edges = whole, parts, None
        sizes = (whole.rank + 1 + len(REDUCTIONS),) * len(part)
        self._number = np.ravel_multi_index(tuple(whole.codes[:, axis] for axis in part), sizes)
        self.rank, self.codes = whole.rank, np.stack(np.unravel_index(np.arange(np.prod(sizes)), sizes), axis=1)
        self.feasible, self._sizes = np.unique(self._number[whole.feasible]), sizes

    def _edges(self) -> tuple[PricedEdges, PricedEdges]:
        return self._projected(False), self._projected(True)

    def _projected(self, partial: bool) -> PricedEdges:
        """Returns each reshard step, projected, with its cost divided by the parts in which it changes a placement."""
        source, target, price = self._whole.edges(partial)
        codes = self._whole.codes
        changed = codes[source] != codes[target]
        parts = sum(changed[:, part].any(axis=1).astype(np.float64) for part in self._parts)
        ends = self._number[source], self._number[target]
        is_visible = ends[0] != ends[1]
        return ends[0][is_visible], ends[1][is_visible], np.floor(price[is_visible] / parts[is_visible])

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Returns layout numbers by placement codes; one past the last where there is no layout."""
        ids = np.full(len(self.codes), len(self.codes))
        ids[self.feasible] = self.feasible
        return ids.reshape(self._sizes)
