"""The cheapest resharding tree of a value: from the layout at its producer to the layouts at all of its consumers.

A tensor gathered for one consumer is free for the next, so this is the Steiner tree problem in the directed graph of
layouts. It is solved exactly by dynamic programming over subsets of the targets (Dreyfus and Wagner 1971): with
``d`` the reshard costs,

    tree(v, {t})  =  d(v, t)
    tree(v, T)    =  min over forks f of  d(v, f)  +  min over splits T = A + B of  tree(f, A) + tree(f, B)

Example: S(0) at the producer; B and S(1) at consumers. All-gather to B (1 ms), then slice B -> S(1) (free): 1 ms, less
than the all-gather and an all-to-all S(0) -> S(1).

With many targets the nearest one is joined repeatedly instead (Takahashi and Matsuyama 1980). Each layout is made once
and shared; no step starts from a copy that was made partial for a consumer (see ``layouts.reshard``).

This is the reference implementation: the planner's objective is defined by it, and tests compare the others with it.
``encoding.steiner_variables`` applies the same recurrence to all sets of targets at once.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from meshdsl.ir.graph import sent_itemsize
from meshdsl.layouts.reshard import LayoutGraph, ReshardStep, reshard
from meshdsl.planner.limits import DEFAULT_LIMITS
from meshdsl.util.arrays import Costs

Edges = tuple[tuple[int, int], ...]
_TREES_REMEMBERED = 1 << 16  # resharding trees whose steps are memoised


def steiner_tree(
    costs: Costs, inner: Costs, own: int, wanted: Iterable[int], exact_targets: int = DEFAULT_LIMITS.costs_exact_targets
) -> tuple[float, Edges]:
    """Returns cost and edges of the cheapest tree; edges are pairs of layouts, from the root outwards.

    Args:
      costs: [layouts, layouts], of paths that end at a consumer.
      inner: [layouts, layouts], of paths from whose end others go on.
      own: the root.
      wanted: the targets.
      exact_targets: number of targets other than the root up to which the tree is exact.
    """
    targets = sorted(set(wanted) - {own})
    if not targets:
        return 0.0, ()
    if len(targets) == 1:
        return float(costs[own, targets[0]]), ((own, targets[0]),)
    if len(targets) > exact_targets:
        return _nearest_target_first(costs, inner, own, targets)
    return _DreyfusWagner(costs, inner, targets).tree(own)


# ---- The recurrence --------------------------------------------------------------------------------------------------


def cheapest_split(halves: Iterable[tuple[Costs, Costs]]) -> Costs:
    """Returns the least sum of two trees from one fork, over all ways to split their targets.

    This and ``cheapest_from_forks`` are the recurrence: here for one set of targets at a time, in
    ``encoding.steiner_variables`` for many sets at once.

    Args:
      halves: costs of the trees to both parts, each [..., layouts of the fork].
    """
    least: Costs | None = None
    for one, other in halves:
        total = one + other
        least = total if least is None else np.minimum(least, total, out=least)
    assert least is not None, "two targets or more can be divided"
    return least


def cheapest_from_forks(inner: Costs, split: Costs) -> Costs:
    """Returns the cost of the cheapest trees from every layout: to the best fork, and from there as ``split`` says.

    Args:
      inner: [layouts, forks], between layouts.
      split: [forks] for one set of targets, or [sets, forks] for many.
    """
    if split.ndim == 1:
        return np.asarray(np.min(inner + split[None], axis=1))
    least = np.full((len(split), len(inner)), np.inf)
    for fork, cost in enumerate(split.T):  # all at once would take sets * layouts^2 entries
        np.minimum(least, cost[:, None] + inner[:, fork], out=least)
    return least


class _DreyfusWagner:
    """The table of the recurrence: ``cost[mask][v]`` of the cheapest tree from v to the targets in ``mask``."""

    def __init__(self, costs: Costs, inner: Costs, targets: list[int]) -> None:
        self.inner, self.targets = inner, targets
        self.cost: dict[int, Costs] = {1 << i: costs[:, t] for i, t in enumerate(targets)}
        self.split: dict[int, Costs] = {}
        for mask in range(1, 1 << len(targets)):
            if mask not in self.cost:
                self.split[mask] = cheapest_split((self.cost[a], self.cost[mask ^ a]) for a in _halves(mask))
                self.cost[mask] = cheapest_from_forks(inner, self.split[mask])

    def tree(self, own: int) -> tuple[float, Edges]:
        full = (1 << len(self.targets)) - 1
        edges = dict.fromkeys(edge for edge in self._edges(full, own) if edge[0] != edge[1])
        return float(self.cost[full][own]), tuple(edges)

    def _edges(self, mask: int, at: int) -> list[tuple[int, int]]:
        if mask & (mask - 1) == 0:
            return [(at, self.targets[mask.bit_length() - 1])]
        fork = int(np.argmin(self.inner[at] + self.split[mask]))
        half = min(_halves(mask), key=lambda a: self.cost[a][fork] + self.cost[mask ^ a][fork])
        return [(at, fork), *self._edges(half, fork), *self._edges(mask ^ half, fork)]


def _halves(mask: int) -> list[int]:
    """Returns the proper subsets of ``mask`` that contain its lowest bit: each split in two parts once."""
    low = mask & -mask
    rest = mask ^ low
    found, sub = [], rest
    while sub:
        sub = (sub - 1) & rest
        found.append(low | sub)
    return found


def _nearest_target_first(costs: Costs, inner: Costs, own: int, targets: list[int]) -> tuple[float, Edges]:
    made, edges, total = [own], [], 0.0
    while targets:
        step = costs[np.ix_(made, targets)]
        i, j = np.unravel_index(int(np.argmin(step)), step.shape)
        total += float(step[i, j])
        edges.append((made[i], targets[j]))
        target = targets.pop(j)
        made += [target] if np.isfinite(inner[own, target]) else []
    return total, tuple(edges)


# ---- Steps -----------------------------------------------------------------------------------------------------------


@lru_cache(_TREES_REMEMBERED)
def tree_steps(
    within: LayoutGraph,
    shape: tuple[int, ...],
    itemsize: float,
    edges: Edges,
    manual: tuple[str, ...] = (),
    formats: tuple[str, ...] = (),
) -> tuple[ReshardStep, ...]:
    """Returns the reshard steps of a tree, in an order that can be executed; each layout is made once.

    Args:
      within: the space whose layouts the edges number.
      shape, itemsize: of the tensor, in elements and bytes.
      edges: from the root outwards.
      manual, formats: of the tensor (see ``ReshardCosts``).
    """
    layouts = within.layouts
    made = {layouts[edges[0][0]]} if edges else set()
    found: list[ReshardStep] = []
    for source, target in edges:
        path = reshard(layouts[source], layouts[target], shape, sent_itemsize(itemsize), within.mesh, manual, formats)
        known = max((i for i, step in enumerate(path, 1) if step.after in made), default=0)
        found += path[known:]
        made.update(step.after for step in path[known:])
    return tuple(found)
