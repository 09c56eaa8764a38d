"""Resharding: the steps that change a layout, and the cheapest path of steps between two layouts.

The legal steps; ``collective_cost`` prices them, ``lowering/local/collectives.py`` runs them:

    from -> to          kind                 one device sends        valid when
    S(i) -> B           all-gather           n (k-1)/k               the axes are the minor-most of i
    P -> B              all-reduce           2 n (k-1)/k
    P -> S(j)           reduce-scatter       n (k-1)/k
    P(max) -> S(j)      all-to-all           n (k-1)/k               then a local max (min)
    S(i) -> S(j)        all-to-all           n/k (k-1)/k             the axes are the minor-most of i
    order of S(i)       collective-permute   n/k
    B -> S(j)           slice                0
    S(i) -> P           pad                  0                       the axes are the minor-most of i
    B -> P              keep-first           0

k is the number of devices on the axes of the step, and n the bytes that one device would hold if those axes did not
split the tensor. Shards nest, major axis first, so an axis can leave a dim only while it is the minor-most one there,
and it enters a dim as the new minor-most one; anything else would permute rows. Several axes may take part in one step:
that is one collective over their product, or one local step, so two axes cost no more than one of as many devices.
Where a value may be rounded, a step can also be made in fewer bits (``low_bits``), which is taken where it is cheaper.

The planner enumerates the same steps as arrays (``meshdsl/planner/costs/reshard_cost.py``), since it needs all pairs of
thousands of layouts; the table is written twice by design, and ``tests/planner/costs/test_reshard_cost.py`` compares
the two step by step.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, permutations, product
from math import prod

from meshdsl.errors import LayoutError
from meshdsl.layouts.collective_cost import Price, step_price
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import LowStep, Rounding, low_step
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, B, P, Partial, Placement, Split

# ---- Reshard steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReshardStep:
    """One step of a reshard of one tensor.

    Args:
      kind: one of ``COLLECTIVES`` or ``LOCAL`` of ``collective_cost``.
      axes: the mesh axes it runs over, major first (for collective-permute: the order before).
      source: placement of those axes before; target: after.
      before: layout before; after: layout after.
      bytes: what one device sends; 0 for local steps.
      seconds: predicted.
      format: of the numbers that are sent, one of ``low_bits.FORMATS``; empty for those of the tensor.
    """

    kind: str
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: Layout
    after: Layout
    bytes: int
    seconds: float
    format: str = ""

    def rounded_bytes(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of rounded parts on a device, its own and those that arrive; 0 if it is sent in full.

        Args:
          sizes: devices per mesh axis.
        """
        if not self.format:
            return 0
        k = prod(sizes[axis] for axis in self.axes)
        if self.kind == "collective-permute":
            return 2 * self.bytes
        return self.bytes // (k - 1) * (k + 1 if self.kind == "all-gather" else 2 * k)

    @property
    def in_full(self) -> "ReshardStep":
        """The step that sends the tensor's own numbers; its bytes and seconds are those of this one."""
        if not self.format:
            return self
        kind = "reduce-scatter" if isinstance(self.source, Partial) else self.kind
        return replace(self, kind=kind, format="")


@dataclass(frozen=True)
class ReshardEdge:
    """A reshard step of a tensor of any size: an edge of the layout graph, priced by the bytes of the whole tensor.

    Args:
      others: the number of blocks into which axes other than those of the step cut the tensor.
      low: the step in fewer bits; None if there is none.
    """

    kind: str
    axes: tuple[str, ...]
    source: Placement
    target: Placement
    before: Layout
    after: Layout
    price: Price
    others: int
    low: LowStep | None

    def of(self, size: float, rounding: Rounding | None = None) -> ReshardStep:
        """Returns the step for a tensor of ``size`` bytes, in fewer bits if it may be rounded and that is cheaper."""
        ends, (seconds, name) = (self.source, self.target, self.before, self.after), self.cheapest(size, rounding)
        if name and self.low and rounding:
            sent = self.low.bytes_sent(rounding.elements // self.others, name)
            return ReshardStep(self.low.kind, self.axes, *ends, sent, seconds, name)
        return ReshardStep(self.kind, self.axes, *ends, round(self.price.sent * size), seconds)

    def cheapest(self, size: float, rounding: Rounding | None = None) -> tuple[float, str]:
        """Returns the least seconds for a tensor of ``size`` bytes, and the format; empty if it is sent in full."""
        least, found = self.price.seconds(size), ""
        if rounding and self.low and rounding.elements:
            n = rounding.elements / self.others
            for name in rounding.formats:
                seconds = min(self.low.seconds(n, rounding.itemsize, name))
                if seconds < least:
                    least, found = seconds, name
        return least, found


def steps_to(layout: Layout, tree: Iterable[ReshardStep]) -> Iterator[ReshardStep]:
    """Yields the steps of a resharding tree by which a layout is made, the last one first."""
    by_end = {step.after: step for step in tree}
    while layout in by_end:
        yield by_end[layout]
        layout = by_end[layout].before


def reshard_steps(layout: Layout, shape: Sequence[int], itemsize: float, mesh: Mesh) -> Iterator[ReshardStep]:
    """Yields every legal step of a tensor of ``shape`` from ``layout``."""
    size = prod(shape) * itemsize
    for edge in reshard_edges(layout, len(shape), mesh):
        if fits(edge.after, shape, mesh):
            yield edge.of(size)


def fits(layout: Layout, shape: Sequence[int], mesh: Mesh) -> bool:
    """Returns whether every dim of ``shape`` divides evenly into its blocks."""
    shards = layout.shards(len(shape), mesh.sizes_by_name)
    return all(n % k == 0 for n, k in zip(shape, shards, strict=True))


def reshard_edges(
    layout: Layout, rank: int, mesh: Mesh, reductions: tuple[str, ...] = REDUCTIONS
) -> Iterator[ReshardEdge]:
    """Yields every step from ``layout`` for a tensor of ``rank`` dims, whether its dims divide or not.

    Args:
      reductions: those with which a value may become partial.
    """
    state = _State(layout, rank, mesh, reductions)
    for group in _groups(state):
        yield from _placement_changes(state, group)
    for dim in range(rank):
        yield from _reorderings(state, dim)


def arrange(mesh: Mesh, placements: dict[str, Placement], orders: Iterable[Sequence[str]] = ()) -> Layout:
    """Returns the layout with these placements, in mesh order except for the given orders of axes of one dim."""
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
    """A layout with what its edges are derived from."""

    def __init__(self, layout: Layout, rank: int, mesh: Mesh, reductions: tuple[str, ...]) -> None:
        self.layout, self.rank, self.mesh, self.reductions = layout, rank, mesh, reductions
        self.every = {name: layout.on(name) for name in mesh.names}
        self.placed = {name: placed for name, placed in self.every.items() if mesh.axis(name) > 1}
        self.orders = {dim: layout.splitting(dim) for dim in range(rank)}

    def others(self, axes: Sequence[str]) -> int:
        """Returns the number of blocks into which axes other than ``axes`` cut the tensor."""
        return prod(self.mesh.axis(n) for n, p in self.placed.items() if n not in axes and isinstance(p, Split))

    def to(self, axes: Sequence[str], target: Placement) -> Layout:
        """Returns the layout after ``axes`` moved to ``target``, as the new minor-most of its dim."""
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


def _placement_changes(state: _State, axes: tuple[str, ...]) -> Iterator[ReshardEdge]:
    source = state.placed[axes[0]]
    if isinstance(source, Split):
        yield _edge(state, "all-gather", axes, source, B)
        yield from (_edge(state, "pad", axes, source, P(kind)) for kind in state.reductions)
    elif isinstance(source, Partial):
        yield _edge(state, "all-reduce", axes, source, B)
    else:
        yield from (_edge(state, "keep-first", axes, source, P(kind)) for kind in state.reductions)
    for dim in range(state.rank):
        if source is not Split(dim):
            yield _edge(state, into_split(source), axes, source, Split(dim))


def into_split(source: Placement) -> str:
    """Returns the kind of step from a placement to a split."""
    if source is B:
        return "slice"
    return "reduce-scatter" if source is P else "all-to-all"


def _reorderings(state: _State, dim: int) -> Iterator[ReshardEdge]:
    order = state.orders[dim]
    for other in permutations(order):
        if other != order:
            orders = {**state.orders, dim: other}
            after = arrange(state.mesh, state.every, orders.values())
            yield _edge(state, "collective-permute", order, Split(dim), Split(dim), after)


def _edge(
    state: _State, kind: str, axes: tuple[str, ...], source: Placement, target: Placement, after: Layout | None = None
) -> ReshardEdge:
    ends = (source, target, state.layout, after or state.to(axes, target))
    others, step = state.others(axes), (kind, axes, source, target, state.mesh)
    return ReshardEdge(kind, axes, *ends, step_price(*step).times(1 / others), others, low_step(*step))


# ---- The graph of layouts --------------------------------------------------------------------------------------------
# Nodes are all layouts of a tensor over a mesh, edges the steps between them. The graph depends on the tensor's rank
# only: its shape decides which layouts fit, and its bytes scale the prices.


class LayoutGraph:
    """The graph of layouts of tensors of one rank; placements may be partial, with one of ``reductions`` at a time."""

    def __init__(self, mesh: Mesh, rank: int, reductions: tuple[str, ...]) -> None:
        self.mesh, self.rank, self.reductions = mesh, rank, reductions
        self.placements: tuple[Placement, ...] = (*map(Split, range(rank)), B, *map(Partial, reductions))
        self.layouts = tuple(dict.fromkeys(self._all()))
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        self._edges: dict[int, tuple[tuple[ReshardEdge, int], ...]] = {}

    def edges(self, i: int) -> tuple[tuple[ReshardEdge, int], ...]:
        """Returns the edges of layout ``i`` with the index of the layout they lead to."""
        if i not in self._edges:
            self._edges[i] = tuple(self._from(self.layouts[i]))
        return self._edges[i]

    @cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """Per layout, the blocks per dim."""
        return tuple(layout.shards(self.rank, self.mesh.sizes_by_name) for layout in self.layouts)

    def fits(self, i: int, shape: Sequence[int]) -> bool:
        """Returns whether layout ``i`` divides every dim of ``shape``."""
        return all(n % k == 0 for n, k in zip(shape, self.shards[i], strict=True))

    def _from(self, layout: Layout) -> list[tuple[ReshardEdge, int]]:
        edges = reshard_edges(layout, self.rank, self.mesh, self.reductions)
        return [(edge, to) for edge in edges if (to := self.index.get(edge.after)) is not None]

    def _all(self) -> list[Layout]:
        wide = [self.placements if size > 1 else (B,) for size in self.mesh.sizes]
        return [layout for placed in product(*wide) if _one_reduction(placed) for layout in self._orders(placed)]

    def _orders(self, placed: tuple[Placement, ...]) -> list[Layout]:
        by_name = dict(zip(self.mesh.names, placed, strict=True))
        dims = dict.fromkeys(p for p in placed if isinstance(p, Split))
        shared = [[n for n, p in by_name.items() if p is dim] for dim in dims]
        return [arrange(self.mesh, by_name, orders) for orders in product(*map(permutations, shared))]


def _one_reduction(placed: tuple[Placement, ...]) -> bool:
    """Returns whether the value is partial in one way only: a sum of maxima is not a maximum of sums."""
    return len({p for p in placed if isinstance(p, Partial)}) <= 1


@cache
def layout_graph(mesh: Mesh, rank: int, reductions: tuple[str, ...] = ("sum",)) -> LayoutGraph:
    """Returns the graph of layouts of this rank over ``mesh``."""
    return LayoutGraph(mesh, rank, reductions)


@cache
def complete(layout: Layout, mesh: Mesh) -> Layout:
    """Returns the same layout with every axis of the mesh named, in mesh order where the order is free."""
    splits = {p.dim for _, p in layout.placements if isinstance(p, Split)}
    return arrange(mesh, {n: layout.on(n) for n in mesh.names}, [layout.splitting(d) for d in splits])


def makes_partial(edge: ReshardEdge) -> bool:
    """Returns whether the step turns a whole or split value into a partial one."""
    return edge.kind in ("pad", "keep-first")


# ---- Shortest paths --------------------------------------------------------------------------------------------------
# A reshard is a shortest path in the graph of layouts (Dijkstra 1959), on all axes jointly, also where a direct step
# exists: a hierarchical all-reduce (reduce-scatter on the fast axis, all-reduce on the slow one, all-gather back) is
# found, not coded.
#
# A value becomes partial (pad, keep-first) only at the end of a path, where the target requires it. Making it partial
# on the way, only to reduce it again, would cost sums of zeros to save a latency, and plans would be hard to read.


_SearchState = tuple[int, bool]  # a layout, and whether the path has begun to make the value partial


def reshard(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    itemsize: float,
    mesh: Mesh,
    manual: tuple[str, ...] = (),
    formats: tuple[str, ...] = (),
) -> tuple[ReshardStep, ...]:
    """Returns the cheapest steps from ``source`` to ``target`` for a tensor of ``shape``.

    Ties are broken by fewer steps, then by the order of the graph, so the result is deterministic. Raises LayoutError
    if a layout does not fit the tensor.

    Args:
      manual: axes on which the tensor is ``B`` and stays so on the way: its devices hold different blocks there.
      formats: of fewer bits, in which it may be sent.
    """
    source, target = complete(source, mesh), complete(target, mesh)
    kinds = {p.reduction for layout in (source, target) for _, p in layout.placements if isinstance(p, Partial)}
    graph = layout_graph(mesh, len(shape), tuple(sorted(kinds | {"sum"})))
    for layout in (source, target):
        if layout not in graph.index or not fits(layout, shape, mesh):
            raise LayoutError(f"layout {layout} does not fit a tensor of shape {tuple(shape)} on mesh {mesh}")
    rounding = Rounding(prod(shape), itemsize, formats) if formats else None
    return _shortest(graph, graph.index[source], graph.index[target], shape, itemsize, manual, rounding)


def _shortest(
    graph: LayoutGraph,
    start: int,
    end: int,
    shape: Sequence[int],
    itemsize: float,
    manual: tuple[str, ...],
    rounding: Rounding | None,
) -> tuple[ReshardStep, ...]:
    size = prod(shape) * itemsize
    best: dict[_SearchState, tuple[float, int]] = {(start, False): (0.0, 0)}
    predecessor: dict[_SearchState, tuple[_SearchState, ReshardEdge]] = {}
    queue = [(0.0, 0, (start, False))]
    while queue:
        seconds, steps, stop = heapq.heappop(queue)
        if stop[0] == end:
            return _unwind(predecessor, stop, size, rounding)
        if (seconds, steps) > best[stop]:
            continue
        for edge, to in graph.edges(stop[0]):
            onward, reached = (to, makes_partial(edge)), (seconds + edge.cheapest(size, rounding)[0], steps + 1)
            if stop[1] > onward[1] or (onward in best and reached >= best[onward]) or not graph.fits(to, shape):
                continue
            if any(axis in manual for axis in edge.axes):
                continue
            best[onward], predecessor[onward] = reached, (stop, edge)
            heapq.heappush(queue, (*reached, onward))
    raise LayoutError(f"no steps lead from {graph.layouts[start]} to {graph.layouts[end]}")


def _unwind(
    predecessor: dict[_SearchState, tuple[_SearchState, ReshardEdge]],
    stop: _SearchState,
    size: float,
    rounding: Rounding | None,
) -> tuple[ReshardStep, ...]:
    path: list[ReshardStep] = []
    while stop in predecessor:
        stop, edge = predecessor[stop]
        path.append(edge.of(size, rounding))
    return tuple(reversed(path))
