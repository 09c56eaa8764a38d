"""What moves take: the bytes that one device sends, and seconds.

Seconds are ``latency + bytes / bandwidth``, or what a link takes for short messages if that is less. A collective
over axes of different speed is priced by its hierarchical form, in which the slow axis carries only what the fast one
has left over; with equal speeds that is the flat form. Local moves cost memory traffic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import P, Placement, Split
from meshdsl.layouts.topology import Link

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
LOCAL = ("slice", "pad", "keep-first")


@dataclass(frozen=True)
class Price:
    """What bytes cost: ``sent`` for each, and the least of ``lines``, each of fixed seconds and seconds per byte."""

    sent: float
    lines: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Of so many bytes."""
        return min(fixed + per_byte * size for fixed, per_byte in self.lines)

    def times(self, factor: float, more: float = 0.0) -> "Price":
        """By bytes of which there are so many for each of these, and with more seconds for each."""
        return Price(self.sent * factor, tuple((fixed, each * factor + more) for fixed, each in self.lines))


def rate(kind: str, axes: tuple[str, ...], source: Placement, target: Placement, mesh: Mesh) -> Price:
    """The price of a move, by the bytes that one device would hold without ``axes``."""
    return _price(kind, axes, source, mesh).times(1.0, _copied(kind, axes, (source, target), mesh))


def price(kind: str, axes: tuple[str, ...], mesh: Mesh) -> Price:
    """The price of a collective, by the bytes of the block that one device gives it."""
    reduces = kind in ("all-reduce", "reduce-scatter")
    given = 1 if reduces else prod(mesh.axis(name) for name in axes)
    return _price(kind, axes, P if reduces else Split(0), mesh).times(given)


@cache
def _price(kind: str, axes: tuple[str, ...], source: Placement, mesh: Mesh) -> Price:
    """By the bytes ``n``."""
    k = prod(mesh.axis(name) for name in axes)
    if kind in LOCAL:
        written = 1 / k if kind == "slice" else 1.0
        return Price(0.0, ((0.0, written / mesh.topology.memory_bandwidth),))
    links = mesh.topology.axis_links(mesh)
    used = [(links[name], mesh.axis(name)) for name in axes]
    ways = [used, [(link.for_short, size) for link, size in used]]
    share = 1 / k if kind == "collective-permute" else _share(kind, source, k) * (k - 1) / k
    return Price(share, tuple(dict.fromkeys(_line(kind, source, k, way) for way in ways)))


def _line(kind: str, source: Placement, k: int, used: Sequence[tuple[Link, int]]) -> tuple[float, float]:
    """Seconds and seconds per byte over these links."""
    latency = max(link.latency for link, _ in used)
    if kind == "collective-permute":
        return latency, 1 / k / min(link.bandwidth for link, _ in used)
    apart = kind == "all-to-all"  # every pair of devices exchanges something else
    speeds = [(link.bandwidth if apart else link.gathering, size) for link, size in used]
    return latency, _share(kind, source, k) * _hierarchical(sorted(speeds, reverse=not apart))


@cache
def _copied(kind: str, axes: tuple[str, ...], ends: tuple[Placement, Placement], mesh: Mesh) -> float:
    """Seconds per byte of ``n`` for copies: blocks of a dim that is not the first are not contiguous."""
    if kind not in ("all-gather", "reduce-scatter", "all-to-all"):
        return 0.0
    k = prod(mesh.axis(name) for name in axes) if kind == "all-to-all" and isinstance(ends[0], Split) else 1
    inner = sum(isinstance(end, Split) and end.dim != 0 for end in ends)
    return 2 * inner / k / mesh.topology.memory_bandwidth


def _share(kind: str, source: Placement, k: int) -> float:
    if kind == "all-reduce":
        return 2.0
    return 1 / k if kind == "all-to-all" and isinstance(source, Split) else 1.0


def _hierarchical(steps: Sequence[tuple[float, int]]) -> float:
    """Seconds per byte over the links in order; each next one carries what the last left to exchange.

    Gathers and reductions run the fast link first, so the slow one carries a fraction; in an
    all-to-all most of the data has to cross the slow link whatever the order.
    """
    seconds, left = 0.0, 1.0
    for bandwidth, k in steps:
        seconds += left * (k - 1) / k / bandwidth
        left /= k
    return seconds
