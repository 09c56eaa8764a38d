"""Moves: the ways to change a layout, in one table that prices, documents and executes them.

    from -> to          kind                 one device sends        valid when
    S(i) -> B           all-gather           n (k-1)/k               the axes are the minor ones of i
    P -> B              all-reduce           2 n (k-1)/k
    P -> S(j)           reduce-scatter       n (k-1)/k
    P(max) -> S(j)      all-to-all           n (k-1)/k               then a local max (min)
    S(i) -> S(j)        all-to-all           n/k (k-1)/k             the axes are the minor ones of i
    order of S(i)       collective-permute   n/k
    B -> S(j)           slice                0
    S(i) -> P           pad                  0                       the axes are the minor ones of i
    B -> P              keep-first           0

k is the number of devices on the moving axes and n the bytes one device would hold if those
axes did not split the tensor. Blocks nest, major axis first, so an axis can leave a dim only
while it is the minor-most there, and it enters a dim as the new minor-most one; anything else
would permute rows. Several axes may move at once: that is one collective over their product,
or one local move, so two axes cost no more than one of as many devices.

What they take is told by ``price``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations
from math import prod

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, B, P, Partial, Placement, Split
from meshdsl.layouts.price import Price, rate


@dataclass(frozen=True)
class Move:
    """One step of a reshard of one tensor.

    Args:
      kind: one of COLLECTIVES or LOCAL.
      axes: the mesh axes it runs over, major first (for collective-permute: the order before).
      source: placement of those axes before; target: after.
      before: layout before; after: layout after.
      bytes: what one device sends; 0 for local moves.
      seconds: predicted.
    """

    kind: str
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: Layout
    after: Layout
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Arc:
    """A move for tensors of any size, with its price by the bytes of the whole tensor."""

    kind: str
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: Layout
    after: Layout
    price: Price

    def of(self, size: int) -> Move:
        """The move of a tensor of ``size`` bytes."""
        ends = (self.source, self.target, self.before, self.after)
        return Move(self.kind, self.axes, *ends, round(self.price.sent * size), self.price.seconds(size))


def moves(layout: Layout, shape: Sequence[int], itemsize: int, mesh: Mesh) -> Iterator[Move]:
    """Every legal move of a tensor of ``shape`` from ``layout``."""
    size = prod(shape) * itemsize
    for arc in arcs(layout, len(shape), mesh):
        if fits(arc.after, shape, mesh):
            yield arc.of(size)


def fits(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Whether every dim of ``shape`` divides evenly into its blocks."""
    shards = layout.shards(len(shape), mesh.sizes_by_name)
    return all(n % k == 0 for n, k in zip(shape, shards, strict=True))


def arcs(layout: Layout, rank: int, mesh: Mesh, reductions: tuple[str, ...] = REDUCTIONS) -> Iterator[Arc]:
    """Every move that starts at ``layout``, for a tensor of ``rank`` dims, whether its dims divide or not.

    Values become partial with one of ``reductions`` only.
    """
    state = _State(layout, rank, mesh, reductions)
    for group in _groups(state):
        yield from _leave(state, group)
    for dim in range(rank):
        yield from _swaps(state, dim)


def arrange(mesh: Mesh, placements: dict[str, Placement], orders: Iterable[Sequence[str]] = ()) -> Layout:
    """The layout with these placements, in mesh order but for the given orders of axes of one dim."""
    names = [name for name in mesh.names if name in placements]
    for order in orders:
        if len(order) > 1:
            at = sorted(map(names.index, order))
            for i, axis in zip(at, order, strict=True):
                names[i] = axis
    return _layout(tuple((name, placements[name]) for name in names))


@cache
def _layout(placements: tuple[tuple[str, Placement], ...]) -> Layout:
    return Layout(**dict(placements))


class _State:
    """A layout with what its arcs need to know."""

    def __init__(self, layout: Layout, rank: int, mesh: Mesh, reductions: tuple[str, ...]) -> None:
        self.layout, self.rank, self.mesh, self.reductions = layout, rank, mesh, reductions
        self.every = {name: layout.on(name) for name in mesh.names}
        self.placed = {name: placed for name, placed in self.every.items() if mesh.axis(name) > 1}
        self.orders = {dim: layout.splitting(dim) for dim in range(rank)}

    def held(self, axes: Sequence[str]) -> float:
        """Share of the tensor that one device would hold if ``axes`` did not split it."""
        others = (n for n, p in self.placed.items() if n not in axes and isinstance(p, Split))
        return 1 / prod(self.mesh.axis(n) for n in others)

    def to(self, axes: Sequence[str], target: Placement) -> Layout:
        """The layout after ``axes`` moved to ``target``, as the new minor-most of its dim."""
        placed = {**self.every, **dict.fromkeys(axes, target)}
        orders = {dim: [a for a in order if a not in axes] for dim, order in self.orders.items() if order}
        if isinstance(target, Split) and isinstance(target.dim, int):
            orders[target.dim] = [*orders.get(target.dim, ()), *axes]
        return arrange(self.mesh, placed, orders.values())


def _groups(state: _State) -> Iterator[tuple[str, ...]]:
    """Axes that can move together: the minor ones of a dim, or axes that are all B or all the same P."""
    for order in state.orders.values():
        yield from (order[i:] for i in range(len(order)))
    alike: dict[Placement, list[str]] = {}
    for name, placed in state.placed.items():
        if not isinstance(placed, Split):
            alike.setdefault(placed, []).append(name)
    for names in alike.values():
        for size in range(1, len(names) + 1):
            yield from combinations(names, size)


def _leave(state: _State, axes: tuple[str, ...]) -> Iterator[Arc]:
    source = state.placed[axes[0]]
    if isinstance(source, Split):
        yield _arc(state, "all-gather", axes, source, B)
        yield from (_arc(state, "pad", axes, source, P(kind)) for kind in state.reductions)
    elif isinstance(source, Partial):
        yield _arc(state, "all-reduce", axes, source, B)
    else:
        yield from (_arc(state, "keep-first", axes, source, P(kind)) for kind in state.reductions)
    for dim in range(state.rank):
        if source is not Split(dim):
            yield _arc(state, into_split(source), axes, source, Split(dim))


def into_split(source: Placement) -> str:
    """The kind of move that takes a placement to a split."""
    if source is B:
        return "slice"
    return "reduce-scatter" if source is P else "all-to-all"


def _swaps(state: _State, dim: int) -> Iterator[Arc]:
    order = state.orders[dim]
    for other in permutations(order):
        if other != order:
            orders = {**state.orders, dim: other}
            after = arrange(state.mesh, state.every, orders.values())
            yield _arc(state, "collective-permute", order, Split(dim), Split(dim), after)


def _arc(
    state: _State, kind: str, axes: tuple[str, ...], source: Placement, target: Placement, after: Layout | None = None
) -> Arc:
    held = state.held(axes)
    ends = (source, target, state.layout, after or state.to(axes, target))
    return Arc(kind, axes, *ends, rate(kind, axes, source, target, state.mesh).times(held))
