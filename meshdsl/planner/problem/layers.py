"""Repeated layers: nodes that stand for the same operations in layer after layer of a step.

The layers of a deep step are written out one after the other in its forward pass, backward pass, arguments and
optimizer. So in program order there are *runs* of nodes that repeat with a period, as often as there are layers; a
backward pass traverses them from the last to the first. Producers and consumers tell which repetition of one run
belongs to which of another.

    arguments  w0 w1 w2 w3      forward  f0 f1 f2 f3      backward  b3 b2 b1 b0       f0 reads w0, b3 reads w3, ...
    a run of period 1           one of period |f|         one of period |b|, reversed

A run may traverse the layers several times, in *sweeps*, and a layer may span several periods of it.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshdsl.planner.limits import DEFAULT_LIMITS, SearchLimits
from meshdsl.planner.problem.ports import Wiring
from meshdsl.util.arrays import Ids

_UNKNOWN = np.iinfo(np.intp).min
_NONE: Ids = np.empty((0, 0), dtype=np.intp)


class RepeatedLayers:
    """The equal layers of a step.

    Args:
      nodes: [layers, nodes of a layer]; the nodes of a column are of one class.
      count: number of nodes of the problem.
      wiring: of the problem.

    Attributes:
      layer: [nodes], the layer of each; -1 for nodes outside of all layers.
      column: [nodes], the column of each; the node itself outside.
    """

    def __init__(self, nodes: Ids, count: int, wiring: Wiring) -> None:
        self.nodes = nodes
        self.layer, self.column = np.full(count, -1), np.arange(count)
        self.layer[nodes] = np.arange(len(nodes))[:, None]
        self.column[nodes] = np.arange(nodes.shape[1])
        self._wiring, self._count = wiring, count

    @classmethod
    def none(cls, count: int, wiring: Wiring) -> "RepeatedLayers":
        """Returns an instance without layers."""
        return cls(_NONE, count, wiring)

    @cached_property
    def order(self) -> Ids:
        """The uses of values, sorted by the producer's layer and port, in the same order in every layer."""
        return np.lexsort((*self._linked[2::-1],))

    @cached_property
    def links(self) -> Ids:
        """[uses in ``order``, 6]: the producer's layer, column, port; layers onward, the consumer's column, port."""
        return np.stack([column[self.order] for column in self._linked], axis=1)

    @cached_property
    def _linked(self) -> list[Ids]:
        wiring = self._wiring
        producer, consumer = wiring.node_of[wiring.use_producers], wiring.node_of[wiring.uses]
        onward = np.where(self.layer[consumer] >= 0, self.layer[consumer] - self.layer[producer], self._count)
        return [
            self.layer[producer],
            self.column[producer],
            wiring.use_producers - wiring.first_port[producer],
            onward,
            self.column[consumer],
            wiring.uses - wiring.first_port[consumer],
        ]


class _NodeRun(NamedTuple):
    """Nodes from ``start`` on that repeat ``times`` times, every ``period`` nodes."""

    start: int
    period: int
    times: int


class _Traversal(NamedTuple):
    """How a run traverses the layers.

    Args:
      sweeps: how often it traverses them.
      periods: of the run in each layer.
      sign: 1 forwards, -1 backwards.
      first: the layer that a sweep begins with.
    """

    run: _NodeRun
    sweeps: int = 1
    periods: int = 1
    sign: int = 1
    first: int = 0

    @property
    def times(self) -> int:
        """Layers of a sweep."""
        return self.run.times // (self.sweeps * self.periods)

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest layer."""
        last = self.first + self.sign * (self.times - 1)
        return min(self.first, last), max(self.first, last)

    def steps(self, nodes: Ids) -> Ids:
        """Returns how many layers of its sweep come before each node of the run."""
        before = (nodes - self.run.start) // (self.run.period * self.periods)
        return np.asarray(before % self.times if self.sweeps > 1 else before)

    def nodes(self, layers: Ids) -> Ids:
        """Returns the nodes of some layers, [layers, nodes of a layer]."""
        start, size = self.run.start, self.run.period * self.periods
        at = self.sign * (layers - self.first)[:, None] + self.times * np.arange(self.sweeps)
        return np.asarray(start + size * at[:, :, None] + np.arange(size)).reshape(layers.size, -1)


def layers_of(kinds: Ids, producers: Ids, consumers: Ids, limits: SearchLimits = DEFAULT_LIMITS) -> Ids:
    """Returns the nodes of equal layers, [layers, nodes of a layer], or an array without rows.

    Args:
      kinds: [nodes], a number, equal for equal nodes.
      producers: [uses], the node that produces the value.
      consumers: [uses], the node that consumes it.
      limits: of the search.
    """
    least = limits.problem_layers_least
    runs = list(_disjoint_runs(kinds, least, limits.problem_layers_periods))
    if not runs:
        return _NONE
    found = _traversals(runs, producers, consumers, kinds.size, limits.problem_layers_ends)
    found.sort(key=lambda traversal: traversal.run.start)
    low, high = max(each.ends[0] for each in found), min(each.ends[1] for each in found)
    if high - low + 1 < least:
        return _NONE
    return np.hstack([each.nodes(np.arange(low, high + 1)) for each in found])


def _disjoint_runs(kinds: Ids, least: int, most_periods: int) -> Iterator[_NodeRun]:
    """Yields runs without common nodes that repeat ``least`` times or more, the longest first."""
    taken = np.zeros(kinds.size, dtype=np.bool_)
    found = sorted(
        (start - stop, period, start, stop)
        for period in _frequent_periods(kinds, least, most_periods)
        for start, stop in _repetitions(kinds, period, least)
    )
    for _, period, start, stop in found:
        free = start + np.flatnonzero(~taken[start:stop])
        if free.size == 0 or (free.size < stop - start and free[-1] - free[0] >= free.size):
            continue
        times = free.size // period
        if times >= least:
            taken[free] = True
            yield _NodeRun(int(free[0]), period, times)


def _frequent_periods(kinds: Ids, least: int, most: int) -> list[int]:
    """Returns the distances between a node and the next of its kind, the most frequent first."""
    order = np.argsort(kinds, kind="stable")
    gaps, counts = np.unique(np.diff(order)[kinds[order[1:]] == kinds[order[:-1]]], return_counts=True)
    frequent = np.argsort(-counts, kind="stable")[:most]
    return [int(gap) for gap, count in zip(gaps[frequent], counts[frequent], strict=True) if count >= least - 1]


def _repetitions(kinds: Ids, period: int, least: int) -> Iterator[tuple[int, int]]:
    """Yields the ranges in which nodes repeat with a period: the first node, and one past the last."""
    same = np.concatenate([[False], kinds[:-period] == kinds[period:], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
    for start, stop in edges[edges[:, 1] - edges[:, 0] >= (least - 1) * period].tolist():
        yield start, stop + period


def _most_common_times(runs: list[_NodeRun]) -> int:
    """Returns how often most nodes repeat."""
    sizes: dict[int, int] = {}
    for run in runs:
        sizes[run.times] = sizes.get(run.times, 0) + run.period * run.times
    return max(sizes, key=lambda times: (sizes[times], times))


def _traversals(runs: list[_NodeRun], producers: Ids, consumers: Ids, count: int, ends: int) -> list[_Traversal]:
    """Returns how the runs that repeat about as often as most nodes, or a multiple of that, traverse the layers.

    One after the other is placed: next to those known if they share values layer by layer; else, as the runs of a
    decoder may be, from the first layer on.

    Args:
      count: number of nodes.
      ends: repetitions that may be missing.
    """
    times = _most_common_times(runs)
    open_runs = {r: options for r, run in enumerate(runs) if (options := list(_options(run, times, ends)))}
    of, layer, found = np.full(count, -1), np.full(count, _UNKNOWN), list[_Traversal]()
    for r in open_runs:
        of[runs[r].start : runs[r].start + runs[r].period * runs[r].times] = r
    while open_runs:
        linked = _linked_runs(open_runs, of, layer, producers, consumers)
        r, traversal = next(linked, (next(iter(open_runs)), None))
        found.append(traversal or open_runs[r][0])
        del open_runs[r]
        here = np.flatnonzero(of == r)
        layer[here] = found[-1].first + found[-1].sign * found[-1].steps(here)
        of[here] = -1
    return found


def _options(run: _NodeRun, layers: int, ends: int) -> Iterator[_Traversal]:
    """Yields the ways in which a run may traverse so many layers, up to ``ends`` more or less."""
    several = max(1, round(run.times / layers))
    if abs(run.times // several - layers) > ends:
        return
    for sweeps in range(1, several + 1):
        if several % sweeps == 0 and (sweeps == 1 or run.times % several == 0):
            yield _Traversal(run, sweeps, several // sweeps)


def _linked_runs(
    open_runs: dict[int, list[_Traversal]], of: Ids, layer: Ids, producers: Ids, consumers: Ids
) -> Iterator[tuple[int, _Traversal]]:
    """Yields open runs most of whose layers share values with one known layer each, at a constant distance.

    Args:
      open_runs: the ways in which each may traverse the layers.
      of: [nodes], the open run of each; -1 for the others.
      layer: [nodes], if known.
    """
    ends = np.concatenate([producers, consumers]), np.concatenate([consumers, producers])
    shared = (of[ends[0]] >= 0) & (layer[ends[1]] != _UNKNOWN)
    mine, there = ends[0][shared], layer[ends[1][shared]]
    runs = of[mine]
    for r in np.argsort(-np.bincount(runs), kind="stable").tolist() if runs.size else ():
        here = runs == r
        if here.any():
            agree, traversal = max((_fit(way, mine[here], there[here]) for way in open_runs[r]), key=lambda fit: fit[0])
            if 2 * agree >= traversal.times:
                yield r, traversal


def _fit(way: _Traversal, nodes: Ids, layers: Ids) -> tuple[int, _Traversal]:
    """Returns the direction and first layer on which most nodes agree, and the number of layers that do.

    Args:
      nodes: of the run.
      layers: known layers with which they share values.
    """
    step, found = way.steps(nodes), list[tuple[int, _Traversal]]()
    for sign in (1, -1):
        firsts, counts = np.unique(layers - sign * step, return_counts=True)
        first = int(firsts[counts.argmax()])
        agree = np.unique(step[layers - sign * step == first]).size
        found.append((agree, way._replace(sign=sign, first=first)))
    return max(found, key=lambda each: each[0])
