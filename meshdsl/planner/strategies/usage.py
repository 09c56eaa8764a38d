"""Memory over time: what the states of variables use at which time points, and what is left to use.

Only time points that may bind are kept: of neighbouring points the one with more live variables,
and none that stays within the limit whatever is chosen. What a variable uses in every state is
taken off the limit.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.derived import Derived
from meshdsl.planner.exact import Costs
from meshdsl.planner.trail import Labels

Interval = tuple[int, int]  # the first point, and the first after


class Usage:
    """Usages of variables by interval.

    ``held[v][interval]`` is what the states of v use at the points of the interval; ``limit`` is what
    may be used at each point, ``times`` which of the first points each is.
    """

    def __init__(self, limit: Costs, derived: Derived) -> None:
        self.limit, self.derived, self.times = limit, derived, np.arange(limit.size)
        self.held: dict[int, dict[Interval, Costs]] = {}
        self._rooms: dict[Interval, float] = {}

    @classmethod
    def of(cls, intervals: Iterable[Interval], used: Iterable[Costs], limit: float, derived: Derived) -> "Usage":
        """Usages of nodes that are live over time intervals, some of them empty."""
        live = {v: (at, use) for v, (at, use) in enumerate(zip(intervals, used, strict=True)) if at[0] < at[1]}
        points = _points([at for at, _ in live.values()])
        usage = cls(np.full(points.size, limit), derived)
        first, last = (np.searchsorted(points, [at[i] for at, _ in live.values()]).tolist() for i in range(2))
        for (v, (_, use)), lo, hi in zip(live.items(), first, last, strict=True):
            usage.add(v, (lo, hi), use)
        return usage

    def copy(self) -> "Usage":
        """Usages of its own with the same arrays."""
        other = Usage(self.limit.copy(), self.derived)
        other.times = self.times
        other.held = {v: dict(items) for v, items in self.held.items()}
        return other

    def add(self, v: int, interval: Interval, use: Costs) -> None:
        """A variable uses this over an interval, on top of what it uses already."""
        items = self.held.setdefault(v, {})
        items[interval] = self.derived.plus(items[interval], use) if interval in items else use

    def restrict(self, v: int, keep: Labels) -> None:
        """Leave these states of a variable."""
        items = self.held.get(v, {})
        for interval, use in items.items():
            items[interval] = self.derived.get("some", (use, keep), lambda use, keep: use[keep])

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
                least, more = self.derived.get("more", (use,), _above_least)
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
