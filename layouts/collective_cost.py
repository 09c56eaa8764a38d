"""Cost of reshard steps and exchanges: the bytes that one device sends, and seconds (the alpha-beta model).

Seconds are ``latency + bytes / bandwidth`` (Hockney 1994), or those of the link's protocol for short messages if that
is less. A collective over axes of different speed is priced in its hierarchical form, in which the slow axis carries
only what the fast one leaves to exchange; with equal speeds that equals the flat form (ring algorithms; Thakur et al.
2005). Local steps cost memory traffic.

    all-gather over k devices, n bytes gathered     latency + n (k-1)/k / bandwidth
    all-reduce of n bytes                           latency + 2 n (k-1)/k / bandwidth
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, prod

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import P, Placement, Split
from meshdsl.layouts.topology import KINDS, Link

COLLECTIVES = KINDS
BUCKETED = ("all-gather", "all-reduce", "reduce-scatter")  # several of one kind can be sent as one
LOCAL = ("slice", "pad", "keep-first")


@dataclass(frozen=True)
class Price:
    """A cost as a function of bytes.

    Args:
      sent: bytes that one device sends per byte.
      lines: pairs of fixed seconds and seconds per byte; the cost is the least of them.
    """

    sent: float
    lines: tuple[tuple[float, float], ...]

    def seconds(self, size: float) -> float:
        """Returns the seconds of ``size`` bytes."""
        return min(fixed + per_byte * size for fixed, per_byte in self.lines)

    def times(self, factor: float, more: float = 0.0) -> "Price":
        """Returns the price of ``factor`` bytes per byte, with ``more`` seconds per byte."""
        return Price(self.sent * factor, tuple((fixed, each * factor + more) for fixed, each in self.lines))


def step_price(kind: str, axes: tuple[str, ...], source: Placement, target: Placement, mesh: Mesh) -> Price:
    """Returns the price of a reshard step, by the bytes that one device would hold without ``axes``."""
    return link_price(kind, axes, source, mesh).times(1.0, copied_price(kind, axes, (source, target), mesh))


def exchange_price(kind: str, axes: tuple[str, ...], mesh: Mesh, group: int = 0) -> Price:
    """Returns the price of a collective, by the bytes of the block that one device contributes.

    Args:
      group: the number of devices in each of the groups that it runs in, over the slowest of the axes; 0 for all.
    """
    reduces = kind in ("all-reduce", "reduce-scatter")
    given = 1 if reduces else group or prod(mesh.axis(name) for name in axes)
    return link_price(kind, axes, P if reduces else Split(0), mesh, group).times(given)


def ring_ways(axis: str, mesh: Mesh) -> int:
    """Returns in how many ways around a ring the links of an axis send at once: 2 where it is a closed torus dim."""
    own = mesh.topology.axis_links(mesh)[axis]
    return 2 if own.bandwidth > _one_way(own, mesh) else 1


def hop_seconds(axis: str, size: float, mesh: Mesh) -> float:
    """Returns the seconds in which all devices of an axis pass ``size`` bytes on to their neighbours one way around.

    A link's price of a permute, except that on a torus that is half of the bandwidth of a dim.
    """
    own = mesh.topology.axis_links(mesh)[axis]
    ways = ((link.latency, min(link.bandwidth, _one_way(own, mesh))) for link in (own, own.for_short))
    return min(latency + size / bandwidth for latency, bandwidth in ways)


def _one_way(own: Link, mesh: Mesh) -> float:
    """Returns the bandwidth of one dim of a torus one way around; infinite for other links."""
    return min((x.bandwidth / 2 for x in mesh.topology.links if x.torus and x.torus == own.torus), default=inf)


@cache
def link_names(mesh: Mesh) -> dict[str, tuple[float, str]]:
    """Returns, per axis, seconds per byte and name of its link; axes that share a switch share a link."""
    own, links = dict(mesh.topology.axes), mesh.topology.axis_links(mesh)
    return {
        name: (1 / link.bandwidth, name if name in own or link.torus else f"{link.bandwidth:g}")
        for name, link in links.items()
    }


def slowest_link(axes: Iterable[str], mesh: Mesh) -> str:
    """Returns the name of the slowest link of those that a collective uses: transfers over it follow each other."""
    return max((link_names(mesh)[axis] for axis in axes), key=lambda link: link[0])[1]


@cache
def link_price(kind: str, axes: tuple[str, ...], source: Placement, mesh: Mesh, group: int = 0) -> Price:
    """Returns the price by the bytes ``n`` of the table in ``reshard``, without copies."""
    k = group or prod(mesh.axis(name) for name in axes)
    if kind in LOCAL:
        written = 1 / k if kind == "slice" else 1.0
        return Price(0.0, ((0.0, written / mesh.topology.memory_bandwidth),))
    links = mesh.topology.axis_links(mesh)
    used = [(links[name], mesh.axis(name)) for name in axes]
    if group:
        used = [(min((link for link, _ in used), key=lambda link: link.bandwidth), group)]
    protocols = [used, [(link.for_short, size) for link, size in used]]
    share = 1 / k if kind == "collective-permute" else _share(kind, source, k) * (k - 1) / k
    return Price(share, tuple(dict.fromkeys(_line(kind, source, k, protocol) for protocol in protocols)))


def _line(kind: str, source: Placement, k: int, used: Sequence[tuple[Link, int]]) -> tuple[float, float]:
    """Returns fixed seconds and seconds per byte over these links."""
    latency = max(link.latency for link, _ in used)
    if kind == "collective-permute":
        return latency, 1 / k / min(link.bandwidth for link, _ in used)
    pairwise = kind == "all-to-all"  # every pair of devices exchanges different data
    speeds = [(link.bandwidth if pairwise else link.gathering, size) for link, size in used]
    return latency, _share(kind, source, k) * _hierarchical(sorted(speeds, reverse=not pairwise))


@cache
def copied_price(kind: str, axes: tuple[str, ...], ends: tuple[Placement, Placement], mesh: Mesh) -> float:
    """Returns seconds per byte of ``n`` for copies: blocks of a dim other than the first are not contiguous."""
    if kind not in ("all-gather", "reduce-scatter", "all-to-all"):
        return 0.0
    k = prod(mesh.axis(name) for name in axes) if kind == "all-to-all" and isinstance(ends[0], Split) else 1
    inner = sum(isinstance(end, Split) and end.dim != 0 for end in ends)
    return 2 * inner / k / mesh.topology.memory_bandwidth


def _share(kind: str, source: Placement, k: int) -> float:
    """Returns the bytes of a full exchange per byte of ``n``; a device sends (k-1)/k of them."""
    if kind == "all-reduce":
        return 2.0
    return 1 / k if kind == "all-to-all" and isinstance(source, Split) else 1.0


def _hierarchical(steps: Sequence[tuple[float, int]]) -> float:
    """Returns seconds per byte over the links in order; each carries what the one before leaves to exchange.

    Gathers and reductions run the fast link first, so the slow one carries a fraction; in an
    all-to-all most of the data has to cross the slow link whatever the order.
    """
    seconds, remaining = 0.0, 1.0
    for bandwidth, k in steps:
        seconds += remaining * (k - 1) / k / bandwidth
        remaining /= k
    return seconds
