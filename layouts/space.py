"""The space of layouts: every layout of a tensor over a mesh, and the moves between them.

It depends on the tensor's rank only; a tensor's shape decides which layouts fit it, and its
bytes scale the prices. ``reshard`` is the shortest path through this space, on all axes
jointly, also where a direct move exists: a hierarchical all-reduce (reduce-scatter on the fast
axis, all-reduce on the slow one, all-gather back) is found, not coded.
"""

import heapq
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import permutations, product
from math import prod

from meshdsl.errors import LayoutError
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Arc, Move, arcs, arrange, fits
from meshdsl.layouts.placement import B, Partial, Placement, Split


class Space:
    """Layouts of tensors of one rank; partial ones only with the given reductions."""

    def __init__(self, mesh: Mesh, rank: int, reductions: tuple[str, ...]) -> None:
        self.mesh, self.rank, self.reductions = mesh, rank, reductions
        self.placements: tuple[Placement, ...] = (*map(Split, range(rank)), B, *map(Partial, reductions))
        self.layouts = tuple(dict.fromkeys(self._all()))
        self.index = {layout: i for i, layout in enumerate(self.layouts)}

    @cached_property
    def arcs(self) -> tuple[tuple[tuple[Arc, int], ...], ...]:
        """Per layout, its moves with the index of the layout they lead to."""
        return tuple(tuple(self._from(layout)) for layout in self.layouts)

    def _from(self, layout: Layout) -> list[tuple[Arc, int]]:
        found = ((arc, self.index.get(arc.after)) for arc in arcs(layout, self.rank, self.mesh))
        return [(arc, to) for arc, to in found if to is not None]

    def _all(self) -> list[Layout]:
        wide = [self.placements if size > 1 else (B,) for size in self.mesh.sizes]
        return [layout for placed in product(*wide) for layout in self._orders(placed)]

    def _orders(self, placed: tuple[Placement, ...]) -> list[Layout]:
        by_name = dict(zip(self.mesh.names, placed, strict=True))
        dims = dict.fromkeys(p for p in placed if isinstance(p, Split))
        shared = [[n for n, p in by_name.items() if p is dim] for dim in dims]
        return [arrange(self.mesh, by_name, orders) for orders in product(*map(permutations, shared))]


@cache
def space(mesh: Mesh, rank: int, reductions: tuple[str, ...] = ("sum",)) -> Space:
    """The space of layouts of this rank over ``mesh``, made once."""
    return Space(mesh, rank, reductions)


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


def complete(layout: Layout, mesh: Mesh) -> Layout:
    """The same layout with every axis of the mesh named, in mesh order where the order is free."""
    splits = {p.dim for _, p in layout.placements if isinstance(p, Split)}
    return arrange(mesh, {n: layout.on(n) for n in mesh.names}, [layout.splitting(d) for d in splits])


def _shortest(within: Space, start: int, end: int, shape: Sequence[int], itemsize: int) -> tuple[Move, ...]:
    size = prod(shape) * itemsize
    best: dict[int, tuple[float, int]] = {start: (0.0, 0)}
    came: dict[int, tuple[int, Arc]] = {}
    queue = [(0.0, 0, start)]
    while queue:
        seconds, steps, at = heapq.heappop(queue)
        if at == end:
            break
        if (seconds, steps) > best[at]:
            continue
        for arc, to in within.arcs[at]:
            reached = (seconds + arc.fixed + arc.per_byte * size, steps + 1)
            if (to not in best or reached < best[to]) and fits(arc.after, shape, within.mesh):
                best[to], came[to] = reached, (at, arc)
                heapq.heappush(queue, (*reached, to))
    return _unwind(came, start, end, size)


def _unwind(came: dict[int, tuple[int, Arc]], start: int, end: int, size: int) -> tuple[Move, ...]:
    path: list[Move] = []
    while end != start:
        end, arc = came[end]
        path.append(arc.of(size))
    return tuple(reversed(path))
