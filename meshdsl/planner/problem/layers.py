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

from meshdsl.planner.problem.ports import Wiring
from meshdsl.util.arrays import Ids

_LEAST = 4  # layers that are worth looking for, and times that a run repeats
_ENDS = 2  # layers that may differ from the others, the first and the last
_GAPS = 200  # periods that are tried, the most frequent
_UNKNOWN = np.iinfo(np.intp).min
_NONE: Ids = np.empty((0, 0), dtype=np.intp)


class RepeatedLayers:
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
    def none(cls, count: int, wiring: Wiring) -> "RepeatedLayers":
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
        maker, reader = wiring.node_of[wiring.use_producers], wiring.node_of[wiring.uses]
        there = np.where(self.layer[reader] >= 0, self.layer[reader] - self.layer[maker], self._count)
        return [
            self.layer[maker],
            self.column[maker],
            wiring.use_producers - wiring.first_port[maker],
            there,
            self.column[reader],
            wiring.uses - wiring.first_port[reader],
        ]


class _Run(NamedTuple):
    """Nodes from ``start`` on that repeat ``times``, after ``period`` nodes each."""

    start: int
    period: int
    times: int


class _Turns(NamedTuple):
    """How a run goes through the layers: so many ``turns`` one after the other, with ``several`` periods in each layer.

    Args:
      sign: 1 forwards or -1 backwards. first: the layer that turns begin with.
    """

    run: _Run
    turns: int = 1
    several: int = 1
    sign: int = 1
    first: int = 0

    @property
    def times(self) -> int:
        """Layers of a turn."""
        return self.run.times // (self.turns * self.several)

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last layer."""
        last = self.first + self.sign * (self.times - 1)
        return min(self.first, last), max(self.first, last)

    def time(self, nodes: Ids) -> Ids:
        """How many layers of its turn come before each node of the run."""
        before = (nodes - self.run.start) // (self.run.period * self.several)
        return np.asarray(before % self.times if self.turns > 1 else before)

    def nodes(self, layers: Ids) -> Ids:
        """The nodes of layers, [layers, nodes of a layer]."""
        start, size = self.run.start, self.run.period * self.several
        at = self.sign * (layers - self.first)[:, None] + self.times * np.arange(self.turns)
        return np.asarray(start + size * at[:, :, None] + np.arange(size)).reshape(layers.size, -1)


def layers_of(kinds: Ids, makers: Ids, readers: Ids) -> Ids:
    """The nodes of equal layers, [layers, nodes of a layer]: those of one column are of one kind. Often none.

    Args:
      kinds: per node, a number.
      makers: per reading of a value, the node that makes it. readers: the one that reads it.
    """
    runs = list(_repeating(kinds))
    if not runs:
        return _NONE
    found = sorted(_turned(runs, _often(runs), makers, readers, kinds.size), key=lambda turns: turns.run.start)
    low, high = max(turns.ends[0] for turns in found), min(turns.ends[1] for turns in found)
    if high - low + 1 < _LEAST:
        return _NONE
    return np.hstack([turns.nodes(np.arange(low, high + 1)) for turns in found])


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


def _often(runs: list[_Run]) -> int:
    """How often most nodes repeat."""
    sizes: dict[int, int] = {}
    for run in runs:
        sizes[run.times] = sizes.get(run.times, 0) + run.period * run.times
    return max(sizes, key=lambda times: (sizes[times], times))


def _turned(runs: list[_Run], often: int, makers: Ids, readers: Ids, count: int) -> list[_Turns]:
    """How the runs that repeat about as often, or so many times more often, go through the layers.

    Those that share no values with others, layer by layer, begin with the first, as those of a decoder may.
    """
    left = {r: ways for r, run in enumerate(runs) if (ways := list(_ways(run, often)))}
    of, layer, found = np.full(count, -1), np.full(count, _UNKNOWN), list[_Turns]()
    for r in left:
        of[runs[r].start : runs[r].start + runs[r].period * runs[r].times] = r
    while left:
        r, turns = next(_linked(left, of, layer, makers, readers), (next(iter(left)), None))
        found.append(turns or left[r][0])
        del left[r]
        here = np.flatnonzero(of == r)
        layer[here] = found[-1].first + found[-1].sign * found[-1].time(here)
        of[here] = -1
    return found


def _ways(run: _Run, often: int) -> Iterator[_Turns]:
    """How a run may go through so many layers, or nearly."""
    several = max(1, round(run.times / often))
    if abs(run.times // several - often) > _ENDS:
        return
    for turns in range(1, several + 1):
        if several % turns == 0 and (turns == 1 or run.times % several == 0):
            yield _Turns(run, turns, several // turns)


def _linked(
    left: dict[int, list[_Turns]], of: Ids, layer: Ids, makers: Ids, readers: Ids
) -> Iterator[tuple[int, _Turns]]:
    """Runs of which most layers make or read what one layer of those known does, as many layers on for all.

    Args:
      left: ways that runs not known may go, by run. of: per node, its run, if that is one of them. layer: per node, if
        known.
    """
    ends = np.concatenate([makers, readers]), np.concatenate([readers, makers])
    shared = (of[ends[0]] >= 0) & (layer[ends[1]] != _UNKNOWN)
    mine, there = ends[0][shared], layer[ends[1][shared]]
    runs = of[mine]
    for r in np.argsort(-np.bincount(runs), kind="stable").tolist() if runs.size else ():
        here = runs == r
        if here.any():
            agree, turns = max((_agreeing(way, mine[here], there[here]) for way in left[r]), key=lambda way: way[0])
            if 2 * agree >= turns.times:
                yield r, turns


def _agreeing(way: _Turns, nodes: Ids, layers: Ids) -> tuple[int, _Turns]:
    """The direction and the first layer on which most nodes agree, and how many layers do.

    Args:
      nodes: of the run. layers: that they belong to, or are near.
    """
    time, found = way.time(nodes), list[tuple[int, _Turns]]()
    for sign in (1, -1):
        firsts, counts = np.unique(layers - sign * time, return_counts=True)
        first = int(firsts[counts.argmax()])
        agree = np.unique(time[layers - sign * time == first]).size
        found.append((agree, way._replace(sign=sign, first=first)))
    return max(found, key=lambda each: each[0])
