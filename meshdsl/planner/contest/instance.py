"""An instance: choose one strategy per node, at the least cost, within a memory limit at every time point.

A node has strategies, each with a cost and a memory usage; an edge has a cost for every pair of strategies of its two
ends. A node occupies memory at the time points ``[lo, hi)`` of its interval, if there are any, and at no time point may
the usages of all live nodes together exceed the limit. The sum of all node and edge costs is to be minimal. All numbers
are integers of 64 bits; sums may be larger, so a choice is scored in Python's integers.

    nodes  costs [[3, 5], [1, 1]]   usages [[8, 2], [4, 0]]   intervals [[0, 2], [1, 3]]   limit 10
    edges  [[0, 1]] costs [[0, 9, 9, 0]]

    choice [0, 0] costs 3 + 1 + 0 and uses 8, 12, 4: too much at time 1.   choice [1, 1] costs 5 + 1 + 0: the optimum.

The file format is gzipped JSON, that of the ASPLOS / EuroSys 2025 contest. Solvers work on the *core* of an instance:
its costs as a pairwise ``Network``, and its usages, in floats that are exact integers.
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

_FLOAT_BITS = 53  # of the significand of a float64: integers up to 2^53 are exact
_FAULTS_LISTED = 8
Interval = tuple[int, int]  # the first time point, and one past the last

# ---- Instance --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The cost of a choice, its peak memory, and the limit; None if there is no limit."""

    cost: int
    peak: int
    limit: int | None

    @property
    def fits(self) -> bool:
        """Whether the choice is valid."""
        return self.limit is None or self.peak <= self.limit


@dataclass(frozen=True)
class Instance:
    """Nodes by number, and the edges between them.

    Args:
      costs: per node, the cost of each strategy.
      usages: per node, the memory usage of each strategy.
      intervals: per node, the first time point at which it is live, and one past the last.
      ends: per edge, its two nodes.
      tables: per edge, costs [strategies of its first node, strategies of its second node].
      limit: of the usages at a time point; None if there is none.
    """

    costs: Sequence[Ints]
    usages: Sequence[Ints]
    intervals: Sequence[Interval]
    ends: Sequence[tuple[int, int]]
    tables: Sequence[Ints]
    limit: int | None

    def score(self, choice: Sequence[int]) -> Score:
        """Returns cost and peak memory of a choice, a strategy per node, in exact integers."""
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
    """Reads an instance from a JSON file, gzipped or not.

    Raises:
      ArgumentError: if the file holds no instance.
    """
    import msgspec

    raw = Path(path).read_bytes()
    raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    try:
        return _parse(msgspec.json.decode(raw)["problem"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{path} holds no instance: {error!r}") from error


def _parse(problem: dict[str, Any]) -> Instance:
    nodes, edges = problem["nodes"], problem["edges"]
    known: dict[tuple[tuple[int, ...], bytes], Ints] = {}  # equal arrays become one object

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
    _check(instance)
    return instance


def _check(instance: Instance) -> None:
    """Raises ArgumentError unless every node has as many costs as usages, at least one, and none is negative."""
    bad = [
        f"node {v}: {costs.size} costs, {usages.size} usages"
        for v, (costs, usages) in enumerate(zip(instance.costs, instance.usages, strict=True))
        if costs.size != usages.size or not costs.size
    ]
    distinct = {id(a): a for a in (*instance.costs, *instance.usages, *instance.tables)}
    if any((a < 0).any() for a in distinct.values()):
        bad.append("a cost or a usage is negative")
    if bad:
        raise ArgumentError(faults("the instance cannot be:", bad[:_FAULTS_LISTED]))


# ---- Memory usage ----------------------------------------------------------------------------------------------------


class Usage:
    """Memory over time: the usages of variables in each state, by interval, and the limit at every time point.

    Only time points that may bind remain: of neighbouring points the one with more live variables, and none that stays
    within the limit in every choice. Whatever a variable uses in every state is deducted from the limit.

    Attributes:
      items: ``items[v][interval]`` is the usage of variable v in each state, at the points of the interval.
      limit: [points], the usage allowed at each.
      times: [points], which of the first points each is.
    """

    def __init__(self, limit: Costs, memo: Memo) -> None:
        self.limit, self.memo, self.times = limit, memo, np.arange(limit.size)
        self.items: dict[int, dict[Interval, Costs]] = {}
        self._least_limits: dict[Interval, float] = {}

    @classmethod
    def of(cls, intervals: Iterable[Interval], used: Iterable[Costs], limit: float, memo: Memo) -> "Usage":
        """Returns the usages of nodes that are live over time intervals, some of them empty."""
        live = {v: (at, use) for v, (at, use) in enumerate(zip(intervals, used, strict=True)) if at[0] < at[1]}
        points = _binding_points([at for at, _ in live.values()])
        usage = cls(np.full(points.size, limit), memo)
        first, last = (np.searchsorted(points, [at[i] for at, _ in live.values()]).tolist() for i in range(2))
        for (v, (_, use)), lo, hi in zip(live.items(), first, last, strict=True):
            usage.add(v, (lo, hi), use)
        return usage

    def copy(self) -> "Usage":
        """Returns a copy that shares the arrays, which are never written."""
        other = Usage(self.limit.copy(), self.memo)
        other.times = self.times
        other.items = {v: dict(items) for v, items in self.items.items()}
        return other

    def add(self, v: int, interval: Interval, use: Costs) -> None:
        """Adds the usage of a variable over an interval to what it uses already."""
        items = self.items.setdefault(v, {})
        items[interval] = self.memo.sum(items[interval], use) if interval in items else use

    def restrict(self, v: int, keep: Labels) -> None:
        """Restricts a variable to some of its states."""
        items = self.items.get(v, {})
        for interval, use in items.items():
            items[interval] = self.memo.get("some", (use, keep), lambda use, keep: use[keep])

    def merge(self, v: int, w: int, image: Labels) -> None:
        """Makes ``v``, which takes state ``image[j]`` where w takes j, a part of w."""
        self.restrict(v, image)
        for interval, use in self.items.pop(v, {}).items():
            self.add(w, interval, use)

    def simplify(self) -> None:
        """Deducts unavoidable usage from the limit, and removes points that cannot bind."""
        self._deduct_least()
        self._keep_points(np.flatnonzero(self._largest_use() > self.limit))
        self._keep_points(self._undominated_points())
        self._least_limits.clear()

    def infeasible_states(self, v: int) -> NDArray[np.bool_] | None:
        """Returns the states of a variable that exceed the limit even if all others use the least; None if none do."""
        bad: NDArray[np.bool_] | None = None
        for interval, use in self.items[v].items():
            if interval not in self._least_limits:
                self._least_limits[interval] = float(self.limit[interval[0] : interval[1]].min())
            most = self._least_limits[interval]
            if use.max() > most:
                bad = (use > most) if bad is None else bad | (use > most)
        return bad

    def _deduct_least(self) -> None:
        change = np.zeros(self.limit.size + 1)
        for v, items in list(self.items.items()):
            self.items[v] = {}
            for (lo, hi), use in items.items():
                least, more = self.memo.get("more", (use,), _split_least)
                change[lo] += least
                change[hi] -= least
                if more is not None:
                    self.items[v][lo, hi] = more
            if not self.items[v]:
                del self.items[v]
        self.limit -= np.cumsum(change)[:-1]

    def _largest_use(self) -> Costs:
        """Returns the largest possible usage at each point."""
        change = np.zeros(self.limit.size + 1)
        for items in self.items.values():
            for (lo, hi), use in items.items():
                amount = use.max()
                change[lo] += amount
                change[hi] -= amount
        return np.cumsum(change)[:-1]

    def _undominated_points(self) -> Labels:
        """Returns the points of which no neighbour has a superset of the live variables and no larger limit."""
        begun, ended = (np.zeros(self.limit.size + 1, dtype=np.intp) for _ in range(2))
        for items in self.items.values():
            for lo, hi in items:
                begun[lo] = ended[hi] = 1
        starts, stops, limit = np.cumsum(begun).tolist(), np.cumsum(ended).tolist(), self.limit.tolist()
        found: list[int] = []
        for t in range(self.limit.size):
            while found and stops[t] == stops[found[-1]] and limit[t] <= limit[found[-1]]:
                found.pop()
            if not found or starts[t] > starts[found[-1]] or limit[t] < limit[found[-1]]:
                found.append(t)
        return np.array(found, dtype=np.intp)

    def _keep_points(self, points: Labels) -> None:
        if points.size == self.limit.size:
            return
        self.limit, self.times = self.limit[points], self.times[points]
        at = np.searchsorted(points, np.arange(points[-1] + 2 if points.size else 1)).tolist()
        for v in list(self.items):
            items = self.items.pop(v)
            for (lo, hi), use in items.items():
                first, last = (at[min(t, len(at) - 1)] for t in (lo, hi))
                if first < last:
                    self.add(v, (first, last), use)


def _binding_points(intervals: list[Interval]) -> Labels:
    """Returns time points whose sets of live nodes are subsets of no other's: the last begin before each end."""
    begins = np.unique([lo for lo, _ in intervals])
    ends = np.unique([hi for _, hi in intervals])
    last = np.searchsorted(begins, ends) - 1
    return begins[np.unique(last)] if begins.size else begins.astype(np.intp)


def _split_least(use: Costs) -> tuple[float, Costs | None]:
    """Returns the least usage over all states, and the rest; None if nothing is left."""
    least = float(use.min())
    more = use - least if least else use
    return least, more if more.any() else None


# ---- Core ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Core:
    """A pairwise network whose variables use memory.

    Args:
      network: costs.
      usage: memory.
      cost_unit: the cost that 1 in the network's tables stands for. It is more than 1 only where sums exceed 2^53;
        costs are then rounded down.
      usage_unit: likewise of usages.
    """

    network: Network
    usage: Usage
    cost_unit: int
    usage_unit: int

    def copy(self) -> "Core":
        """Returns a copy that shares the arrays, which are never written."""
        return Core(self.network.copy(), self.usage.copy(), self.cost_unit, self.usage_unit)

    @property
    def is_feasible(self) -> bool:
        """False if no choice can be valid; True proves nothing."""
        return not (self.usage.limit < 0).any() and all(np.isfinite(u).any() for u in self.network.unary.values())

    def restrict(self, v: int, keep: Labels) -> None:
        """Restricts a variable to some of its states."""
        self.network.restrict(v, keep)
        self.usage.restrict(v, keep)

    def merge(self, v: int, w: int, image: Labels) -> None:
        """Makes ``v``, which takes state ``image[j]`` where w takes j, a part of w."""
        self.network.merge(v, w, image)
        self.usage.merge(v, w, image)

    @property
    def cost_above_all(self) -> float:
        """A number above the cost of every choice of finite cost."""
        network = self.network
        tables = (table for v, near in network.pairwise.items() for w, table in near.items() if v < w)
        return 1.0 + sum([float(a.max(initial=0.0, where=np.isfinite(a))) for a in (*network.unary.values(), *tables)])

    def states(self, choice: Sequence[int]) -> dict[int, int] | None:
        """Returns the states of the core's variables in a choice; None if one of them has been pruned."""
        labels, found = self.network.labels, {}
        for v in self.network.unary:
            at = int(np.searchsorted(labels[v], choice[v])) if v in labels else choice[v]
            if v in labels and (at == labels[v].size or labels[v][at] != choice[v]):
                return None
            found[v] = at
        return found

    def choice(self, states: dict[int, int]) -> list[int]:
        """Returns the strategies of all nodes, given the states of the core's variables."""
        chosen: list[int] = self.network.decode(list(states), index_array(states.values())).tolist()
        return chosen


def core_of(instance: Instance, forbidden: float) -> Core:
    """Returns the core of an instance, without any presolve.

    Args:
      instance: the problem.
      forbidden: the least cost that no choice may have, one of ``unneeded_costs``.
    """
    cost_unit = _exact_unit((*instance.costs, *instance.tables), forbidden)
    usage_unit = _exact_unit(instance.usages, np.inf)
    network, scaled = Network(), _ScaledArrays(cost_unit, forbidden)
    for costs in instance.costs:
        network.new_variable(scaled(costs))
    for (a, b), table in zip(instance.ends, instance.tables, strict=True):
        network.add(a, b, scaled(table))
    used = map(_ScaledArrays(usage_unit, np.inf), instance.usages)
    limit = np.inf if instance.limit is None else float(instance.limit // usage_unit)
    usage = Usage.of(instance.intervals, used, limit, network.memo)
    return Core(network, usage, cost_unit, usage_unit)


class _ScaledArrays:
    """Arrays as floats that are exact integers, rounded down; forbidden costs are infinite. Equal objects stay one."""

    def __init__(self, unit: int, forbidden: float) -> None:
        self.unit, self.forbidden = unit, forbidden
        self._known: dict[int, Costs] = {}

    def __call__(self, array: Ints) -> Costs:
        found = self._known.get(id(array))
        if found is None:
            whole = (array // self.unit).astype(np.float64)
            found = self._known[id(array)] = np.where(array >= self.forbidden, np.inf, whole)
        return found


def unneeded_costs(instance: Instance) -> tuple[float, ...]:
    """Returns costs that alone exceed any total of smaller ones, from the least to infinity.

    No optimum has such a cost, or a larger one, if any choice without them is valid.
    """
    arrays, found = _counted((*instance.costs, *instance.tables)), [np.inf]
    while True:
        top = max(int(a[a < found[-1]].max()) for a, _ in arrays)
        below = [(a[a < top], n) for a, n in arrays]
        if any(not a.size for a, _ in below) or sum([int(a.max()) * n for a, n in below]) >= top:
            return tuple(reversed(found))
        found.append(top)


def _exact_unit(arrays: Iterable[Ints], forbidden: float) -> int:
    """Returns a power of two in which every sum of one number from each array is exact in a float64."""
    total = sum([int(a[a < forbidden].max(initial=0)) * n for a, n in _counted(arrays)])
    return 1 << max(0, total.bit_length() - _FLOAT_BITS)


def _counted(arrays: Iterable[Ints]) -> list[tuple[Ints, int]]:
    """Returns each array once, with the number of its occurrences."""
    arrays = list(arrays)
    counts = Counter(map(id, arrays))
    return [(a, counts[id(a)]) for a in {id(a): a for a in arrays}.values()]
