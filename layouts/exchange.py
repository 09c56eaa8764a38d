"""Exchanges: collectives inside the local program of an operation, among the devices that split a dim.

Some operations run on blocks of a dim only if the devices exchange a little: a running sum needs the totals of the
blocks before its own, a convolution the edges of its neighbours. Rows of their rules state the exchange as data, which
prices, documents and lists it:

    pattern   what a device has afterwards                                     one device sends
    gather    the same ``length`` elements of dim (or the array) of everybody  (k-1) such pieces
              (not whole blocks: to move those to ``B`` first costs no more)
    window    its block with ``before`` elements in front and ``after`` behind,
              filled up where the dim ends                                     the pieces others lack
    cycle     the same, the last block being followed by the first             the pieces others lack
    mirror    the whole block of the device at the mirrored place              its block
    sort      its share of all blocks' elements in order                       its block, in every round
    deal      its share of the elements in another order                       what others get of it
    ragged    the rows that others have for it, as many as the data says       its rows for others
    rounds    the same, in all-to-alls of equal slots for every pair           its slots for others
    all-gather, all-reduce, ...: the collective itself, as the user's program states it

k is the number of devices on the axes whose rows list the exchange; blocks are numbered over their product, so several
axes that split one dim exchange together. ``after`` may be negative: a block moved by ``shift`` is ``before=shift,
after=-shift``. A window becomes one collective-permute for every block it reaches into, each over the axes on which
sender and receiver differ. These are whole rings: what passes the ends is replaced by the filling. Pieces that two
operations need of one tensor are sent once. Sorting takes rounds, in each of which a block is merged with one of its
two neighbours, and keeps one half.

Windows over several dims, each split by axes of its own, are exchanged one after the other, in the order of the dims:
what is sent along the second dim is the block as the first has widened it, so that the elements at the corners arrive
in two steps.

    cumsum of S(0)          gather   1 element of dim 0 of the result
    convolution, 3 wide     window   before=1 after=1
    the same of n by m      window   before=1 after=1 of m elements, then the same of n + 2
    roll by half            cycle    before=n/2 after=-n/2, one whole block
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from meshdsl.layouts.collective_cost import COLLECTIVES

# ---- Exchanges as data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """What the devices of a split dim exchange; see the table above.

    It is saved with plans: its field names and patterns are names of the plan file.

    Args:
      port: the operand or result that is exchanged, operands first.
      dim: its split dim; None for an array that is gathered or mirrored as it is.
      length: for gather, how many elements of dim each device gives.
      before: for window and cycle, elements in front of the block.
      after: for window and cycle, elements behind it.
      which: for deal, per element of the result, the element that it is.
      group: for a collective of the user that runs in groups of devices, how many are in a group; else 0.
    """

    pattern: str
    port: int
    dim: int | None = None
    length: int = 0
    before: int = 0
    after: int = 0
    which: tuple[int, ...] = ()
    group: int = 0

    def parts(self, extent: int, sizes: Sequence[int]) -> "tuple[ExchangeCollective, ...] | None":
        """Returns the collectives of the exchange over axes of these sizes, major first.

        None if blocks of ``extent`` elements of dim are too small for it.
        """
        return _PARTS[self.pattern](self, extent, sizes)

    def __str__(self) -> str:
        if self.group:
            return f"{_TEXTS[self.pattern]}, in groups of {self.group}"
        around = self.pattern == "cycle" and self.before + self.after
        return f"{_TEXTS['window'].format(self)}, cyclically" if around else _TEXTS[self.pattern].format(self)


@dataclass(frozen=True)
class ExchangeCollective:
    """One collective of an exchange.

    Args:
      kind: kind of the collective.
      axes: those it runs over, by position among the exchange's axes.
      distance: for permutes, how many blocks further on the sender is, the last being followed by the first.
      start: the first element of dim that is sent; 0 with ``stop`` 0 for the whole block.
      stop: one past the last element that is sent.
      round: for sort and deal, which of the rounds.
      group: devices in each of its groups; 0 for one group of all.
    """

    kind: str
    axes: tuple[int, ...]
    distance: int = 0
    start: int = 0
    stop: int = 0
    round: int = 0
    group: int = 0


@dataclass(frozen=True)
class ExchangeStep:
    """One of the exchanges that rows of several axes list.

    Args:
      axes: those that run it, by position among the mesh's.
      earlier: exchanges that have widened its array along other dims before.
    """

    exchange: Exchange
    axes: tuple[int, ...]
    earlier: "tuple[ExchangeStep, ...]" = ()

    def widened(self, block: Sequence[int]) -> list[int]:
        """Returns the shape of the array that is exchanged, where a device's block has the shape ``block``."""
        found = list(block)
        for e in (step.exchange for step in self.earlier):
            found[e.dim or 0] += e.before + e.after
        return found


def ordered_exchanges(listed: Sequence[tuple[Exchange, ...]]) -> tuple[ExchangeStep, ...] | None:
    """Returns what rows that list these exchanges, one per axis, run together, in order; None if they conflict.

    Axes whose rows list the same exchanges run them together. Different ones have to be windows over different dims.
    """
    groups: dict[tuple[Exchange, ...], tuple[int, ...]] = {}
    for axis, exchanges in enumerate(listed):
        if exchanges:
            groups[exchanges] = (*groups.get(exchanges, ()), axis)
    if len(groups) > 1 and not _are_separate_windows(groups):
        return None
    found: tuple[ExchangeStep, ...] = ()
    for exchanges in sorted(groups, key=lambda group: group[0].dim or 0):
        earlier = [tuple(step for step in found if step.exchange.port == e.port) for e in exchanges]
        found += tuple(ExchangeStep(e, groups[exchanges], steps) for e, steps in zip(exchanges, earlier, strict=True))
    return found


def _are_separate_windows(groups: Iterable[tuple[Exchange, ...]]) -> bool:
    dims = [dim for group in groups for dim in {e.dim for e in group}]
    return len(dims) == len(set(dims)) and all(e.pattern in ("window", "cycle") for group in groups for e in group)


# ---- Collectives of each pattern -------------------------------------------------------------------------------------


def window_pieces(before: int, after: int, extent: int) -> Iterator[tuple[int, int, int]]:
    """Yields the blocks that a window reaches into, in order: (blocks further on, first element, last element + 1)."""
    for distance in range(-before // extent, -((-extent - after) // extent)):
        low, high = max(-before, distance * extent), min(extent + after, (distance + 1) * extent)
        if low < high:
            yield distance, low - distance * extent, high - distance * extent


def moving_axes(distance: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns the axes on which devices ``distance`` apart differ, and how far apart they are on those alone."""
    count = len(sizes)
    while count and distance % sizes[count - 1] == 0:
        distance //= sizes[count - 1]
        count -= 1
    return tuple(range(count)), distance


def sort_rounds(blocks: int) -> Iterator[tuple[int, ...]]:
    """Yields, per round of a sort, the neighbour that every block is merged with; itself at the ends of odd rounds.

    As many rounds as there are blocks suffice (odd-even transposition sort), one for two. Since only neighbours meet,
    equal elements keep their order.
    """
    for first in (number % 2 for number in range(blocks if blocks > 2 else blocks - 1)):
        partners = (i - 1 if (i - first) % 2 else i + 1 for i in range(blocks))
        yield tuple(j if 0 <= j < blocks else i for i, j in enumerate(partners))


def _gather(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...] | None:
    axes = tuple(range(len(sizes)))
    if e.dim is None:
        return (ExchangeCollective("all-gather", axes),)
    return (ExchangeCollective("all-gather", axes, stop=e.length),) if e.length < extent else None


def _window(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...]:
    blocks = prod(sizes)
    found = []
    for distance, start, stop in window_pieces(e.before, e.after, extent):
        axes, _ = moving_axes(distance % blocks, sizes)
        if axes:
            elements = (start, stop) if stop - start < extent else (0, 0)
            found.append(ExchangeCollective("collective-permute", axes, distance % blocks, *elements))
    return tuple(dict.fromkeys(found))  # what lies at both ends is fetched once


def _mirror(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...]:
    """Two blocks change places, as they do in a cycle."""
    distance = 1 if prod(sizes) == 2 else 0
    return (ExchangeCollective("collective-permute", tuple(range(len(sizes))), distance=distance),)


def _sort(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...]:
    axes, count = tuple(range(len(sizes))), sum(1 for _ in sort_rounds(prod(sizes)))
    return tuple(ExchangeCollective("collective-permute", axes, round=i) for i in range(count))


def _deal(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...] | None:
    """None if the old or the new blocks would be uneven."""
    blocks = prod(sizes)
    if len(e.which) % blocks or max(e.which, default=0) >= extent * blocks:
        return None
    found, axes = permute_elements(e.which, extent, blocks), tuple(range(len(sizes)))
    count = len(found.rounds)
    return tuple(ExchangeCollective("collective-permute", axes, stop=found.unit, round=i) for i in range(count))


def _stated(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...]:
    return (ExchangeCollective(e.pattern, tuple(range(len(sizes))), group=e.group),)


def _all_to_all(e: Exchange, extent: int, sizes: Sequence[int]) -> tuple[ExchangeCollective, ...]:
    return (ExchangeCollective("all-to-all", tuple(range(len(sizes)))),)


_PARTS: dict[str, Callable[[Exchange, int, Sequence[int]], tuple[ExchangeCollective, ...] | None]] = {
    "gather": _gather,
    "window": _window,
    "cycle": _window,
    "mirror": _mirror,
    "sort": _sort,
    "deal": _deal,
    **dict.fromkeys(("ragged", "rounds"), _all_to_all),
    **dict.fromkeys(COLLECTIVES, _stated),
}
_TEXTS = {
    "gather": "what each block found",
    "window": "{0.before} of dim {0.dim} in front of each block, {0.after} behind it",
    "cycle": "blocks of dim {0.dim} moved by {0.before}",
    "mirror": "blocks in mirrored order",
    "sort": "blocks merged with their neighbours",
    "deal": "elements of dim {0.dim} in another order",
    "ragged": "the routed rows alone, counted in balanced routing",
    "rounds": "the routed rows in rounds of equal slots, one in balanced routing",
    **dict.fromkeys(COLLECTIVES, "in the user's shard_map"),
}

# ---- Permutation of a split dim --------------------------------------------------------------------------------------
# Elements that stay next to each other travel together, as units. In every round each device sends and receives one
# unit, so the rounds are the colours of an edge colouring of the bipartite multigraph from owners of units to those who
# lack them, and as many as the busiest device has edges (Koenig 1916; alternating paths as in Kempe chains).

Edge = tuple[int, int]  # the owner of a unit, and the device that lacks it


@dataclass(frozen=True)
class Round:
    """One collective-permute.

    Args:
      target: per device, the one it sends to.
      start: per device, the first element of its block that it sends.
    """

    target: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Permutation:
    """How the elements of a split dim are brought into another order.

    Args:
      unit: elements that a device sends in a round.
      places: by device and element of its new block, its place in the old block followed by what the rounds brought.
    """

    unit: int
    rounds: tuple[Round, ...]
    places: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=256)
def permute_elements(which: tuple[int, ...], extent: int, blocks: int) -> Permutation:
    """Returns the rounds after which element i is what element ``which[i]`` was.

    Args:
      extent: elements of a block.
      blocks: how many blocks there are; they divide the result too.
    """
    length = len(which) // blocks
    unit = _unit(which, gcd(extent, length))
    of_block = [which[b * length : (b + 1) * length : unit] for b in range(blocks)]
    lacking = [(b, i) for b, row in enumerate(of_block) for i, element in enumerate(row) if element // extent != b]
    edges = [(of_block[b][i] // extent, b) for b, i in lacking]
    colours = _edge_colouring(edges, blocks)
    rounds: dict[int, list[tuple[int, int, int]]] = {colour: [] for colour in sorted(set(colours))}
    firsts = [[element % extent for element in row] for row in of_block]
    for (b, i), (owner, _), colour in zip(lacking, edges, colours, strict=True):
        rounds[colour].append((owner, b, firsts[b][i]))
        firsts[b][i] = extent + colour * unit
    places = tuple(tuple(first + j for first in row for j in range(unit)) for row in firsts)
    return Permutation(unit, tuple(_round(sent, blocks) for sent in rounds.values()), places)


def _unit(which: Sequence[int], largest: int) -> int:
    """Returns the largest number of elements, a divisor of ``largest``, that stay next to each other throughout."""

    def stays_together(n: int) -> bool:
        units = (which[i : i + n] for i in range(0, len(which), n))
        return all(unit[0] % n == 0 and all(x == unit[0] + j for j, x in enumerate(unit)) for unit in units)

    return next(n for n in range(largest, 0, -1) if largest % n == 0 and stays_together(n))


def _round(sent: Sequence[tuple[int, int, int]], blocks: int) -> Round:
    """Returns a permutation with these messages (from, to, first element); devices without one send anything."""
    target, start = dict[int, int](), [0] * blocks
    for sender, receiver, first in sent:
        target[sender], start[sender] = receiver, first
    idle, free = [a for a in range(blocks) if a not in target], set(range(blocks)) - set(target.values())
    to_itself = [a for a in idle if a in free]
    target.update((a, a) for a in to_itself)
    target.update(zip((a for a in idle if a not in free), sorted(free - set(to_itself)), strict=True))
    return Round(tuple(target[a] for a in range(blocks)), tuple(start))


def _edge_colouring(edges: Sequence[Edge], blocks: int) -> list[int]:
    """Returns a colour per edge, as few as possible, such that edges with a common end have different colours."""
    used: tuple[list[dict[int, int]], ...] = tuple([{} for _ in range(blocks)] for _ in range(2))
    colours = [0] * len(edges)

    def paint(e: int, colour: int) -> None:
        colours[e] = colour
        for side in (0, 1):
            used[side][edges[e][side]][colour] = e

    def first_free(taken: dict[int, int]) -> int:
        return next(colour for colour in range(len(taken) + 1) if colour not in taken)

    for e, (a, b) in enumerate(edges):
        free, other = first_free(used[0][a]), first_free(used[1][b])
        path = _alternating_path(edges, used, b, (free, other)) if free in used[1][b] else []
        for i in path:
            for side in (0, 1):
                used[side][edges[i][side]].pop(colours[i], None)
        for i in path:
            paint(i, other if colours[i] == free else free)
        paint(e, free)
    return colours


def _alternating_path(
    edges: Sequence[Edge], used: Sequence[Sequence[dict[int, int]]], end: int, colours: tuple[int, int]
) -> list[int]:
    """Returns the edges of the path that alternates between two colours, starting at a device that lacks a unit."""
    path, side, at, which = list[int](), 1, end, 0
    while colours[which] in used[side][at]:
        path.append(used[side][at][colours[which]])
        side, which = 1 - side, 1 - which
        at = edges[path[-1]][side]
    return path
