"""Costs as exact integers, and the price of every reshard of a tensor at once.

Costs are compared lexicographically: first seconds, then the number of collectives and moves.
Both are packed into one integer, ``seconds / unit * TIES + ties``, held exactly in a float64, so
the solver needs one addition and one minimum, infinity is free, and the same problem gives the
same plan on every machine.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.move import COLLECTIVES
from meshdsl.layouts.placement import REDUCTIONS, B, Placement, Split
from meshdsl.layouts.space import Space, makes_partial, space

Costs = NDArray[np.float64]
Ids = NDArray[np.intp]

TIES = 2.0**19
COLLECTIVE_TIE, _MOVE_TIE = 64.0, 1.0
_PRECISION = 2.0**33


@dataclass(frozen=True)
class Scale:
    """The size of one cost unit in seconds."""

    unit: float

    @classmethod
    def of(cls, seconds: float) -> "Scale":
        """A scale that resolves a total of about this many seconds."""
        return cls(max(seconds, 1e-9) / _PRECISION)

    def pack(self, seconds: Costs, ties: "Costs | float" = 0.0) -> Costs:
        """Seconds (and ties) as exact costs."""
        packed: Costs = np.rint(seconds / self.unit) * TIES + ties
        return packed

    def seconds(self, cost: float) -> float:
        """The seconds of a cost, ties left out."""
        return float(cost // TIES) * self.unit


def code(placed: Placement, rank: int) -> int:
    """Number of a placement among those of tensors of ``rank`` dims: S(0).., B, P, P(max), P(min)."""
    if isinstance(placed, Split):
        return int(placed.dim)
    return rank if placed is B else rank + 1 + REDUCTIONS.index(placed.reduction)  # type: ignore[attr-defined]


class Closure:
    """All-pairs reshard costs of tensors of one shape.

    ``costs[i, j]`` is the cost from layout i to layout j of ``space``; the last row and column
    are infinite and stand for layouts that do not exist. ``ids(order)`` numbers the layouts by
    placement codes, one array dim per mesh axis, with axes that share a dim in ``order``.
    """

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], itemsize: int, kinds: tuple[str, ...], scale: Scale) -> None:
        self.mesh, self.shape, self.scale = mesh, shape, scale
        self.bytes = prod(shape) * itemsize
        self.space = space(mesh, len(shape), kinds)
        self._ids: dict[tuple[str, ...], Ids] = {}
        self.number = -1

    @cached_property
    def costs(self) -> Costs:
        """Shortest paths; a value becomes partial only at the end of a path."""
        before, last = self.inner[:-1, :-1], _shortest(_direct(self, True))
        return _with_none(_min_plus(before, last))

    @cached_property
    def inner(self) -> Costs:
        """Shortest paths that make nothing partial: from where they end, moves may go on."""
        return _with_none(_shortest(_direct(self, False)))

    @cached_property
    def fitting(self) -> Ids:
        """The layouts that divide the tensor."""
        return np.array([i for i in range(len(self.space.layouts)) if self.space.fits(i, self.shape)], dtype=np.intp)

    @cached_property
    def placed(self) -> Ids:
        """Placement codes of the fitting layouts, one column per mesh axis."""
        return _codes(self.space)[self.fitting]

    @cached_property
    def partial(self) -> NDArray[np.bool_]:
        """Which of the fitting layouts are partial."""
        return np.asarray((self.placed > len(self.shape)).any(axis=1))

    @cached_property
    def nothing(self) -> Costs:
        """No cost for any fitting layout."""
        return np.zeros(len(self.fitting))

    def between(self, sources: Ids, targets: Ids, inner: bool = False) -> Costs:
        """Reshard costs from each of some layouts to each of others, to stay there or to go on from there."""
        return np.asarray((self.inner if inner else self.costs)[sources[:, None], targets])

    @cached_property
    def local_bytes(self) -> Costs:
        """Bytes that one device holds in each layout."""
        shares = [self.bytes / prod(shards) for shards in self.space.shards]
        return np.array([*shares, np.inf])

    def ids(self, order: tuple[str, ...]) -> Ids:
        """Layout numbers by placement codes, axes of one dim in ``order``, major first."""
        if order not in self._ids:
            self._ids[order] = self._number(order)
        return self._ids[order]

    def _number(self, order: tuple[str, ...]) -> Ids:
        rank = len(self.shape)
        ids = np.full((rank + 1 + len(REDUCTIONS),) * len(self.mesh.names), len(self.space.layouts))
        for i in self.fitting:
            if _in_order(self.space.layouts[i], rank, order):
                ids[tuple(_codes(self.space)[i])] = i
        return ids


@cache
def _codes(within: Space) -> Ids:
    """Placement codes of the layouts of a space, one column per mesh axis."""
    names = within.mesh.names
    return np.array([[code(layout.on(n), within.rank) for n in names] for layout in within.layouts], dtype=np.intp)


def _in_order(layout: Layout, rank: int, order: tuple[str, ...]) -> bool:
    splits = (layout.splitting(dim) for dim in range(rank))
    return all(list(axes) == sorted(axes, key=order.index) for axes in splits)


@dataclass(frozen=True, eq=False)
class _Arcs:
    """The moves of a space as arrays: from, to, the price's parts, ties, and whether they make partial."""

    source: Ids
    target: Ids
    fixed: Costs
    per_byte: Costs
    tie: Costs
    partial: NDArray[np.bool_]


@cache
def _arcs(within: Space) -> _Arcs:
    found = [(i, to, arc) for i, arcs in enumerate(within.arcs) for arc, to in arcs]
    parts = [(i, to, arc.fixed, arc.per_byte, _tie(arc.kind), makes_partial(arc)) for i, to, arc in found]
    columns = zip(*parts, strict=True) if parts else [()] * 6
    kinds = (np.intp, np.intp, np.float64, np.float64, np.float64, np.bool_)
    return _Arcs(*(np.array(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)))  # type: ignore[arg-type]


def _direct(closure: Closure, partial: bool) -> Costs:
    """Cost of single moves between layouts that fit: those that make a value partial, or the others."""
    arcs, size = _arcs(closure.space), len(closure.space.layouts)
    costs = np.full((size, size), np.inf)
    np.fill_diagonal(costs, 0.0)
    fit = np.isin(np.arange(size), closure.fitting)
    usable = (arcs.partial == partial) & fit[arcs.source] & fit[arcs.target]
    price = closure.scale.pack(arcs.fixed + arcs.per_byte * closure.bytes, arcs.tie)
    np.minimum.at(costs, (arcs.source[usable], arcs.target[usable]), price[usable])
    return costs


def _shortest(costs: Costs) -> Costs:
    for via in range(len(costs)):
        np.minimum(costs, costs[:, via, None] + costs[None, via], out=costs)
    return costs


def _with_none(costs: Costs) -> Costs:
    """With a row and a column for layouts that do not exist."""
    return np.pad(costs, ((0, 1), (0, 1)), constant_values=np.inf)


def _tie(kind: str) -> float:
    return COLLECTIVE_TIE if kind in COLLECTIVES else _MOVE_TIE


def _min_plus(a: Costs, b: Costs) -> Costs:
    if len(a) < 80:
        return np.asarray(np.min(a[:, :, None] + b[None], axis=1))
    return np.stack([np.min(row[:, None] + b, axis=0) for row in a])


def codes_of(placements: "list[Placement]", rank: int) -> Ids:
    """Codes of several placements of one tensor."""
    return np.array([code(placed, rank) for placed in placements], dtype=np.intp)
