"""Reshard: the cheapest path of moves from one layout of a tensor to another.

It is the shortest path through the space of layouts, on all axes jointly, also where a direct
move exists: a hierarchical all-reduce (reduce-scatter on the fast axis, all-reduce on the slow
one, all-gather back) is found, not coded.

A value becomes partial (pad, keep-first) only as the end of a path, where the target asks for
it. Making it partial on the way, only to reduce it again, would pay for sums of zeros to save
a latency; no reader of a plan would understand it.
"""

import heapq
from collections.abc import Sequence
from math import prod

from meshdsl.errors import LayoutError
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Arc, Move, fits
from meshdsl.layouts.placement import Partial
from meshdsl.layouts.space import Space, complete, makes_partial, space

_Stop = tuple[int, bool]  # a layout, and whether the path has begun to make the value partial


def reshard(source: Layout, target: Layout, shape: Sequence[int], itemsize: int, mesh: Mesh) -> tuple[Move, ...]:
    """The cheapest moves from ``source`` to ``target`` for a tensor of ``shape``.

    Ties go to fewer moves, then to the order of the space: the same question has one answer.
    Raises LayoutError if a layout does not fit the tensor.
    """
    source, target = complete(source, mesh), complete(target, mesh)
    kinds = {p.reduction for layout in (source, target) for _, p in layout.placements if isinstance(p, Partial)}
    within = space(mesh, len(shape), tuple(sorted(kinds | {"sum"})))
    for layout in (source, target):
        if layout not in within.index or not fits(layout, shape, mesh):
            raise LayoutError(f"layout {layout} does not fit a tensor of shape {tuple(shape)} on mesh {mesh}")
    return _shortest(within, within.index[source], within.index[target], shape, itemsize)


def _shortest(within: Space, start: int, end: int, shape: Sequence[int], itemsize: int) -> tuple[Move, ...]:
    size = prod(shape) * itemsize
    best: dict[_Stop, tuple[float, int]] = {(start, False): (0.0, 0)}
    came: dict[_Stop, tuple[_Stop, Arc]] = {}
    queue = [(0.0, 0, (start, False))]
    while queue:
        seconds, steps, stop = heapq.heappop(queue)
        if stop[0] == end:
            return _unwind(came, stop, size)
        if (seconds, steps) > best[stop]:
            continue
        for arc, to in within.arcs(stop[0]):
            onward, reached = (to, makes_partial(arc)), (seconds + arc.price.seconds(size), steps + 1)
            if stop[1] > onward[1] or (onward in best and reached >= best[onward]) or not within.fits(to, shape):
                continue
            best[onward], came[onward] = reached, (stop, arc)
            heapq.heappush(queue, (*reached, onward))
    raise LayoutError(f"no moves lead from {within.layouts[start]} to {within.layouts[end]}")


def _unwind(came: dict[_Stop, tuple[_Stop, Arc]], stop: _Stop, size: int) -> tuple[Move, ...]:
    path: list[Move] = []
    while stop in came:
        stop, arc = came[stop]
        path.append(arc.of(size))
    return tuple(reversed(path))
