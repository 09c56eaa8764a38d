"""Equal layers: nodes that stand for the same operations in layer after layer of a step.

The layers of a deep step are written out one after the other, in its forward pass, backward pass, arguments and
optimizer. So in program order there are *runs* of nodes that repeat after so many, a period, as often as there are
layers; a backward pass runs through them from the last to the first. What nodes make and read tells which period of one
run belongs to which of another.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshdsl.planner.exact import Ids
from meshdsl.planner.wiring import Wiring

_LEAST = 4  # layers that are worth looking for, and times that a run repeats
_GAPS = 200  # periods that are tried, the most frequent
_NONE: Ids = np.empty((0, 0), dtype=np.intp)


class Layers:
    """The equal layers of a step: ``nodes`` [layers, nodes of a layer].

    ``layer`` and ``column`` say where a node is, -1 and itself for one that is in none. ``links`` says per reading of a
    value which layer it is made in and, in the columns after, which of the layer's ports makes it for which port of
    which layer. Readings go by layer, and alike in all layers; ``order`` says which they are.

    Args:
      wiring: of so many nodes.
    """

    def __init__(self, nodes: Ids, count: int, wiring: Wiring) -> None:
        self.nodes = nodes
        self.layer, self.column = np.full(count, -1), np.arange(count)
        self.layer[nodes] = np.arange(len(nodes))[:, None]
        self.column[nodes] = np.arange(nodes.shape[1])
        self._wiring, self._count = wiring, count

    @classmethod
    def none(cls, count: int, wiring: Wiring) -> "Layers":
        """None are known of."""
        return cls(_NONE, count, wiring)

    @cached_property
    def order(self) -> Ids:
        """Which readings come one after the other."""
        return np.lexsort((*self._linked[2::-1],))

    @cached_property
    def links(self) -> Ids:
        """[readings, columns], in order."""
        return np.stack([column[self.order] for column in self._linked], axis=1)

    @cached_property
    def _linked(self) -> list[Ids]:
        wiring = self._wiring
        maker, reader = wiring.nodes[wiring.makers], wiring.nodes[wiring.read]
        there = np.where(self.layer[reader] >= 0, self.layer[reader] - self.layer[maker], self._count)
        return [
            self.layer[maker],
            self.column[maker],
            wiring.makers - wiring.first[maker],
            there,
            self.column[reader],
            wiring.read - wiring.first[reader],
        ]


class _Run(NamedTuple):
    """Nodes from ``start`` on that repeat ``times``, after ``period`` nodes each."""

    start: int
    period: int
    times: int


def layers_of(kinds: Ids, makers: Ids, readers: Ids) -> Ids:
    """The nodes of equal layers, [layers, nodes of a layer]: those of one column are of one kind. Often none.

    Args:
      kinds: per node, a number.
      makers: per reading of a value, the node that makes it. readers: the one that reads it.
    """
    runs = list(_repeating(kinds))
    if not runs:
        return _NONE
    runs = _as_often(runs)
    turns = _turns(runs, _by_run(runs, makers, kinds.size), _by_run(runs, readers, kinds.size))
    ends = [sorted((first, first + sign * (runs[r].times - 1))) for r, (sign, first) in turns.items()]
    low, high = max(end[0] for end in ends), min(end[1] for end in ends)
    if high - low + 1 < _LEAST:
        return _NONE
    layers = np.arange(low, high + 1)
    return np.hstack([_nodes(runs[r], sign * (layers - first)) for r, (sign, first) in turns.items()])


def _nodes(run: _Run, times: Ids) -> Ids:
    """The nodes of a run, [times, period]."""
    return run.start + run.period * times[:, None] + np.arange(run.period)


def _repeating(kinds: Ids) -> Iterator[_Run]:
    """Runs that have no node in common, the longest first."""
    taken = np.zeros(kinds.size, dtype=np.bool_)
    found = sorted((-(stop - start), gap, start, stop) for gap in _gaps(kinds) for start, stop in _equal(kinds, gap))
    for _, gap, start, stop in found:
        free = start + np.flatnonzero(~taken[start:stop])
        if free.size == 0 or (free.size < stop - start and free[-1] - free[0] >= free.size):
            continue
        times = free.size // gap
        if times >= _LEAST:
            taken[free] = True
            yield _Run(int(free[0]), gap, times)


def _gaps(kinds: Ids) -> list[int]:
    """After how many nodes one of the same kind comes, the most frequent first."""
    order = np.argsort(kinds, kind="stable")
    gaps, counts = np.unique(np.diff(order)[kinds[order[1:]] == kinds[order[:-1]]], return_counts=True)
    often = np.argsort(-counts, kind="stable")[:_GAPS]
    return [int(gap) for gap, count in zip(gaps[often], counts[often], strict=True) if count >= _LEAST - 1]


def _equal(kinds: Ids, gap: int) -> Iterator[tuple[int, int]]:
    """Where nodes repeat after ``gap``: from a node to one past the last."""
    same = np.concatenate([[False], kinds[:-gap] == kinds[gap:], [False]])
    edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
    for start, stop in edges[edges[:, 1] - edges[:, 0] >= (_LEAST - 1) * gap].tolist():
        yield start, stop + gap


def _as_often(runs: list[_Run]) -> list[_Run]:
    """Those that repeat as often as most nodes do; where one repeats so many times more often, several are one."""
    sizes: dict[int, int] = {}
    for run in runs:
        sizes[run.times] = sizes.get(run.times, 0) + run.period * run.times
    layers = max(sizes, key=lambda times: (sizes[times], times))
    found = []
    for run in runs:
        several = max(1, round(run.times / layers))
        if abs(run.times // several - layers) <= 1:
            found.append(_Run(run.start, run.period * several, run.times // several))
    return found


def _by_run(runs: list[_Run], nodes: Ids, count: int) -> tuple[Ids, Ids]:
    """Per node that is asked for, its run, -1 for none, and how often that has repeated before it."""
    run, time = np.full(count, -1), np.zeros(count, dtype=np.intp)
    for r, (start, period, times) in enumerate(runs):
        run[start : start + period * times] = r
        time[start : start + period * times] = np.repeat(np.arange(times), period)
    return run[nodes], time[nodes]


def _turns(runs: list[_Run], made: tuple[Ids, Ids], read: tuple[Ids, Ids]) -> dict[int, tuple[int, int]]:
    """Per run, 1 or -1 for going through the layers forwards or backwards, and the layer that it begins with.

    Runs that share no value with others are left out.

    Args:
      made: per reading, run and time of what makes the value. read: of what reads it.
    """
    found, joined = {0: (1, 0)}, True
    while joined:
        joined = False
        for (mine, time), (other, its) in ((made, read), (read, made)):
            known = np.isin(mine, list(found)) & (other >= 0) & ~np.isin(other, list(found))
            if known.any():
                r = int(np.bincount(other[known]).argmax())
                here = known & (other == r)
                sign, first = np.array([found.get(i, (0, 0)) for i in range(len(runs))])[mine[here]].T
                found[r], joined = _turn(sign * time[here] + first, its[here]), True
    return found


def _turn(layers: Ids, times: Ids) -> tuple[int, int]:
    """The direction in which most times are as far from their layers, and the layer of the first."""
    turns = [(*np.unique(layers - sign * times, return_counts=True), sign) for sign in (1, -1)]
    firsts, counts, sign = max(turns, key=lambda turn: int(turn[1].max()))
    return sign, int(firsts[counts.argmax()])
