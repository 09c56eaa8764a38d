"""The layouts of a space and all moves between them as arrays, made in bulk.

What moves there are, when they are legal and what they cost is said in ``layouts.move``, layout by
layout; here the same table is written for all layouts at once, since a space over four mesh axes
has thousands of layouts and 50,000 moves. The tests compare the two move by move.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, combinations, permutations

import numpy as np
from numpy.typing import NDArray

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.move import into_split
from meshdsl.layouts.placement import REDUCTIONS, B, Placement, Split
from meshdsl.layouts.price import COLLECTIVES, rate
from meshdsl.layouts.space import Space
from meshdsl.planner.exact import COLLECTIVE_TIE, MOVE_TIE, Costs, Ids

Axes = tuple[int, ...]  # mesh axes by number
_Mask = NDArray[np.bool_]


def code(placed: Placement, rank: int) -> int:
    """Number of a placement among those of tensors of ``rank`` dims: S(0).., B, P, P(max), P(min)."""
    if isinstance(placed, Split):
        return int(placed.dim)
    return rank if placed is B else rank + 1 + REDUCTIONS.index(placed.reduction)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Arcs:
    """Moves: from, to, the price's lines, ties, whether they make the value partial, whether they are collectives.

    ``fixed`` and ``per_byte`` have a row per move and a column per line, of which the cheapest counts.
    """

    source: Ids
    target: Ids
    fixed: Costs
    per_byte: Costs
    tie: Costs
    partial: _Mask
    sends: _Mask


class Arrays:
    """A space of layouts as arrays.

    ``codes`` and ``places`` have a row per layout and a column per mesh axis: its placement, and
    its place among the axes that split the same dim, 0 for the major one.
    """

    def __init__(self, within: Space) -> None:
        self.within, self.rank, self.mesh = within, within.rank, within.mesh
        self.codes = np.array([_codes(layout, within) for layout in within.layouts], dtype=np.intp)
        self.places = np.array([_places(layout, within) for layout in within.layouts], dtype=np.intp)
        self.shards = np.array(within.shards, dtype=np.intp).reshape(len(within.layouts), within.rank)
        self._keys = self._key(self.codes, self.places)
        self._by_key = np.argsort(self._keys)

    def ordered(self, order: tuple[str, ...]) -> _Mask:
        """Which layouts have the axes of every dim in ``order``, major first."""
        at, fine = [self.mesh.names.index(name) for name in order], np.ones(len(self.codes), dtype=np.bool_)
        for a, b in combinations(at, 2):
            together = (self.codes[:, a] == self.codes[:, b]) & (self.codes[:, a] < self.rank)
            fine &= ~together | (self.places[:, a] < self.places[:, b])
        return fine

    @cached_property
    def arcs(self) -> Arcs:
        """All moves of the space."""
        columns = zip(*self._all(), strict=True)
        return Arcs(*(np.concatenate(column) for column in columns))

    def _key(self, codes: Ids, places: Ids) -> Ids:
        count = codes.shape[1]
        base = ((self.rank + 1 + len(REDUCTIONS)) * count) ** np.arange(count, dtype=np.intp)
        return np.asarray((codes * count + places) @ base)

    def _all(self) -> Iterator[tuple[NDArray[np.generic], ...]]:
        line = np.zeros((0, 2))
        yield np.zeros(0, np.intp), np.zeros(0, np.intp), line, line, np.zeros(0), *[np.zeros(0, np.bool_)] * 2
        wide = [axis for axis, size in enumerate(self.mesh.sizes) if size > 1]
        for axes in chain.from_iterable(combinations(wide, count) for count in range(1, len(wide) + 1)):
            for source in range(self.rank + 1 + len(self.within.reductions)):
                placed = self.within.placements[source]
                here = self._movable(axes, placed)
                if here.size:
                    for target in self.within.placements:
                        yield from self._moved(axes, placed, target, here)
                    yield from self._swapped(axes, placed, here)

    def _movable(self, axes: Axes, placed: Placement) -> Ids:
        """Layouts in which these axes are placed so and may move together: see ``layouts.move``."""
        number = code(placed, self.rank)
        alike = (self.codes[:, axes] == number).all(axis=1)
        if isinstance(placed, Split):
            minor = (self.codes == number).sum(axis=1) - len(axes)
            alike &= (self.places[:, axes] >= minor[:, None]).all(axis=1)
        return np.flatnonzero(alike)

    def _moved(
        self, axes: Axes, source: Placement, target: Placement, here: Ids
    ) -> Iterator[tuple[NDArray[np.generic], ...]]:
        kind = _kind(source, target)
        if kind:
            number = code(target, self.rank)
            codes, places = self.codes[here].copy(), self.places[here].copy()
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
        whole = here[(self.codes[here] == code(placed, self.rank)).sum(axis=1) == len(axes)]
        for order in permutations(range(len(axes))):
            other = whole[(self.places[whole][:, axes] != order).any(axis=1)]
            places = self.places[other].copy()
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
    return [code(placed.get(name, B), within.rank) for name in within.mesh.names]


def _places(layout: Layout, within: Space) -> list[int]:
    seen: dict[Placement, int] = {}
    places = dict.fromkeys(within.mesh.names, 0)
    for name, placed in layout.placements:
        if isinstance(placed, Split):
            places[name] = seen.get(placed, 0)
            seen[placed] = places[name] + 1
    return list(places.values())


@cache
def arrays(within: Space) -> Arrays:
    """The arrays of a space, made once."""
    return Arrays(within)
