"""Seconds of the cheapest reshard between any two layouts of a tensor, in bulk; and the layouts a search considers.

A reshard is a path of steps. Which steps exist, when they are valid and what they cost is defined in
``layouts.reshard``, layout by layout, where Dijkstra's algorithm finds single paths. Here the same table is written a
second time, for all layouts at once as arrays, since a space over four mesh axes has thousands of layouts and 50,000
steps; ``tests/planner/costs/test_reshard_cost.py`` compares the two step by step. From some layouts to all others are a
few passes over these arrays (Bellman 1958). ``scipy.sparse.csgraph`` offers the same, but no control over ties and over
paths that end partial.

In reading order: ``EdgeArrays``, the steps of a space; ``ReshardCosts``, their prices for one tensor, and shortest
paths; ``LayoutDomain``, the layouts of a value that a search considers, with the costs between them; neighbourhoods of
a plan; ``LayoutDomains``, which makes domains and memoises them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain, combinations, count, permutations
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import sent_itemsize
from meshdsl.layouts.collective_cost import BUCKETED, COLLECTIVES, step_price
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.low_bits import LowStep, low_step
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, B, Placement, Split
from meshdsl.layouts.reshard import LayoutGraph, into_split, layout_graph
from meshdsl.planner.costs.fixed_point import COLLECTIVE_TIE, MOVE_TIE, FixedPoint
from meshdsl.util.arrays import Costs, Ids

# ---- Steps -----------------------------------------------------------------------------------------------------------


Axes = tuple[int, ...]  # mesh axes by number
Surcharge = Literal["unshared", "exact"]  # what some consumers pay beyond the price of a reshard
_Mask = NDArray[np.bool_]


def placement_code(placed: Placement, rank: int) -> int:
    """Returns the number of a placement of tensors of ``rank`` dims, in the order S(0), ..., B, P, P(max), P(min)."""
    if isinstance(placed, Split):
        return int(placed.dim)
    return rank if placed is B else rank + 1 + REDUCTIONS.index(placed.reduction)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class ReshardGraph:
    """Steps between layouts.

    Args:
      source, target: [steps], layouts.
      fixed, per_byte: [steps, algorithms], seconds, and seconds per byte of the whole tensor; the cheapest counts.
      tie: [steps], tie-breaking cost.
      partial: [steps], whether it makes the tensor partial.
      is_collective: [steps], whether it communicates.
      in_bucket: [steps], whether it may be sent in a bucket.
      summed: [steps], the mesh axes over which it is an all-reduce, as bits; 0 for every other kind.
      inner: [steps], how often it copies the larger one of its two blocks, which is one of an inner dim, in any case.
      others: [steps], the number of blocks into which axes other than those of the step cut the tensor.
      low: [steps], the position of the step in fewer bits among ``low_steps``; -1 if it is sent in full.
    """

    source: Ids
    target: Ids
    fixed: Costs
    per_byte: Costs
    tie: Costs
    partial: _Mask
    is_collective: _Mask
    in_bucket: _Mask
    summed: Ids
    inner: Costs
    others: Costs
    low: Ids


class EdgeArrays:
    """A space of layouts as arrays.

    Attributes:
      codes: [layouts, mesh axes], the placement code.
      ranks: [layouts, mesh axes], the position among the axes that split the same dim; 0 is the major one.
      shards: [layouts, dims], the number of blocks.
      low_steps: the distinct steps in fewer bits; complete once ``edges`` is.
    """

    def __init__(self, within: LayoutGraph) -> None:
        self.space, self.rank, self.mesh = within, within.rank, within.mesh
        self.codes = np.array([_codes(layout, within) for layout in within.layouts], dtype=np.intp)
        self.ranks = np.array([_ranks(layout, within) for layout in within.layouts], dtype=np.intp)
        self.shards = np.array(within.shards, dtype=np.intp).reshape(len(within.layouts), within.rank)
        self.low_steps: list[LowStep] = []
        self._keys = self._key(self.codes, self.ranks)
        self._by_key = np.argsort(self._keys)

    def ordered(self, order: tuple[str, ...]) -> _Mask:
        """Returns the mask of the layouts whose axes of every dim are in ``order``, major first."""
        at, mask = [self.mesh.names.index(name) for name in order], np.ones(len(self.codes), dtype=np.bool_)
        for a, b in combinations(at, 2):
            together = (self.codes[:, a] == self.codes[:, b]) & (self.codes[:, a] < self.rank)
            mask &= ~together | (self.ranks[:, a] < self.ranks[:, b])
        return mask

    @cached_property
    def edges(self) -> ReshardGraph:
        """All steps of the space."""
        columns = zip(*self._all_steps(), strict=True)
        return ReshardGraph(*(np.concatenate(column) for column in columns))

    def _key(self, codes: Ids, places: Ids) -> Ids:
        count = codes.shape[1]
        base = ((self.rank + 1 + len(REDUCTIONS)) * count) ** np.arange(count, dtype=np.intp)
        return np.asarray((codes * count + places) @ base)

    def _all_steps(self) -> Iterator[tuple[NDArray[np.generic], ...]]:
        none = np.zeros((0, 2))
        yield (
            np.zeros(0, np.intp),
            np.zeros(0, np.intp),
            none,
            none,
            np.zeros(0),
            *[np.zeros(0, np.bool_)] * 3,
            np.zeros(0, np.intp),
            np.zeros(0),
            np.zeros(0),
            np.zeros(0, np.intp),
        )
        parallel = [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]
        for axes in chain.from_iterable(combinations(parallel, size) for size in range(1, len(parallel) + 1)):
            for source in range(self.rank + 1 + len(self.space.reductions)):
                placed = self.space.placements[source]
                here = self._movable(axes, placed)
                if here.size:
                    for target in self.space.placements:
                        yield from self._placement_steps(axes, placed, target, here)
                    yield from self._order_steps(axes, placed, here)

    def _movable(self, axes: Axes, placed: Placement) -> Ids:
        """Returns the layouts in which these axes have this placement and may change it together."""
        number = placement_code(placed, self.rank)
        mask = (self.codes[:, axes] == number).all(axis=1)
        if isinstance(placed, Split):
            minor = (self.codes == number).sum(axis=1) - len(axes)
            mask &= (self.ranks[:, axes] >= minor[:, None]).all(axis=1)
        return np.flatnonzero(mask)

    def _placement_steps(
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
            yield self._price(kind, axes, source, target, here, self._key(codes, places))

    def _order_steps(self, axes: Axes, placed: Placement, here: Ids) -> Iterator[tuple[NDArray[np.generic], ...]]:
        """Yields the steps in which all axes of a dim change their order."""
        if not isinstance(placed, Split) or len(axes) < 2:
            return
        whole = here[(self.codes[here] == placement_code(placed, self.rank)).sum(axis=1) == len(axes)]
        for order in permutations(range(len(axes))):
            other = whole[(self.ranks[whole][:, axes] != order).any(axis=1)]
            places = self.ranks[other].copy()
            places[:, axes] = order
            keys = self._key(self.codes[other], places)
            yield self._price("collective-permute", axes, placed, placed, other, keys)

    def _price(
        self, kind: str, axes: Axes, source: Placement, target: Placement, here: Ids, keys: Ids
    ) -> tuple[NDArray[np.generic], ...]:
        at = np.searchsorted(self._keys, keys, sorter=self._by_key).clip(max=len(self._keys) - 1)
        to = self._by_key[at]
        known = self._keys[to] == keys
        here, to = here[known], to[known]
        step = kind, tuple(self.mesh.names[axis] for axis in axes), source, target, self.mesh
        lines, low = step_price(*step).lines, low_step(*step)
        fixed, per_byte = np.array([lines[0], lines[-1]]).T
        others = [axis for axis in range(len(self.mesh.sizes)) if axis not in axes]
        sizes = np.where(self.codes[here][:, others] < self.rank, np.array(self.mesh.sizes)[others], 1).prod(axis=1)
        is_collective, count = kind in COLLECTIVES, np.ones(len(here))
        price = (
            count[:, None] * fixed,
            per_byte / sizes[:, None],
            (COLLECTIVE_TIE if is_collective else MOVE_TIE) * count,
        )
        facts = kind in ("pad", "keep-first"), is_collective, kind in BUCKETED
        summed = sum(1 << axis for axis in axes) if kind == "all-reduce" else 0
        inner = float(sum(isinstance(end, Split) and end.dim != 0 for end in (source, target)))
        if low:
            self.low_steps.append(low)
        position = len(self.low_steps) - 1 if low else -1
        every = [np.full(len(here), fact) for fact in (*facts, summed, inner)]
        return here, to, *price, *every, sizes, np.full(len(here), position)


def _kind(source: Placement, target: Placement) -> str:
    """Returns the kind of step of some axes from one placement to another; empty if there is none."""
    if isinstance(target, Split):
        return "" if source is target else into_split(source)
    if isinstance(source, Split):
        return "all-gather" if target is B else "pad"
    if source is B:
        return "" if target is B else "keep-first"
    return "all-reduce" if target is B else ""


def _codes(layout: Layout, within: LayoutGraph) -> list[int]:
    placed = dict(layout.placements)
    return [placement_code(placed.get(name, B), within.rank) for name in within.mesh.names]


def _ranks(layout: Layout, within: LayoutGraph) -> list[int]:
    seen: dict[Placement, int] = {}
    places = dict.fromkeys(within.mesh.names, 0)
    for name, placed in layout.placements:
        if isinstance(placed, Split):
            places[name] = seen.get(placed, 0)
            seen[placed] = places[name] + 1
    return list(places.values())


@cache
def edge_arrays(within: LayoutGraph) -> EdgeArrays:
    """Returns the arrays of a space, built once."""
    return EdgeArrays(within)


# ---- Reshards --------------------------------------------------------------------------------------------------------


PricedEdges = tuple[Ids, Ids, Costs]  # from, to and price


@dataclass(frozen=True)
class OverlapWindow:
    """Independent compute behind which collectives can be hidden.

    Args:
      window: seconds of compute.
      price: cost of a hidden second, as a part of an exposed one.
    """

    window: float
    price: float

    def seconds(self, seconds: Costs) -> Costs:
        """Returns the charged seconds of collectives: the exposed part, and the price of the hidden one."""
        inside = np.minimum(seconds, self.window)
        return np.asarray(seconds - inside + self.price * inside)


@dataclass(frozen=True)
class SharedLatency:
    """Collectives that are sent in buckets (``planner.buckets``), where that is cheaper than by themselves.

    Args:
      part: of the latency that each of them pays.
      summed: mesh axes as bits, if only all-reduces over exactly these are sent in buckets; 0 if all kinds are.
    """

    part: float
    summed: int = 0

    def fixed(self, steps: "ReshardGraph", copied: Costs) -> Costs:
        """Returns [steps, algorithms], the seconds that do not depend on the bytes sent.

        Args:
          copied: [steps], seconds of putting blocks together and cutting results, at least.
        """
        together = self.part * steps.fixed + copied[:, None]
        shares = steps.summed == self.summed if self.summed else steps.in_bucket
        return np.where(shares[:, None], np.minimum(steps.fixed, together), steps.fixed)


class ReshardCosts:
    """Reshard costs between the layouts of tensors of one shape; layouts are indices in ``layout_graph``.

    Args:
      mesh, shape, itemsize: of the tensor, in elements and bytes.
      kinds: reductions in which it may be partial.
      scale: of costs.
      communicates: whether collectives are allowed, or only local steps.
      always_split: axes that split the tensor in every layout.
      relief: compute that hides collectives, or others with which they share a latency; None for neither.
      manual: axes on which the tensor is ``B`` in every layout, those on the way included: devices hold different
        blocks there, and to cut and gather them again would mix these.
      formats: of fewer bits, in which it may be sent.

    Attributes:
      codes: [layouts, mesh axes], placement codes.
      feasible: the layouts that divide the shape.
    """

    def __init__(
        self,
        mesh: Mesh,
        shape: tuple[int, ...],
        itemsize: float,
        kinds: tuple[str, ...],
        scale: FixedPoint,
        communicates: bool = True,
        always_split: tuple[str, ...] = (),
        relief: OverlapWindow | SharedLatency | None = None,
        manual: tuple[str, ...] = (),
        formats: tuple[str, ...] = (),
    ) -> None:
        self.scale, self._communicates, self._relief = scale, communicates, relief
        self.manual, self.formats = manual, formats
        self._elements, self._itemsize = prod(shape), itemsize
        self.bytes, self._sent = prod(shape) * itemsize, prod(shape) * sent_itemsize(itemsize)
        self.space, self.rank = layout_graph(mesh, len(shape), kinds), len(shape)
        self._arrays = edge_arrays(self.space)
        self.codes = self._arrays.codes
        divides = (np.array(shape, dtype=np.intp) % self._arrays.shards == 0).all(axis=1)
        split = self.codes[:, [mesh.names.index(name) for name in always_split]] < self.rank
        whole = self.codes[:, [mesh.names.index(name) for name in manual]] == self.rank
        self.feasible = np.flatnonzero(divides & split.all(axis=1) & whole.all(axis=1))
        self._ids: dict[tuple[str, ...], Ids] = {}
        self._known_edges: tuple[PricedEdges, PricedEdges] | None = None

    def all_pairs(self, sources: Ids, through: Ids, targets: Ids) -> tuple[Costs, Costs]:
        """Returns two matrices [sources, targets]: costs of paths that make nothing partial, and of all paths.

        A value becomes partial only at the end of a path; no path continues from there.

        Args:
          sources, targets: layouts.
          through: the layouts that paths may pass, sources and targets among them.
        """
        return self._all_pairs((self.edges(False), self.edges(True)), sources, through, targets)

    def beyond(self, what: Surcharge, sources: Ids, through: Ids, targets: Ids) -> Costs:
        """Returns [sources, targets], what paths cost at least beyond ``all_pairs``.

        Args:
          what: ``"unshared"`` if their steps share no latency, ``"exact"`` if they are sent in full.
          sources, through, targets: as of ``all_pairs``.
        """
        edges = self._unshared_edges() if what == "unshared" else self._exact_edges()
        return self._all_pairs(edges, sources, through, targets)[1]

    def _all_pairs(
        self, edges: tuple[PricedEdges, PricedEdges], sources: Ids, through: Ids, targets: Ids
    ) -> tuple[Costs, Costs]:
        place = np.full(len(self.codes), -1)
        place[through] = np.arange(through.size)
        costs = np.full((through.size, sources.size), np.inf)
        costs[place[sources], np.arange(sources.size)] = 0.0
        inner = _StepGraph.of(*edges[0], place).cheapest(costs)
        whole = _StepGraph.of(*edges[1], place).cheapest(inner)
        return inner[place[targets]].T, whole[place[targets]].T

    def edges(self, partial: bool) -> PricedEdges:
        """Returns the steps between feasible layouts: those that make the tensor partial, or the others."""
        if self._known_edges is None:
            self._known_edges = self._edges()
        return self._known_edges[partial]

    def _edges(self) -> tuple[PricedEdges, PricedEdges]:
        steps = self._arrays.edges
        seconds = self._exposed(steps, self._seconds(steps, self._fixed(steps)))
        return self._feasible_edges(steps, self.scale.pack(seconds, steps.tie))

    def _exposed(self, steps: ReshardGraph, seconds: Costs) -> Costs:
        """Returns [steps], the seconds of each that no window hides."""
        if isinstance(self._relief, OverlapWindow):
            return np.where(steps.is_collective, self._relief.seconds(seconds), seconds)
        return seconds

    def _unshared_edges(self) -> tuple[PricedEdges, PricedEdges]:
        """Returns the steps at what each costs beyond its price here: by itself, or as one of a bucket at least."""
        steps = self._arrays.edges
        beyond = self._seconds(steps, steps.fixed) - self._seconds(steps, self._fixed(steps))
        latency = np.minimum(steps.fixed.min(axis=1), beyond)
        return self._feasible_edges(steps, self.scale.pack(np.where(steps.in_bucket, latency, 0.0)))

    def _exact_edges(self) -> tuple[PricedEdges, PricedEdges]:
        """Returns the steps at what each costs beyond its price here if it is sent in full."""
        steps = self._arrays.edges
        fixed = self._fixed(steps)
        here, full = (self._exposed(steps, s) for s in (self._seconds(steps, fixed), self._full_seconds(steps, fixed)))
        return self._feasible_edges(steps, self.scale.pack(full - here))

    def _fixed(self, steps: ReshardGraph) -> Costs:
        """Returns [steps, algorithms], seconds whatever is sent, with a share of the latency where it may be shared."""
        if isinstance(self._relief, SharedLatency):
            return self._relief.fixed(steps, self._spared_copies(steps))
        return steps.fixed

    def _seconds(self, steps: ReshardGraph, fixed: Costs) -> Costs:
        """Returns [steps], seconds of each by itself, in as few bits as allowed."""
        seconds = self._full_seconds(steps, fixed)
        return np.minimum(seconds, self._low_seconds(steps)) if self.formats and self._elements else seconds

    def _full_seconds(self, steps: ReshardGraph, fixed: Costs) -> Costs:
        """Returns [steps], seconds of each by itself, in full."""
        return np.asarray((fixed + steps.per_byte * self._sent).min(axis=1))

    def _feasible_edges(self, steps: ReshardGraph, price: Costs) -> tuple[PricedEdges, PricedEdges]:
        """Returns the steps between feasible layouts: those that do not make the tensor partial, and those that do."""
        fit = np.zeros(len(self.codes), dtype=np.bool_)
        fit[self.feasible] = True
        allowed = fit[steps.source] & fit[steps.target] & (self._communicates | ~steps.is_collective)
        found = (np.flatnonzero(allowed & each) for each in (~steps.partial, steps.partial))
        whole, partial = ((steps.source[at], steps.target[at], price[at]) for at in found)
        return whole, partial

    def _low_seconds(self, steps: ReshardGraph) -> Costs:
        """Returns [steps], the seconds in fewer bits; infinite where a step is sent in full."""
        seconds = np.full(steps.low.size, np.inf)
        for position, low in enumerate(self._arrays.low_steps):
            here = np.flatnonzero(steps.low == position)
            n = self._elements / steps.others[here]
            every = [each for name in self.formats for each in low.seconds(n, self._itemsize, name)]
            seconds[here] = np.minimum.reduce(every)
        return seconds

    def _spared_copies(self, steps: ReshardGraph) -> Costs:
        """Returns [steps], seconds of the copies of a bucket that a step by itself is spared."""
        before, after = self.shares[steps.source], self.shares[steps.target]
        copied = before + after - steps.inner * np.maximum(before, after)
        return np.asarray(2 * self._sent * np.maximum(copied, 0) / self.space.mesh.topology.memory_bandwidth)

    @cached_property
    def domain(self) -> "LayoutDomain":
        """All layouts that divide the shape."""
        return LayoutDomain(self, self.feasible, self.feasible)

    @cached_property
    def in_mesh_order(self) -> NDArray[np.bool_]:
        """[layouts], whether the axes of every dim are in mesh order."""
        return self._arrays.ordered(self.space.mesh.names)

    @cached_property
    def least_bytes(self) -> float:
        """Bytes on one device in the most sharded layout."""
        return float(self.bytes * self.shares.min())

    @cached_property
    def shares(self) -> Costs:
        """[layouts], part of the tensor's bytes on one device."""
        return np.asarray(1 / self._arrays.shards.prod(axis=1))

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Returns layouts by placement codes, axes of one dim in ``order``; one past the last where there is none."""
        if order not in self._ids:
            ids = np.full((self.rank + 1 + len(REDUCTIONS),) * len(order), len(self.codes))
            here = self.feasible[self._arrays.ordered(order)[self.feasible]]
            ids[tuple(self.codes[here].T)] = here
            self._ids[order] = ids
        return self._ids[order]


_KNOWN_COSTS, _KNOWN_AXES = 1 << 11, 2  # costs that are remembered, and mesh axes of the largest


def known_costs(mesh: Mesh, *of: Any) -> ReshardCosts:
    """Returns ``ReshardCosts(mesh, *of)``; those on one or two axes are remembered for other programs in this process.

    Variants of a step, and a step before and after an edit, have most tensors in common.
    """
    few = sum(size > 1 for size in mesh.sizes) <= _KNOWN_AXES
    return _remembered_costs(mesh, *of) if few else ReshardCosts(mesh, *of)


@lru_cache(_KNOWN_COSTS)
def _remembered_costs(mesh: Mesh, *of: Any) -> ReshardCosts:
    return ReshardCosts(mesh, *of)


@dataclass(frozen=True, eq=False)
class _StepGraph:
    """Steps as arrays sorted by target, then source; at most one between two layouts."""

    source: Ids
    target: Ids
    price: Costs

    @classmethod
    def of(cls, source: Ids, target: Ids, price: Costs, place: Ids) -> "_StepGraph":
        """Returns the steps between layouts that have a place, renumbered by it; of parallel steps, the cheapest."""
        source, target = place[source], place[target]
        here = (source >= 0) & (target >= 0)
        source, target, price = source[here], target[here], price[here]
        order = np.lexsort((price, source, target))
        source, target, price = source[order], target[order], price[order]
        first = np.append(True, (np.diff(source) != 0) | (np.diff(target) != 0))[: source.size]
        return cls(source[first], target[first], price[first])

    def cheapest(self, costs: Costs) -> Costs:
        """Returns costs [layouts, rows] after any number of steps."""
        from meshdsl.planner.costs.kernels import bellman_ford

        best = costs.copy()
        bellman_ford(self.source, self.target, self.price, best)
        return best


def placement_codes(placements: Iterable[Placement], rank: int) -> Ids:
    """Returns the codes of several placements of one tensor."""
    return np.array([placement_code(placed, rank) for placed in placements], dtype=np.intp)


# ---- Domains ---------------------------------------------------------------------------------------------------------


_NUMBERS = count()  # of domains


class LayoutDomain:
    """The layouts of a value that a search considers, and reshard costs between them.

    Layouts are given by their index in ``layouts``. One more index, the last row and column of ``costs``, stands for
    all other layouts, at infinite cost.

    Args:
      reshard: costs between all layouts.
      layouts: numbers of the layouts of this domain.
      through: numbers of the layouts that reshard paths may pass.

    Attributes:
      number: identifies the domain in memo keys.
    """

    def __init__(self, reshard: ReshardCosts, layouts: Ids, through: Ids) -> None:
        self.reshard, self.layouts, self.through, self.number = reshard, layouts, through, next(_NUMBERS)
        self._ids: dict[tuple[str, ...], Ids] = {}
        self._beyond: dict[Surcharge, Costs] = {}

    @property
    def costs(self) -> Costs:
        """[layouts + 1, layouts + 1], cost of the cheapest reshard."""
        return self._both[1]

    @property
    def transit_costs(self) -> Costs:
        """The same of reshards that make nothing partial, from whose end others may go on."""
        return self._both[0]

    @cached_property
    def _both(self) -> tuple[Costs, Costs]:
        inner, whole = self.reshard.all_pairs(self.layouts, self.through, self.layouts)
        return _with_others(inner), _with_others(whole)

    def beyond(self, what: Surcharge) -> Costs:
        """Returns [layouts + 1, layouts + 1], what a reshard costs at least beyond ``costs`` (``ReshardCosts``)."""
        if what not in self._beyond:
            self._beyond[what] = _with_others(self.reshard.beyond(what, self.layouts, self.through, self.layouts))
        return self._beyond[what]

    @cached_property
    def indices(self) -> Ids:
        """All layouts of the domain."""
        return np.arange(self.layouts.size)

    @cached_property
    def codes(self) -> Ids:
        """[layouts, mesh axes], placement codes."""
        return self.reshard.codes[self.layouts]

    @cached_property
    def partial(self) -> NDArray[np.bool_]:
        """[layouts], whether each is partial."""
        return np.asarray((self.codes > self.reshard.rank).any(axis=1))

    @cached_property
    def zeros(self) -> Costs:
        """[layouts], zero costs."""
        return np.zeros(self.layouts.size)

    def between(self, sources: Ids, targets: Ids, inner: bool = False) -> Costs:
        """Returns reshard costs [sources, targets]; ``inner``, of those from whose end others may go on."""
        return np.asarray((self.transit_costs if inner else self.costs)[sources[:, None], targets])

    @cached_property
    def local_bytes(self) -> Costs:
        """[layouts + 1], bytes on one device."""
        return np.append(self.reshard.bytes * self.reshard.shares[self.layouts], np.inf)

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Returns layouts by placement codes, axes of one dim in ``order``, major first."""
        if order not in self._ids:
            self._ids[order] = self.place_of[self.reshard.ids(order)]
        return self._ids[order]

    @cached_property
    def place_of(self) -> Ids:
        """[all layouts + 1], the index of each in this domain; that of all others for the rest."""
        places = np.full(len(self.reshard.codes) + 1, self.layouts.size)
        places[self.layouts] = self.indices
        return places


def _with_others(costs: Costs) -> Costs:
    """Returns the costs with a row and a column for all other layouts."""
    return np.pad(costs, ((0, 1), (0, 1)), constant_values=np.inf)


# ---- Neighbourhoods of a plan ----------------------------------------------------------------------------------------
# On three mesh axes or more, a search moves from plan to plan. A neighbour differs on some axes, changed in groups.


Groups = tuple[Axes, ...]  # axes of one group take the same row


def neighbourhood(states: Ids, groups: Groups, around: Ids) -> NDArray[np.bool_]:
    """Returns the mask of the states near ``around`` and itself: one row per group, all else unchanged."""
    free = [axis for axes in groups for axis in axes]
    fixed = [axis for axis in range(len(around)) if axis not in free]
    near = (states[:, fixed] == around[fixed]).all(axis=1)
    for axes in groups:
        near &= (states[:, axes] == states[:, axes[:1]]).all(axis=1)
    found: NDArray[np.bool_] = near | (states == around).all(axis=1)
    return found


def neighbour_layouts(reshard: ReshardCosts, used: Ids, groups: Groups) -> Ids:
    """Returns the layouts ``used``, and those in mesh order with one placement or B per group, no new one elsewhere."""
    codes, free = reshard.codes, [axis for axes in groups for axis in axes]
    inside = reshard.in_mesh_order.copy()
    for axes in groups:
        placed = codes[:, axes]
        common = np.where(placed == reshard.rank, -1, placed).max(axis=1, keepdims=True)
        inside &= ((placed == reshard.rank) | (placed == common)).all(axis=1)
    for axis in set(range(codes.shape[1])) - set(free):
        inside &= np.isin(codes[:, axis], [*codes[used, axis], reshard.rank])
    inside[used] = True
    return reshard.feasible[inside[reshard.feasible]]


def singleton_groups(axes: Axes) -> Groups:
    """Returns a group per mesh axis."""
    return tuple((axis,) for axis in axes)


def axis_groups_in_pairs(axes: Axes) -> Iterator[Groups]:
    """Yields groupings in which two mesh axes change, each by itself, and the others stay."""
    return map(singleton_groups, combinations(axes, 2))


def axis_groups_split(axes: Axes) -> Iterator[Groups]:
    """Yields groupings of all mesh axes in two runs of neighbours."""
    return ((axes[:i], axes[i:]) for i in range(1, len(axes)))


def axis_groups_in_two(axes: Axes) -> Iterator[Groups]:
    """Yields groupings as on two mesh axes: two of the axes, then all axes in two runs."""
    return chain(axis_groups_in_pairs(axes), axis_groups_split(axes))


def axis_groups_merged(axes: Axes) -> Iterator[Groups]:
    """Yields groupings as on fewer mesh axes: all axes in one group, then in two runs of neighbours."""
    if len(axes) > 1:
        yield (axes,)
    if len(axes) > 2:
        yield from axis_groups_split(axes)


def axis_groups_of_plan(axes: Axes, rows: Ids) -> Groups:
    """Returns the two runs of axes that take the same row in most operations of a plan, ``rows[node, axis]``."""

    def equal_rows(groups: Groups) -> int:
        return int(np.logical_and.reduce([(rows[:, some] == rows[:, some[:1]]).all(axis=1) for some in groups]).sum())

    return max(axis_groups_split(axes), key=equal_rows)


# ---- Making domains --------------------------------------------------------------------------------------------------


class LayoutDomains:
    """Makes the domains of a model: of all layouts, of those near a plan, or of a plan's own."""

    def __init__(self) -> None:
        self._of_plans: dict[tuple[ReshardCosts, bytes], LayoutDomain] = {}

    def full(self, reshards: Iterable[ReshardCosts], few: bool) -> dict[ReshardCosts, LayoutDomain]:
        """Returns domains of all layouts; memoised if they are ``few``, as on two mesh axes."""
        return {d: d.domain if few else LayoutDomain(d, d.feasible, d.feasible) for d in reshards}

    def neighbourhood(self, read: Mapping[ReshardCosts, Ids], groups: Groups) -> dict[ReshardCosts, LayoutDomain]:
        """Returns domains of layouts that are used, with reshard paths through their neighbours."""
        return {d: self._make(d, layouts, groups) for d, layouts in read.items()}

    def of_plan(self, read: Iterable[tuple[ReshardCosts, Ids]]) -> dict[ReshardCosts, LayoutDomain]:
        """Returns domains of the layouts of a plan; plans with the same layouts share them."""
        found = {}
        for d, layouts in read:
            key = d, layouts.tobytes()
            if key not in self._of_plans:
                self._of_plans[key] = self._make(d, layouts, ())
            found[d] = self._of_plans[key]
        return found

    def release(self) -> None:
        """Releases the domains of plans."""
        self._of_plans.clear()

    def _make(self, reshard: ReshardCosts, layouts: Ids, groups: Groups) -> LayoutDomain:
        return LayoutDomain(reshard, layouts, neighbour_layouts(reshard, layouts, groups))
