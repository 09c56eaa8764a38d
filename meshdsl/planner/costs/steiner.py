"""The cheapest tree of moves from a value's own layout to every layout its readers ask for.

This is the Steiner tree problem in the graph of layouts, solved exactly by dynamic programming
over subsets of the wanted layouts (Dreyfus and Wagner 1971) up to six of them; beyond that the
nearest wanted layout is joined again and again. Each layout is made once and shared; nothing is
made from a copy that was made partial for a reader (see ``space``).
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from meshdsl.layouts.reshard import ReshardStep, Space, reshard
from meshdsl.util.arrays import Costs

Edges = tuple[tuple[int, int], ...]
_EXACT, _KNOWN = 6, 1 << 16


def steiner_tree(costs: Costs, inner: Costs, own: int, wanted: Iterable[int]) -> tuple[float, Edges]:
    """Cost and edges (closure entries, from the root outwards) of the cheapest tree.

    Args:
      costs: of moving to where a reader is. inner: of moving to where moves go on from.
    """
    targets = sorted(set(wanted) - {own})
    if not targets:
        return 0.0, ()
    if len(targets) == 1:
        return float(costs[own, targets[0]]), ((own, targets[0]),)
    if len(targets) > _EXACT:
        return _greedy(costs, inner, own, targets)
    return _Steiner(costs, inner, targets).best(own)


def cheapest_split(halves: Iterable[tuple[Costs, Costs]]) -> Costs:
    """Returns the least sum of two trees from one fork, over all ways to divide their targets.

    This and ``cheapest_from_forks`` are the recurrence of Dreyfus and Wagner: here for one set of targets at a time, in
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


class _Steiner:
    """``cost[mask][v]``: the cheapest tree from v to the targets in ``mask``."""

    def __init__(self, costs: Costs, inner: Costs, targets: list[int]) -> None:
        self.inner, self.targets = inner, targets
        self.cost: dict[int, Costs] = {1 << i: costs[:, t] for i, t in enumerate(targets)}
        self.joined: dict[int, Costs] = {}
        for mask in range(1, 1 << len(targets)):
            if mask not in self.cost:
                self.joined[mask] = cheapest_split((self.cost[a], self.cost[mask ^ a]) for a in _parts(mask))
                self.cost[mask] = cheapest_from_forks(inner, self.joined[mask])

    def best(self, own: int) -> tuple[float, Edges]:
        full = (1 << len(self.targets)) - 1
        edges = dict.fromkeys(edge for edge in self._edges(full, own) if edge[0] != edge[1])
        return float(self.cost[full][own]), tuple(edges)

    def _edges(self, mask: int, at: int) -> list[tuple[int, int]]:
        if mask & (mask - 1) == 0:
            return [(at, self.targets[mask.bit_length() - 1])]
        fork = int(np.argmin(self.inner[at] + self.joined[mask]))
        split = min(_parts(mask), key=lambda a: self.cost[a][fork] + self.cost[mask ^ a][fork])
        return [(at, fork), *self._edges(split, fork), *self._edges(mask ^ split, fork)]


def _parts(mask: int) -> list[int]:
    """Proper subsets of ``mask`` that hold its lowest bit."""
    low = mask & -mask
    rest = mask ^ low
    found, sub = [], rest
    while sub:
        sub = (sub - 1) & rest
        found.append(low | sub)
    return found


def _greedy(costs: Costs, inner: Costs, own: int, targets: list[int]) -> tuple[float, Edges]:
    made, edges, total = [own], [], 0.0
    while targets:
        step = costs[np.ix_(made, targets)]
        i, j = np.unravel_index(int(np.argmin(step)), step.shape)
        total += float(step[i, j])
        edges.append((made[i], targets[j]))
        target = targets.pop(j)
        made += [target] if np.isfinite(inner[own, target]) else []
    return total, tuple(edges)


@lru_cache(_KNOWN)
def tree_steps(within: Space, shape: tuple[int, ...], itemsize: int, edges: Edges) -> tuple[ReshardStep, ...]:
    """The moves along the edges, given as numbers of layouts; each layout is made once, and so is the way to it."""
    layouts = within.layouts
    made = {layouts[edges[0][0]]} if edges else set()
    found: list[ReshardStep] = []
    for source, target in edges:
        way = reshard(layouts[source], layouts[target], shape, itemsize, within.mesh)
        known = max((i for i, move in enumerate(way, 1) if move.after in made), default=0)
        found += way[known:]
        made.update(move.after for move in way[known:])
    return tuple(found)
