"""The layouts of a space and all moves between them as arrays, made in bulk.

What moves there are, when they are legal and what they cost is said in ``layouts.move``, layout by
layout; here the same table is written for all layouts at once, since a space over four mesh axes
has thousands of layouts and 50,000 moves. The tests compare the two move by move.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, combinations, count, permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshdsl.layouts.collective_cost import COLLECTIVES, rate
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, B, Placement, Split
from meshdsl.layouts.reshard import Space, into_split, space
from meshdsl.planner.costs.fixed_point import COLLECTIVE_TIE, MOVE_TIE, FixedPoint
from meshdsl.util.arrays import Costs, Ids

# ---- Arcs ------------------------------------------------------------------------------------------------------------


Axes = tuple[int, ...]  # mesh axes by number
_Mask = NDArray[np.bool_]


def placement_code(placed: Placement, rank: int) -> int:
    """Number of a placement among those of tensors of ``rank`` dims: S(0).., B, P, P(max), P(min)."""
    if isinstance(placed, Split):
        return int(placed.dim)
    return rank if placed is B else rank + 1 + REDUCTIONS.index(placed.reduction)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class ReshardGraph:
    """Moves: from, to, the price's lines, ties, whether they make the value partial, whether they are collectives.

    ``fixed`` and ``per_byte`` have a row per move and a column per line, of which the cheapest counts.
    """

    source: Ids
    target: Ids
    fixed: Costs
    per_byte: Costs
    tie: Costs
    partial: _Mask
    is_collective: _Mask


class EdgeArrays:
    """A space of layouts as arrays.

    ``codes`` and ``places`` have a row per layout and a column per mesh axis: its placement, and
    its place among the axes that split the same dim, 0 for the major one.
    """

    def __init__(self, within: Space) -> None:
        self.space, self.rank, self.mesh = within, within.rank, within.mesh
        self.codes = np.array([_codes(layout, within) for layout in within.layouts], dtype=np.intp)
        self.ranks = np.array([_places(layout, within) for layout in within.layouts], dtype=np.intp)
        self.shards = np.array(within.shards, dtype=np.intp).reshape(len(within.layouts), within.rank)
        self._keys = self._key(self.codes, self.ranks)
        self._by_key = np.argsort(self._keys)

    def ordered(self, order: tuple[str, ...]) -> _Mask:
        """Which layouts have the axes of every dim in ``order``, major first."""
        at, fine = [self.mesh.names.index(name) for name in order], np.ones(len(self.codes), dtype=np.bool_)
        for a, b in combinations(at, 2):
            together = (self.codes[:, a] == self.codes[:, b]) & (self.codes[:, a] < self.rank)
            fine &= ~together | (self.ranks[:, a] < self.ranks[:, b])
        return fine

    @cached_property
    def edges(self) -> ReshardGraph:
        """All moves of the space."""
        columns = zip(*self._all(), strict=True)
        return ReshardGraph(*(np.concatenate(column) for column in columns))

    def _key(self, codes: Ids, places: Ids) -> Ids:
        count = codes.shape[1]
        base = ((self.rank + 1 + len(REDUCTIONS)) * count) ** np.arange(count, dtype=np.intp)
        return np.asarray((codes * count + places) @ base)

    def _all(self) -> Iterator[tuple[NDArray[np.generic], ...]]:
        line = np.zeros((0, 2))
        yield np.zeros(0, np.intp), np.zeros(0, np.intp), line, line, np.zeros(0), *[np.zeros(0, np.bool_)] * 2
        wide = [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]
        for axes in chain.from_iterable(combinations(wide, size) for size in range(1, len(wide) + 1)):
            for source in range(self.rank + 1 + len(self.space.reductions)):
                placed = self.space.placements[source]
                here = self._movable(axes, placed)
                if here.size:
                    for target in self.space.placements:
                        yield from self._moved(axes, placed, target, here)
                    yield from self._swapped(axes, placed, here)

    def _movable(self, axes: Axes, placed: Placement) -> Ids:
        """Layouts in which these axes are placed so and may move together: see ``layouts.move``."""
        number = placement_code(placed, self.rank)
        alike = (self.codes[:, axes] == number).all(axis=1)
        if isinstance(placed, Split):
            minor = (self.codes == number).sum(axis=1) - len(axes)
            alike &= (self.ranks[:, axes] >= minor[:, None]).all(axis=1)
        return np.flatnonzero(alike)

    def _moved(
        self, axes: Axes, source: Placement, target: Placement, here: Ids
    ) -> Iterator[tuple[NDArray[np.generic], ...]]:
        kind = _kind(source, target)
        if kind:
            number = placement_code(target, self.rank)
            codes, places = self.codes[here].copy(), self.ranks[here].copy()
            among = np.argsort(np.argsort(places[:, axes], axis=1), axis=1) if isinstance(source, Split) else None
            inside = (codes == number).sum(axis=1) if isinstance(target, Split) else np.zeros(len(here), dtype=np.intp)
            codes[:, axes] = number
            step = np.arange(len(axes)) if among is None else among
            places[:, axes] = inside[:, None] + step if isinstance(target, Split) else 0
            yield self._priced(kind, axes, source, target, here, self._key(codes, places))

    def _swapped(self, axes: Axes, placed: Placement, here: Ids) -> Iterator[tuple[NDArray[np.generic], ...]]:
        """All axes of a dim change their order."""
        if not isinstance(placed, Split) or len(axes) < 2:
            return
        whole = here[(self.codes[here] == placement_code(placed, self.rank)).sum(axis=1) == len(axes)]
        for order in permutations(range(len(axes))):
            other = whole[(self.ranks[whole][:, axes] != order).any(axis=1)]
            places = self.ranks[other].copy()
            places[:, axes] = order
            keys = self._key(self.codes[other], places)
            yield self._priced("collective-permute", axes, placed, placed, other, keys)

    def _priced(
        self, kind: str, axes: Axes, source: Placement, target: Placement, here: Ids, keys: Ids
    ) -> tuple[NDArray[np.generic], ...]:
        at = np.searchsorted(self._keys, keys, sorter=self._by_key).clip(max=len(self._keys) - 1)
        to = self._by_key[at]
        known = self._keys[to] == keys
        here, to = here[known], to[known]
        lines = rate(kind, tuple(self.mesh.names[axis] for axis in axes), source, target, self.mesh).lines
        fixed, per_byte = np.array([lines[0], lines[-1]]).T
        others = [axis for axis in range(len(self.mesh.sizes)) if axis not in axes]
        sizes = np.where(self.codes[here][:, others] < self.rank, np.array(self.mesh.sizes)[others], 1)
        sends, count = kind in COLLECTIVES, np.ones(len(here))
        price = (
            count[:, None] * fixed,
            per_byte / sizes.prod(axis=1)[:, None],
            (COLLECTIVE_TIE if sends else MOVE_TIE) * count,
        )
        return here, to, *price, np.full(len(here), kind in ("pad", "keep-first")), np.full(len(here), sends)


def _kind(source: Placement, target: Placement) -> str:
    """The move of some axes from one placement to another; empty if there is none."""
    if isinstance(target, Split):
        return "" if source is target else into_split(source)
    if isinstance(source, Split):
        return "all-gather" if target is B else "pad"
    if source is B:
        return "" if target is B else "keep-first"
    return "all-reduce" if target is B else ""


def _codes(layout: Layout, within: Space) -> list[int]:
    placed = dict(layout.placements)
    return [placement_code(placed.get(name, B), within.rank) for name in within.mesh.names]


def _places(layout: Layout, within: Space) -> list[int]:
    seen: dict[Placement, int] = {}
    places = dict.fromkeys(within.mesh.names, 0)
    for name, placed in layout.placements:
        if isinstance(placed, Split):
            places[name] = seen.get(placed, 0)
            seen[placed] = places[name] + 1
    return list(places.values())


@cache
def edge_arrays(within: Space) -> EdgeArrays:
    """The arrays of a space, made once."""
    return EdgeArrays(within)


# ---- Distances -------------------------------------------------------------------------------------------------------
# The price of every reshard of a tensor, worked out from the layouts that are asked for.
#
# All moves of a layout space are arrays (``arcs``); a tensor's bytes scale the prices. From a layout
# to all others is a few passes over the arrays (Bellman 1958).


_Moves = tuple[Ids, Ids, Costs]  # from, to and price


@dataclass(frozen=True)
class OverlapWindow:
    """What of a collective can run beside independent computing.

    Args:
      window: seconds of such computing.
      price: of a second that is hidden, as a part of one that is not.
    """

    window: float
    price: float

    def seconds(self, seconds: Costs) -> Costs:
        """What sticks out of moves that take so long, and the price of the rest."""
        inside = np.minimum(seconds, self.window)
        return np.asarray(seconds - inside + self.price * inside)


class ReshardCosts:
    """Reshard costs between the layouts of tensors of one shape; layouts go by their number in ``space``.

    Args:
      sent: whether there are collectives among the moves, or only what every device does for itself.
      apart: axes that split the tensor in every layout.
      hidden: what of collectives costs less; None if they cost what they take.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, ...],
        itemsize: int,
        kinds: tuple[str, ...],
        scale: FixedPoint,
        sent: bool = True,
        apart: tuple[str, ...] = (),
        hidden: OverlapWindow | None = None,
    ) -> None:
        self.scale, self.bytes, self._sent, self._hidden = scale, prod(shape) * itemsize, sent, hidden
        self.space, self.rank = space(mesh, len(shape), kinds), len(shape)
        self._arrays = edge_arrays(self.space)
        self.codes = self._arrays.codes
        divides = (np.array(shape, dtype=np.intp) % self._arrays.shards == 0).all(axis=1)
        split = self.codes[:, [mesh.names.index(name) for name in apart]] < self.rank
        self.feasible = np.flatnonzero(divides & split.all(axis=1))
        self._ids: dict[tuple[str, ...], Ids] = {}
        self._known_edges: dict[bool, _Moves] = {}

    def all_pairs(self, sources: Ids, through: Ids, targets: Ids) -> tuple[Costs, Costs]:
        """Costs [sources, targets]: of paths that make nothing partial, and of all paths.

        A value becomes partial only at the end of a path; moves do not go on from there.

        Args:
          through: the layouts that paths may lead through, sources and targets among them.
        """
        place = np.full(len(self.codes), -1)
        place[through] = np.arange(through.size)
        costs = np.full((through.size, sources.size), np.inf)
        costs[place[sources], np.arange(sources.size)] = 0.0
        inner = _Graph.of(*self.edges(False), place).relaxed(costs)
        whole = _Graph.of(*self.edges(True), place).relaxed(inner)
        return inner[place[targets]].T, whole[place[targets]].T

    def edges(self, partial: bool) -> _Moves:
        """Single moves between layouts that fit: those that make the tensor partial, or the others."""
        if partial not in self._known_edges:
            self._known_edges[partial] = self._edges(partial)
        return self._known_edges[partial]

    def _edges(self, partial: bool) -> _Moves:
        arcs = self._arrays.edges
        fit = np.zeros(len(self.codes), dtype=np.bool_)
        fit[self.feasible] = True
        usable = (arcs.partial == partial) & fit[arcs.source] & fit[arcs.target] & (self._sent | ~arcs.is_collective)
        seconds = (arcs.fixed + arcs.per_byte * self.bytes).min(axis=1)
        if self._hidden:
            seconds = np.where(arcs.is_collective, self._hidden.seconds(seconds), seconds)
        price = self.scale.pack(seconds, arcs.tie)
        return arcs.source[usable], arcs.target[usable], price[usable]

    @cached_property
    def in_mesh_order(self) -> NDArray[np.bool_]:
        """Which layouts have the axes of every dim in the order of the mesh."""
        return self._arrays.ordered(self.space.mesh.names)

    @cached_property
    def least_bytes(self) -> float:
        """Bytes that one device holds in the smallest layout."""
        return float(self.bytes * self.shares.min())

    @cached_property
    def shares(self) -> Costs:
        """Part of the tensor's bytes that one device holds, by layout."""
        return np.asarray(1 / self._arrays.shards.prod(axis=1))

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Layout numbers by placement codes, axes of one dim in ``order``; one past the last where there is none."""
        if order not in self._ids:
            ids = np.full((self.rank + 1 + len(REDUCTIONS),) * len(order), len(self.codes))
            here = self.feasible[self._arrays.ordered(order)[self.feasible]]
            ids[tuple(self.codes[here].T)] = here
            self._ids[order] = ids
        return self._ids[order]


@dataclass(frozen=True, eq=False)
class _Graph:
    """Moves between layouts as arrays sorted by where they lead, one at most between two layouts."""

    source: Ids
    target: Ids
    price: Costs

    @classmethod
    def of(cls, source: Ids, target: Ids, price: Costs, place: Ids) -> "_Graph":
        """The moves between layouts that have a place, by which they go here; of parallel ones, the cheapest."""
        source, target = place[source], place[target]
        here = (source >= 0) & (target >= 0)
        source, target, price = source[here], target[here], price[here]
        order = np.lexsort((price, source, target))
        source, target, price = source[order], target[order], price[order]
        first = np.append(True, (np.diff(source) != 0) | (np.diff(target) != 0))[: source.size]
        return cls(source[first], target[first], price[first])

    def relaxed(self, costs: Costs) -> Costs:
        """Costs [layouts, rows] after any number of moves."""
        from meshdsl.planner.costs.kernels import (
            bellman_ford,  # with its compiler, too much to import for those who plan nothing
        )

        best = costs.copy()
        bellman_ford(self.source, self.target, self.price, best)
        return best


def placement_codes(placements: Iterable[Placement], rank: int) -> Ids:
    """Codes of several placements of one tensor."""
    return np.array([placement_code(placed, rank) for placed in placements], dtype=np.intp)


# ---- Closure ---------------------------------------------------------------------------------------------------------
# The layouts of a tensor that are in question, and what it costs to move between them.


class LayoutDomain:
    """Reshard costs between some layouts of tensors of one shape.

    Layouts go by their place in ``active`` (numbers in ``distances``); the last row and
    column of ``costs`` are infinite and stand for all others. Moves lead ``through`` some layouts.
    """

    def __init__(self, distances: ReshardCosts, active: Ids, through: Ids, number: int) -> None:
        self.reshard, self.layouts, self.through, self.number = distances, active, through, number
        self._ids: dict[tuple[str, ...], Ids] = {}

    @property
    def costs(self) -> Costs:
        """What the cheapest moves cost."""
        return self._both[1]

    @property
    def transit_costs(self) -> Costs:
        """The same for moves that make nothing partial: from where they end, moves may go on."""
        return self._both[0]

    @cached_property
    def _both(self) -> tuple[Costs, Costs]:
        inner, whole = self.reshard.all_pairs(self.layouts, self.through, self.layouts)
        return _with_none(inner), _with_none(whole)

    @cached_property
    def indices(self) -> Ids:
        """All of the layouts."""
        return np.arange(self.layouts.size)

    @cached_property
    def codes(self) -> Ids:
        """Placement codes of the layouts, one column per mesh axis."""
        return self.reshard.codes[self.layouts]

    @cached_property
    def partial(self) -> NDArray[np.bool_]:
        """Which of the layouts are partial."""
        return np.asarray((self.codes > self.reshard.rank).any(axis=1))

    @cached_property
    def zeros(self) -> Costs:
        """No cost for any layout."""
        return np.zeros(self.layouts.size)

    def between(self, sources: Ids, targets: Ids, inner: bool = False) -> Costs:
        """Reshard costs from each of some layouts to each of others, to stay there or to go on from there."""
        return np.asarray((self.transit_costs if inner else self.costs)[sources[:, None], targets])

    @cached_property
    def local_bytes(self) -> Costs:
        """Bytes that one device holds in each layout."""
        return np.append(self.reshard.bytes * self.reshard.shares[self.layouts], np.inf)

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Places of layouts by placement codes, axes of one dim in ``order``, major first."""
        if order not in self._ids:
            self._ids[order] = self.place_of[self.reshard.ids(order)]
        return self._ids[order]

    @cached_property
    def place_of(self) -> Ids:
        """Places of layouts by their numbers in ``distances``, and of what is no layout."""
        places = np.full(len(self.reshard.codes) + 1, self.layouts.size)
        places[self.layouts] = self.indices
        return places


def _with_none(costs: Costs) -> Costs:
    """With a row and a column for layouts that are not in question."""
    return np.pad(costs, ((0, 1), (0, 1)), constant_values=np.inf)


# ---- Near ------------------------------------------------------------------------------------------------------------
# What is near a plan: states and layouts that differ from it on some mesh axes, which move in groups.


Groups = tuple[Axes, ...]  # axes of one group take the same row


def neighbourhood(states: Ids, groups: Groups, around: Ids) -> NDArray[np.bool_]:
    """Which states have one row per group and all else as in the state ``around``; that state itself is one."""
    free = [axis for axes in groups for axis in axes]
    held = [axis for axis in range(len(around)) if axis not in free]
    near = (states[:, held] == around[held]).all(axis=1)
    for axes in groups:
        near &= (states[:, axes] == states[:, axes[:1]]).all(axis=1)
    found: NDArray[np.bool_] = near | (states == around).all(axis=1)
    return found


def neighbour_layouts(distances: ReshardCosts, active: Ids, groups: Groups) -> Ids:
    """The layouts ``active``, and those in mesh order with a placement or B per group and nothing new elsewhere."""
    codes, free = distances.codes, [axis for axes in groups for axis in axes]
    inside = distances.in_mesh_order.copy()
    for axes in groups:
        placed = codes[:, axes]
        common = np.where(placed == distances.rank, -1, placed).max(axis=1, keepdims=True)
        inside &= ((placed == distances.rank) | (placed == common)).all(axis=1)
    for axis in set(range(codes.shape[1])) - set(free):
        inside &= np.isin(codes[:, axis], [*codes[active, axis], distances.rank])
    inside[active] = True
    return distances.feasible[inside[distances.feasible]]


def singleton_groups(axes: Axes) -> Groups:
    """Each mesh axis by itself."""
    return tuple((axis,) for axis in axes)


def axis_groups_in_pairs(axes: Axes) -> Iterator[Groups]:
    """Two of the mesh axes, each by itself; the others stay."""
    return map(singleton_groups, combinations(axes, 2))


def axis_groups_split(axes: Axes) -> Iterator[Groups]:
    """All mesh axes, in two groups of neighbours."""
    return ((axes[:i], axes[i:]) for i in range(1, len(axes)))


def axis_groups_in_two(axes: Axes) -> Iterator[Groups]:
    """Mesh axes as if there were two: two of them, then all in two groups."""
    return chain(axis_groups_in_pairs(axes), axis_groups_split(axes))


def axis_groups_merged(axes: Axes) -> Iterator[Groups]:
    """All mesh axes as if there were fewer: in one group, then in two groups of neighbours."""
    if len(axes) > 1:
        yield (axes,)
    if len(axes) > 2:
        yield from axis_groups_split(axes)


def axis_groups_of_plan(axes: Axes, rows: Ids) -> Groups:
    """The two groups whose axes take the same row in most operations of a plan, ``rows[node, axis]``."""

    def alike(groups: Groups) -> int:
        return int(np.logical_and.reduce([(rows[:, some] == rows[:, some[:1]]).all(axis=1) for some in groups]).sum())

    return max(axis_groups_split(axes), key=alike)


# ---- Closures --------------------------------------------------------------------------------------------------------
# Closures of a model: of all layouts, of those near a plan, or of the plan's own.
#
# Each has a number of its own, by which what follows from it is known.


class LayoutDomains:
    """Makes closures, and knows those that are asked for again."""

    def __init__(self) -> None:
        self._numbers = count()
        self._wholes: dict[ReshardCosts, LayoutDomain] = {}
        self._held: dict[tuple[ReshardCosts, bytes], LayoutDomain] = {}

    def full(self, distances: Iterable[ReshardCosts], few: bool) -> dict[ReshardCosts, LayoutDomain]:
        """Of all layouts; if they are ``few``, as on two mesh axes, made once."""
        found = self._wholes if few else {}
        for d in distances:
            if d not in found:
                found[d] = LayoutDomain(d, d.feasible, d.feasible, next(self._numbers))
        return found

    def neighbourhood(self, read: Mapping[ReshardCosts, Ids], groups: Groups) -> dict[ReshardCosts, LayoutDomain]:
        """Of layouts that are read, with moves through those near them."""
        return {d: self._between(d, layouts, groups) for d, layouts in read.items()}

    def of_plan(self, read: Iterable[tuple[ReshardCosts, Ids]]) -> dict[ReshardCosts, LayoutDomain]:
        """Of the layouts that a plan has, and nothing new; those of plans that have the same ones are one."""
        found = {}
        for d, layouts in read:
            key = d, layouts.tobytes()
            if key not in self._held:
                self._held[key] = self._between(d, layouts, ())
            found[d] = self._held[key]
        return found

    def release(self) -> None:
        """Of those of plans."""
        self._held.clear()

    def _between(self, distances: ReshardCosts, layouts: Ids, groups: Groups) -> LayoutDomain:
        return LayoutDomain(distances, layouts, neighbour_layouts(distances, layouts, groups), next(self._numbers))
