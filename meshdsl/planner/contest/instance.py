"""Memory over time: what the states of variables use at which time points, and what is left to use.

Only time points that may bind are kept: of neighbouring points the one with more live variables,
and none that stays within the limit whatever is chosen. What a variable uses in every state is
taken off the limit.
"""

import gzip
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshdsl.errors import ArgumentError, faults
from meshdsl.planner.mrf.network import Labels, Memo, Network
from meshdsl.util.arrays import Costs, Ints, index_array

# ---- Usage -----------------------------------------------------------------------------------------------------------


Interval = tuple[int, int]  # the first point, and the first after


class Usage:
    """Usages of variables by interval.

    ``held[v][interval]`` is what the states of v use at the points of the interval; ``limit`` is what
    may be used at each point, ``times`` which of the first points each is.
    """

    def __init__(self, limit: Costs, memo: Memo) -> None:
        self.limit, self.memo, self.times = limit, memo, np.arange(limit.size)
        self.held: dict[int, dict[Interval, Costs]] = {}
        self._rooms: dict[Interval, float] = {}

    @classmethod
    def of(cls, intervals: Iterable[Interval], used: Iterable[Costs], limit: float, memo: Memo) -> "Usage":
        """Usages of nodes that are live over time intervals, some of them empty."""
        live = {v: (at, use) for v, (at, use) in enumerate(zip(intervals, used, strict=True)) if at[0] < at[1]}
        points = _points([at for at, _ in live.values()])
        usage = cls(np.full(points.size, limit), memo)
        first, last = (np.searchsorted(points, [at[i] for at, _ in live.values()]).tolist() for i in range(2))
        for (v, (_, use)), lo, hi in zip(live.items(), first, last, strict=True):
            usage.add(v, (lo, hi), use)
        return usage

    def copy(self) -> "Usage":
        """Usages of its own with the same arrays."""
        other = Usage(self.limit.copy(), self.memo)
        other.times = self.times
        other.held = {v: dict(items) for v, items in self.held.items()}
        return other

    def add(self, v: int, interval: Interval, use: Costs) -> None:
        """A variable uses this over an interval, on top of what it uses already."""
        items = self.held.setdefault(v, {})
        items[interval] = self.memo.sum(items[interval], use) if interval in items else use

    def restrict(self, v: int, keep: Labels) -> None:
        """Leave these states of a variable."""
        items = self.held.get(v, {})
        for interval, use in items.items():
            items[interval] = self.memo.get("some", (use, keep), lambda use, keep: use[keep])

    def merge(self, v: int, w: int, image: Labels) -> None:
        """``v`` takes state ``image[j]`` where w takes j."""
        self.restrict(v, image)
        for interval, use in self.held.pop(v, {}).items():
            self.add(w, interval, use)

    def tidy(self) -> None:
        """Take off what is used in any case, and leave the points that may bind."""
        self._take_off()
        self._leave(np.flatnonzero(self._most() > self.limit))
        self._leave(self._fullest())
        self._rooms.clear()

    def impossible(self, v: int) -> NDArray[np.bool_] | None:
        """States of a variable that do not fit even if all others use the least; None if there are none."""
        bad: NDArray[np.bool_] | None = None
        for interval, use in self.held[v].items():
            most = self._room(interval)
            if use.max() > most:
                bad = (use > most) if bad is None else bad | (use > most)
        return bad

    def _room(self, interval: Interval) -> float:
        if interval not in self._rooms:
            self._rooms[interval] = float(self.limit[interval[0] : interval[1]].min())
        return self._rooms[interval]

    def _take_off(self) -> None:
        change = np.zeros(self.limit.size + 1)
        for v, items in list(self.held.items()):
            self.held[v] = {}
            for (lo, hi), use in items.items():
                least, more = self.memo.get("more", (use,), _above_least)
                change[lo] += least
                change[hi] -= least
                if more is not None:
                    self.held[v][lo, hi] = more
            if not self.held[v]:
                del self.held[v]
        self.limit -= np.cumsum(change)[:-1]

    def _most(self) -> Costs:
        """The most that can be used at each point."""
        change = np.zeros(self.limit.size + 1)
        for items in self.held.values():
            for (lo, hi), use in items.items():
                amount = use.max()
                change[lo] += amount
                change[hi] -= amount
        return np.cumsum(change)[:-1]

    def _fullest(self) -> Labels:
        """Points of which no neighbour has the same live variables and more, and no larger limit."""
        begun, ended = (np.zeros(self.limit.size + 1, dtype=np.intp) for _ in range(2))
        for items in self.held.values():
            for lo, hi in items:
                begun[lo] = ended[hi] = 1
        starts, stops, limit = np.cumsum(begun).tolist(), np.cumsum(ended).tolist(), self.limit.tolist()
        kept: list[int] = []
        for t in range(self.limit.size):
            while kept and stops[t] == stops[kept[-1]] and limit[t] <= limit[kept[-1]]:
                kept.pop()
            if not kept or starts[t] > starts[kept[-1]] or limit[t] < limit[kept[-1]]:
                kept.append(t)
        return np.array(kept, dtype=np.intp)

    def _leave(self, points: Labels) -> None:
        """Leave these points."""
        if points.size == self.limit.size:
            return
        self.limit, self.times = self.limit[points], self.times[points]
        at = np.searchsorted(points, np.arange(points[-1] + 2 if points.size else 1)).tolist()
        for v in list(self.held):
            items = self.held.pop(v)
            for (lo, hi), use in items.items():
                first, last = (at[min(t, len(at) - 1)] for t in (lo, hi))
                if first < last:
                    self.add(v, (first, last), use)


def _points(intervals: list[Interval]) -> Labels:
    """Time points at which a set of live nodes is a part of no other's: the last begin before each end."""
    begins = np.unique([lo for lo, _ in intervals])
    ends = np.unique([hi for _, hi in intervals])
    last = np.searchsorted(begins, ends) - 1
    return begins[np.unique(last)] if begins.size else begins.astype(np.intp)


def _above_least(use: Costs) -> tuple[float, Costs | None]:
    least = float(use.min())
    more = use - least if least else use
    return least, more if more.any() else None


# ---- Instance --------------------------------------------------------------------------------------------------------
# An instance: choose one strategy per node, at the least cost, within a memory limit.
#
# A node has strategies, each with a cost and a memory usage; an edge has a cost for every pair of
# strategies of its two ends. A node occupies memory at the time points ``[lo, hi)`` of its interval,
# if there are any, and at no time point may the usages of all live nodes together pass the limit.
# The total of all node and edge costs is to be least. All numbers are integers of 64 bits; sums may
# be larger, so a choice is judged in Python's integers.
#
# The file format is gzipped JSON, that of the ASPLOS / EuroSys 2025 contest.


@dataclass(frozen=True)
class Score:
    """What a choice costs, the most memory that it uses at a time point, and the most that it may use."""

    cost: int
    peak: int
    limit: int | None

    @property
    def fits(self) -> bool:
        """Whether the choice is valid."""
        return self.limit is None or self.peak <= self.limit


@dataclass(frozen=True)
class Instance:
    """Nodes by number, edges between them.

    Args:
      costs: per node, of each strategy; usages: likewise.
      intervals: per node, the first time point at which it is live, and the first at which it is no more.
      ends: per edge, its two nodes. tables: per edge, costs with the strategies of its first node along the first dim.
      limit: of the usages at a time point; None if there is none.
    """

    costs: Sequence[Ints]
    usages: Sequence[Ints]
    intervals: Sequence[tuple[int, int]]
    ends: Sequence[tuple[int, int]]
    tables: Sequence[Ints]
    limit: int | None

    def score(self, choice: Sequence[int]) -> Score:
        """A choice judged in exact integers."""
        cost = sum([int(costs[s]) for costs, s in zip(self.costs, choice, strict=True)])
        cost += sum([int(table[choice[a], choice[b]]) for (a, b), table in zip(self.ends, self.tables, strict=True)])
        change: dict[int, int] = {}
        for usages, (lo, hi), s in zip(self.usages, self.intervals, choice, strict=True):
            if lo < hi:
                change[lo] = change.get(lo, 0) + int(usages[s])
                change[hi] = change.get(hi, 0) - int(usages[s])
        peak = max(accumulate(change[t] for t in sorted(change)), default=0)
        return Score(cost, peak, self.limit)


def load_instance(path: Path) -> Instance:
    """Read an instance; ArgumentError if the file holds none."""
    import msgspec

    raw = Path(path).read_bytes()
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    try:
        return _instance(msgspec.json.decode(raw)["problem"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{path} holds no instance: {error!r}") from error


def _instance(problem: dict[str, Any]) -> Instance:
    nodes, edges = problem["nodes"], problem["edges"]
    known: dict[tuple[tuple[int, ...], bytes], Ints] = {}  # equal arrays become one

    def array(numbers: list[int], *shape: int) -> Ints:
        made = np.array(numbers, dtype=np.int64).reshape(shape or -1)
        return known.setdefault((made.shape, made.tobytes()), made)

    costs = [array(row) for row in nodes["costs"]]
    ends = [(int(a), int(b)) for a, b in edges["nodes"]]
    tables = [array(row, costs[a].size, costs[b].size) for (a, b), row in zip(ends, edges["costs"], strict=True)]
    usages = [array(row) for row in nodes["usages"]]
    intervals = [(int(lo), int(hi)) for lo, hi in nodes["intervals"]]
    limit = problem.get("usage_limit")
    instance = Instance(costs, usages, intervals, ends, tables, None if limit is None else int(limit))
    _require(instance)
    return instance


def _require(instance: Instance) -> None:
    """Raise ArgumentError unless every node has as many costs as usages, at least one, and none is negative."""
    bad = [
        f"node {v}: {costs.size} costs, {usages.size} usages"
        for v, (costs, usages) in enumerate(zip(instance.costs, instance.usages, strict=True))
        if costs.size != usages.size or not costs.size
    ]
    once = {id(a): a for a in (*instance.costs, *instance.usages, *instance.tables)}
    if any((a < 0).any() for a in once.values()):
        bad.append("a cost or a usage is negative")
    if bad:
        raise ArgumentError(faults("the instance cannot be:", bad[:8]))


# ---- Core ------------------------------------------------------------------------------------------------------------
# The core of an instance: its costs as a network, and its usages, in numbers that floats hold exactly.


_EXACT = 53  # bits of a float64


@dataclass(frozen=True)
class Core:
    """A network whose variables use memory.

    Args:
      cost_unit: what 1 stands for in the network's tables; more than 1 only where sums pass 2^53, costs
        are then rounded down. usage_unit: likewise for usages.
    """

    network: Network
    usage: Usage
    cost_unit: int
    usage_unit: int

    def copy(self) -> "Core":
        """A core of its own, with the same arrays."""
        return Core(self.network.copy(), self.usage.copy(), self.cost_unit, self.usage_unit)

    @property
    def feasible(self) -> bool:
        """False if it is certain that no choice is valid."""
        return not (self.usage.limit < 0).any() and all(np.isfinite(u).any() for u in self.network.unary.values())

    def restrict(self, v: int, keep: Labels) -> None:
        """Leave these states of a variable."""
        self.network.restrict(v, keep)
        self.usage.restrict(v, keep)

    def merge(self, v: int, w: int, image: Labels) -> None:
        """Make ``v``, which takes state ``image[j]`` where w takes j, a part of w."""
        self.network.merge(v, w, image)
        self.usage.merge(v, w, image)

    @property
    def most(self) -> float:
        """More than any choice of finite cost costs."""
        network = self.network
        tables = (table for v, near in network.pairwise.items() for w, table in near.items() if v < w)
        return 1.0 + sum([float(a.max(initial=0.0, where=np.isfinite(a))) for a in (*network.unary.values(), *tables)])

    def states(self, choice: Sequence[int]) -> dict[int, int] | None:
        """The states of the core's variables in a choice; None if contraction has dropped one of them."""
        labels, found = self.network.labels, {}
        for v in self.network.unary:
            at = int(np.searchsorted(labels[v], choice[v])) if v in labels else choice[v]
            if v in labels and (at == labels[v].size or labels[v][at] != choice[v]):
                return None
            found[v] = at
        return found

    def choice(self, states: dict[int, int]) -> list[int]:
        """The strategies of all nodes, given the states of the core's variables by position."""
        chosen: list[int] = self.network.decode(list(states), index_array(states.values())).tolist()
        return chosen


def core_of(instance: Instance, whole: bool = False) -> Core:
    """An instance as a core, not contracted yet.

    Args:
      whole: also with costs that no choice needs, unless only such choices are valid.
    """
    forbidden = np.inf if whole else unneeded(instance)
    cost_unit = _unit((*instance.costs, *instance.tables), forbidden)
    usage_unit = _unit(instance.usages, np.inf)
    network, scaled = Network(), _Scaled(cost_unit, forbidden)
    for costs in instance.costs:
        network.new_variable(scaled(costs))
    for (a, b), table in zip(instance.ends, instance.tables, strict=True):
        network.add(a, b, scaled(table))
    used = map(_Scaled(usage_unit, np.inf), instance.usages)
    limit = np.inf if instance.limit is None else float(instance.limit // usage_unit)
    usage = Usage.of(instance.intervals, used, limit, network.memo)
    return Core(network, usage, cost_unit, usage_unit)


class _Scaled:
    """Arrays in floats that are exact integers, rounded down; what is forbidden is infinite. Equal ones stay one."""

    def __init__(self, unit: int, forbidden: float) -> None:
        self.unit, self.forbidden = unit, forbidden
        self._known: dict[int, Costs] = {}

    def __call__(self, array: Ints) -> Costs:
        found = self._known.get(id(array))
        if found is None:
            whole = (array // self.unit).astype(np.float64)
            found = self._known[id(array)] = np.where(array >= self.forbidden, np.inf, whole)
        return found


def unneeded(instance: Instance) -> float:
    """The least cost that alone passes any total of smaller costs: a choice with it is never needed."""
    arrays = _counted((*instance.costs, *instance.tables))
    least = np.inf
    while True:
        top = max(int(a[a < least].max()) for a, _ in arrays)
        below = [(a[a < top], n) for a, n in arrays]
        if any(not a.size for a, _ in below) or sum([int(a.max()) * n for a, n in below]) >= top:
            return least
        least = top


def _unit(arrays: Iterable[Ints], forbidden: float) -> int:
    """A power of two in which no sum of one number of each array passes what floats hold exactly."""
    total = sum([int(a[a < forbidden].max(initial=0)) * n for a, n in _counted(arrays)])
    return 1 << max(0, total.bit_length() - _EXACT)


def _counted(arrays: Iterable[Ints]) -> list[tuple[Ints, int]]:
    """Each array once, with how often it occurs."""
    arrays = list(arrays)
    counts = Counter(map(id, arrays))
    return [(a, counts[id(a)]) for a in {id(a): a for a in arrays}.values()]
