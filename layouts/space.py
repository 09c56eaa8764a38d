"""The space of layouts: every layout of a tensor over a mesh, and the moves between them.

It depends on the tensor's rank only; a tensor's shape decides which layouts fit it, and its
bytes scale the prices. Paths through it are in ``reshard``.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import permutations, product

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import Arc, arcs, arrange
from meshdsl.layouts.placement import B, Partial, Placement, Split


class Space:
    """Layouts of tensors of one rank; partial ones only with the given reductions, and one at a time."""

    def __init__(self, mesh: Mesh, rank: int, reductions: tuple[str, ...]) -> None:
        self.mesh, self.rank, self.reductions = mesh, rank, reductions
        self.placements: tuple[Placement, ...] = (*map(Split, range(rank)), B, *map(Partial, reductions))
        self.layouts = tuple(dict.fromkeys(self._all()))
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        self._arcs: dict[int, tuple[tuple[Arc, int], ...]] = {}

    def arcs(self, i: int) -> tuple[tuple[Arc, int], ...]:
        """The moves of layout ``i`` with the index of the layout they lead to."""
        if i not in self._arcs:
            self._arcs[i] = tuple(self._from(self.layouts[i]))
        return self._arcs[i]

    @cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """Per layout, the blocks per dim."""
        return tuple(layout.shards(self.rank, self.mesh.sizes_by_name) for layout in self.layouts)

    def fits(self, i: int, shape: Sequence[int]) -> bool:
        """Whether layout ``i`` divides every dim of ``shape``."""
        return all(n % k == 0 for n, k in zip(shape, self.shards[i], strict=True))

    def _from(self, layout: Layout) -> list[tuple[Arc, int]]:
        found = ((arc, self.index.get(arc.after)) for arc in arcs(layout, self.rank, self.mesh, self.reductions))
        return [(arc, to) for arc, to in found if to is not None]

    def _all(self) -> list[Layout]:
        wide = [self.placements if size > 1 else (B,) for size in self.mesh.sizes]
        return [layout for placed in product(*wide) if _one_reduction(placed) for layout in self._orders(placed)]

    def _orders(self, placed: tuple[Placement, ...]) -> list[Layout]:
        by_name = dict(zip(self.mesh.names, placed, strict=True))
        dims = dict.fromkeys(p for p in placed if isinstance(p, Split))
        shared = [[n for n, p in by_name.items() if p is dim] for dim in dims]
        return [arrange(self.mesh, by_name, orders) for orders in product(*map(permutations, shared))]


def _one_reduction(placed: tuple[Placement, ...]) -> bool:
    """Whether the value is partial in one way only: a sum over maxima is no maximum over sums."""
    return len({p for p in placed if isinstance(p, Partial)}) <= 1


@cache
def space(mesh: Mesh, rank: int, reductions: tuple[str, ...] = ("sum",)) -> Space:
    """The space of layouts of this rank over ``mesh``, made once."""
    return Space(mesh, rank, reductions)


@cache
def complete(layout: Layout, mesh: Mesh) -> Layout:
    """The same layout with every axis of the mesh named, in mesh order where the order is free."""
    splits = {p.dim for _, p in layout.placements if isinstance(p, Split)}
    return arrange(mesh, {n: layout.on(n) for n in mesh.names}, [layout.splitting(d) for d in splits])


def makes_partial(arc: Arc) -> bool:
    """Whether the move turns a whole or split value into a partial one."""
    return arc.kind in ("pad", "keep-first")
