"""Elements of a split dim dealt out anew: in which rounds devices send each other what they lack.

Elements that stay next to each other travel together, as units. In every round each device sends one unit and gets
one, so the rounds are the colours of a bipartite graph's edges, from those who have units to those who lack them, and
as many as the busiest device has (König 1916).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
from numpy.typing import NDArray

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
class Deal:
    """How a split dim is dealt out.

    Args:
      unit: elements that a device sends in a round.
      places: by device and element of its new block, the place among its old block and what the rounds brought.
    """

    unit: int
    rounds: tuple[Round, ...]
    places: NDArray[np.intp]


@lru_cache(maxsize=256)
def deal(which: tuple[int, ...], extent: int, blocks: int) -> Deal:
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
    return Deal(unit, tuple(_round(each, blocks) for each in sent), places)


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
