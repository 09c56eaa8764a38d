"""Exchange: a collective inside a local program, among the devices that split a dim.

Some operations run on blocks of a dim only if the devices exchange a little: a running sum needs
the sums of the blocks before its own, a convolution the edges of its neighbours. Their rows say
what is exchanged, as data that prices, documents and lists it:

    pattern   what a device has afterwards                                     one device sends
    gather    the same ``length`` elements of dim (or the array) of everybody  (k-1) such pieces
              (not whole blocks: to move those to ``B`` first costs no more)
    window    its block with ``before`` elements in front and ``after`` behind,
              filled up where the dim ends                                     the pieces others lack
    cycle     the same, the last block being followed by the first             the pieces others lack
    mirror    the whole block of the device at the mirrored place              its block
    sort      its share of all blocks' elements in order                       its block, in every round
    deal      its share of the elements in another order                       what others get of it

k is the number of devices on the axes whose rows list the exchange; blocks are numbered over
their product, so several axes that split one dim exchange together. ``after`` may be negative:
a block moved by ``shift`` is ``before=shift, after=-shift``. A window becomes one
collective-permute for every block it reaches into, each over the axes on which sender and
receiver differ. These are whole rings: what passes the ends is replaced by the filling. Pieces
that two operations want of one tensor are sent once. Sorting takes rounds, in each of which a block
is merged with one of its two neighbours, and keeps one half.

Windows over several dims, each split by axes of its own, are exchanged in turn, in the order of
the dims: what is sent along the second dim is the block as the first has widened it, so that the
elements at the corners arrive in two steps.

    cumsum of S(0)          gather   1 element of dim 0 of the result
    convolution, 3 wide     window   before=1 after=1
    the same of n by m      window   before=1 after=1 of m elements, then the same of n + 2
    roll by half            cycle    before=n/2 after=-n/2, one whole block
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

# ---- Deal ------------------------------------------------------------------------------------------------------------
# Elements of a split dim dealt out anew: in which rounds devices send each other what they lack.
#
# Elements that stay next to each other travel together, as units. In every round each device sends one unit and gets
# one, so the rounds are the colours of a bipartite graph's edges, from those who have units to those who lack them, and
# as many as the busiest device has (König 1916).


Edge = tuple[int, int]  # who has a unit, who lacks it


@dataclass(frozen=True)
class Round:
    """One permutation.

    Args:
      target: per device, the one it sends to.
      start: per device, the first element of its block that it sends.
    """

    target: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Permutation:
    """How a split dim is dealt out.

    Args:
      unit: elements that a device sends in a round.
      places: by device and element of its new block, the place among its old block and what the rounds brought.
    """

    unit: int
    rounds: tuple[Round, ...]
    places: NDArray[np.intp]


@lru_cache(maxsize=256)
def permute_elements(which: tuple[int, ...], extent: int, blocks: int) -> Permutation:
    """The rounds after which element i is what element ``which[i]`` was.

    Args:
      extent: elements of a block.
      blocks: how many there are; they divide the result too.
    """
    length = len(which) // blocks
    unit = _unit(which, gcd(extent, length))
    owner, first = np.divmod(np.array(which[::unit]).reshape(blocks, -1), extent)
    lacked = np.argwhere(owner != np.arange(blocks)[:, None])
    colours = np.array(_coloured([(int(owner[b, i]), int(b)) for b, i in lacked], blocks), dtype=np.intp)
    sent = [[(int(owner[b, i]), int(b), int(first[b, i])) for b, i in lacked[colours == c]] for c in set(colours)]
    first[tuple(lacked.T)] = extent + colours * unit
    places = (first[..., None] + np.arange(unit)).reshape(blocks, length)
    return Permutation(unit, tuple(_round(each, blocks) for each in sent), places)


def _unit(which: Sequence[int], most: int) -> int:
    """The largest number of elements, a divisor of ``most``, that stay next to each other throughout."""

    def together(n: int) -> bool:
        rows = np.array(which).reshape(-1, n)
        return bool((rows[:, 0] % n == 0).all() and (rows == rows[:, :1] + np.arange(n)).all())

    return next(n for n in range(most, 0, -1) if most % n == 0 and together(n))


def _round(edges: Sequence[tuple[int, int, int]], blocks: int) -> Round:
    """A permutation with these edges (from, to, first element); who has nothing to send sends anything."""
    target, start = dict[int, int](), [0] * blocks
    for a, b, first in edges:
        target[a], start[a] = b, first
    idle, left = [a for a in range(blocks) if a not in target], set(range(blocks)) - set(target.values())
    stay = [a for a in idle if a in left]
    target.update((a, a) for a in stay)
    rest = zip((a for a in idle if a not in left), sorted(left - set(stay)), strict=True)
    target.update(rest)
    return Round(tuple(target[a] for a in range(blocks)), tuple(start))


def _coloured(edges: Sequence[Edge], blocks: int) -> list[int]:
    """A colour per edge, as few as there can be, so that no two at one end are alike."""
    used: tuple[list[dict[int, int]], ...] = tuple([{} for _ in range(blocks)] for _ in range(2))
    found = [0] * len(edges)

    def paint(e: int, colour: int) -> None:
        found[e] = colour
        for side in (0, 1):
            used[side][edges[e][side]][colour] = e

    for e, (a, b) in enumerate(edges):
        free, other = _free(used[0][a]), _free(used[1][b])
        path = _path(edges, used, b, (free, other)) if free in used[1][b] else []
        for i in path:
            for side in (0, 1):
                used[side][edges[i][side]].pop(found[i], None)
        for i in path:
            paint(i, other if found[i] == free else free)
        paint(e, free)
    return found


def _free(used: dict[int, int]) -> int:
    return next(colour for colour in range(len(used) + 1) if colour not in used)


def _path(
    edges: Sequence[Edge], used: Sequence[Sequence[dict[int, int]]], end: int, colours: tuple[int, int]
) -> list[int]:
    """The edges of two colours in turn, from one who lacks something on."""
    path, side, at, turn = list[int](), 1, end, 0
    while colours[turn] in used[side][at]:
        path.append(used[side][at][colours[turn]])
        side, turn = 1 - side, 1 - turn
        at = edges[path[-1]][side]
    return path


# ---- Exchange --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What the devices of a split dim exchange; see the table above.

    Args:
      port: the operand or result it speaks of, operands first.
      dim: its split dim; None for an array that is gathered or mirrored as it is.
      length: for gather, how many elements of dim each device gives.
      before: for window and cycle; after: likewise.
      which: for deal, per element of the result, the one it is.
    """

    pattern: str
    port: int
    dim: int | None = None
    length: int = 0
    before: int = 0
    after: int = 0
    which: tuple[int, ...] = ()

    def parts(self, extent: int, sizes: Sequence[int]) -> "tuple[ElementRange, ...] | None":
        """The collectives it is over axes of these sizes, major first, if a block of dim has ``extent`` elements.

        None if the blocks are too small for it.
        """
        return _PARTS[self.pattern](self, extent, sizes)

    def __str__(self) -> str:
        return _TEXTS[self.pattern].format(self)


@dataclass(frozen=True)
class ElementRange:
    """One collective of an exchange.

    Args:
      axes: those it runs over, by position among the exchange's axes.
      distance: for permutes, how many blocks further on the sender is, the last being followed by the first.
      start, stop: the elements of dim that are sent; (0, 0) for the whole block.
      round: for sorts and deals, which of the rounds.
    """

    kind: str
    axes: tuple[int, ...]
    distance: int = 0
    start: int = 0
    stop: int = 0
    round: int = 0


@dataclass(frozen=True)
class ExchangeStep:
    """One of the exchanges that rows of several axes list.

    Args:
      axes: those that run it, by position among the mesh's.
      earlier: what has widened its array along other dims before.
    """

    exchange: Exchange
    axes: tuple[int, ...]
    earlier: "tuple[ExchangeStep, ...]" = ()

    def widened(self, block: Sequence[int]) -> list[int]:
        """The shape of the array it finds, where a device's block has the shape ``block``."""
        found = list(block)
        for dim, more in ((e.dim, e.before + e.after) for e in (turn.exchange for turn in self.earlier)):
            found[dim or 0] += more
        return found


def ordered_exchanges(listed: Sequence[tuple[Exchange, ...]]) -> tuple[ExchangeStep, ...] | None:
    """What rows that list these, one per axis, exchange together, in order; None if they cannot meet."""
    groups: dict[tuple[Exchange, ...], tuple[int, ...]] = {}
    for axis, exchanges in enumerate(listed):
        if exchanges:
            groups[exchanges] = (*groups.get(exchanges, ()), axis)
    if len(groups) > 1 and not _apart(groups):
        return None
    found: tuple[ExchangeStep, ...] = ()
    for exchanges in sorted(groups, key=lambda group: group[0].dim or 0):
        earlier = [tuple(turn for turn in found if turn.exchange.port == e.port) for e in exchanges]
        found += tuple(ExchangeStep(e, groups[exchanges], turns) for e, turns in zip(exchanges, earlier, strict=True))
    return found


def _apart(groups: Iterable[tuple[Exchange, ...]]) -> bool:
    """Whether they are windows over different dims."""
    dims = [dim for group in groups for dim in {e.dim for e in group}]
    return len(dims) == len(set(dims)) and all(e.pattern == "window" for group in groups for e in group)


def pieces(before: int, after: int, extent: int) -> Iterator[tuple[int, int, int]]:
    """The blocks that a window reaches into, in order: (blocks further on, first element, last element + 1)."""
    for distance in range(-before // extent, -((-extent - after) // extent)):
        low, high = max(-before, distance * extent), min(extent + after, (distance + 1) * extent)
        if low < high:
            yield distance, low - distance * extent, high - distance * extent


def steps(distance: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """The axes on which devices ``distance`` apart differ, and how far apart they are on those alone."""
    left = len(sizes)
    while left and distance % sizes[left - 1] == 0:
        distance //= sizes[left - 1]
        left -= 1
    return tuple(range(left)), distance


def _gather(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ElementRange, ...] | None:
    if e.dim is None:
        return (ElementRange("all-gather", tuple(range(len(sizes)))),)
    return (ElementRange("all-gather", tuple(range(len(sizes))), stop=e.length),) if e.length < extent else None


def _window(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ElementRange, ...]:
    blocks = prod(sizes)
    found = []
    for distance, start, stop in pieces(e.before, e.after, extent):
        axes, _ = steps(distance % blocks, sizes)
        if axes:
            some = (start, stop) if stop - start < extent else (0, 0)
            found.append(ElementRange("collective-permute", axes, distance % blocks, *some))
    return tuple(found)


def _mirror(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ElementRange, ...]:
    """Two blocks change places, as they do in a cycle."""
    return (ElementRange("collective-permute", tuple(range(len(sizes))), distance=1 if prod(sizes) == 2 else 0),)


def rounds(blocks: int) -> Iterator[tuple[int, ...]]:
    """Per round of a sort, the neighbour that every block is merged with; itself at the ends of odd rounds.

    So many rounds as there are blocks suffice (odd-even transposition), one for two. As only
    neighbours meet, equal elements keep their order.
    """
    for first in (number % 2 for number in range(blocks if blocks > 2 else blocks - 1)):
        partners = (i - 1 if (i - first) % 2 else i + 1 for i in range(blocks))
        yield tuple(j if 0 <= j < blocks else i for i, j in enumerate(partners))


def _sort(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ElementRange, ...]:
    axes = tuple(range(len(sizes)))
    return tuple(ElementRange("collective-permute", axes, round=i) for i, _ in enumerate(rounds(prod(sizes))))


def _deal(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ElementRange, ...] | None:
    blocks = prod(sizes)
    if len(e.which) % blocks or max(e.which, default=0) >= extent * blocks:  # uneven there or here
        return None
    found, axes = permute_elements(e.which, extent, blocks), tuple(range(len(sizes)))
    return tuple(ElementRange("collective-permute", axes, stop=found.unit, round=i) for i, _ in enumerate(found.rounds))


_PARTS: dict[str, Callable[[Exchange, int, Sequence[int]], tuple[ElementRange, ...] | None]] = {
    "gather": _gather,
    "window": _window,
    "cycle": _window,
    "mirror": _mirror,
    "sort": _sort,
    "deal": _deal,
}
_TEXTS = {
    "gather": "what each block found",
    "window": "{0.before} of dim {0.dim} in front of each block, {0.after} behind it",
    "cycle": "blocks of dim {0.dim} moved by {0.before}",
    "mirror": "blocks in mirrored order",
    "sort": "blocks merged with their neighbours",
    "deal": "elements of dim {0.dim} in another order",
}
