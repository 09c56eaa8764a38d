"""Segments of an unrolled network: chains of recomputation end at their boundaries.

What is computed again is held as well, from then on. If the chains of all layers reached back to the input, everything
would be computed again and held at the beginning of the backward pass, and nothing saved. So the forward pass is cut
into segments at narrow places, as in Chen et al. 2016: what passes a boundary is kept, and while the backward pass is
in one segment, only that segment is computed again:

    peak of a backward pass that keeps nothing else  =  what passes all boundaries  +  the largest segment

For a limit on the largest segment, the boundaries where least passes are a shortest path, found in linear time; the
limit with the least sum is taken. A loop over layers needs no segments: its iterations are some.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

from meshdsl.ir.graph import Graph
from meshdsl.ir.index import producers
from meshdsl.ir.rewrite import values
from meshdsl.recomputation.levels import reads_residual
from meshdsl.trace.annotate import FORWARD

_HALVINGS = 10  # limits on the largest segment that are tried, each half of the last


def boundary_ops(level: Graph, sizes: Mapping[int, int], views: Collection[int]) -> frozenset[int]:
    """Returns the ids of the operations whose results pass a boundary of the best segments.

    Args:
      sizes: bytes to keep a value, by its id.
      views: ids of the values that are their operands: these pass in their place.
    """
    made = producers(level)
    forward = [op for op in level.ops if op.phase == FORWARD and op.name != "constant"]
    position = {op.id: i for i, op in enumerate(forward)}
    last = {x.id: position[op.id] for op in forward for x in values(op.inputs)}
    needed = {x.id for op in level.ops if reads_residual(op) for x in values(op.inputs)}
    for op in reversed(forward):
        if all(v.id in views for v in op.outputs):
            stop = max((last.get(v.id, 0) for v in op.outputs), default=0)
            for x in values(op.inputs):
                last[x.id] = max(last[x.id], stop)
                needed |= {x.id} if any(v.id in needed for v in op.outputs) else set()
    passing = [0] * (len(forward) + 1)
    for i, op in enumerate(forward):
        for v in op.outputs:
            if last.get(v.id, i) > i:
                passing[i] += sizes.get(v.id, 0)
                passing[last[v.id]] -= sizes.get(v.id, 0)
    widths = list(accumulate(passing[:-1]))
    residuals = [sum(sizes.get(v.id, 0) for v in op.outputs if v.id in needed) for op in forward]
    ends = _best_ends(widths, residuals)
    crossing = (
        v for v, stop in last.items() if v in made and v not in views and _passes(position.get(made[v].id), stop, ends)
    )
    return frozenset(made[v].id for v in crossing)


def _passes(start: int | None, stop: int, ends: Sequence[int]) -> bool:
    return start is not None and any(start <= end < stop for end in ends)


def _best_ends(widths: Sequence[int], residuals: Sequence[int]) -> list[int]:
    """Returns the last positions of all segments but the last."""
    total = sum(residuals)
    found = (_shortest(widths, residuals, total / 2**k) for k in range(_HALVINGS if total else 0))
    return min(found, key=lambda each: each[0], default=(0.0, []))[1]


def _shortest(widths: Sequence[int], residuals: Sequence[int], limit: float) -> tuple[float, list[int]]:
    """Returns what passes the boundaries and the largest segment together, and the boundaries where least passes.

    Args:
      widths: bytes that pass behind each position.
      residuals: bytes that are needed of each position.
      limit: on the residuals of a segment; one of a single position may exceed it.
    """
    count, upto = len(widths), [0, *accumulate(residuals)]
    cost, before = [0.0] * (count + 1), [0] * (count + 1)  # of the first positions, the last of them a boundary
    open_starts = deque[int]([0])
    for stop in range(1, count + 1):
        while len(open_starts) > 1 and upto[stop] - upto[open_starts[0]] > limit:
            open_starts.popleft()
        start = open_starts[0] if upto[stop] - upto[open_starts[0]] <= limit else stop - 1
        cost[stop], before[stop] = cost[start] + (widths[stop - 1] if stop < count else 0), start
        while open_starts and cost[open_starts[-1]] >= cost[stop]:
            open_starts.pop()
        open_starts.append(stop)
    ends = list(_path(before, count))
    largest = max((upto[b] - upto[a] for a, b in zip(ends[1:], ends, strict=False)), default=0)
    return cost[count] + largest, [end - 1 for end in ends[1:-1]]


def _path(before: Sequence[int], stop: int) -> Iterator[int]:
    """The ends of segments from the last to the first, and the start."""
    while stop:
        yield stop
        stop = before[stop]
    yield 0
