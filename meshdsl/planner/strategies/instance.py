"""An instance: choose one strategy per node, at the least cost, within a memory limit.

A node has strategies, each with a cost and a memory usage; an edge has a cost for every pair of
strategies of its two ends. A node occupies memory at the time points ``[lo, hi)`` of its interval,
if there are any, and at no time point may the usages of all live nodes together pass the limit.
The total of all node and edge costs is to be least. All numbers are integers of 64 bits; sums may
be larger, so a choice is judged in Python's integers.

The file format is gzipped JSON, that of the ASPLOS / EuroSys 2025 contest.
"""

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.errors import ArgumentError, faults
from meshdsl.planner.exact import Ints


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
