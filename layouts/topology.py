"""Topology: what a mesh axis costs, and what one device can do.

A topology lists its links innermost (fastest) first, each with the number of devices it
joins. Mesh axes map to links innermost last: the last mesh axis takes the fastest link until
that link's devices are used up; an axis that crosses a boundary is priced at the slower link.
Presets are TOML files beside this module, with the source of every figure.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from math import prod
from typing import Any

from meshdsl.errors import ArgumentError, LayoutError, MeshDSLError, faults, is_a, nearest


@dataclass(frozen=True)
class Link:
    """One level of the network.

    Args:
      latency: seconds that a collective over this link costs whatever its size.
      bandwidth: bytes per second that one device sends over it.
      devices: devices joined by the link (the innermost levels included); 0 is unbounded.
    """

    latency: float
    bandwidth: float
    devices: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no cost."""
        check_costs("a link", self, ("bandwidth",), ("latency", "devices"))


@dataclass(frozen=True)
class Topology:
    """Speeds of one device and of the links between devices.

    Args:
      flops: matrix FLOP/s per device by dtype itemsize class ("16" bits and "32" bits).
      memory_bandwidth: bytes per second between a device and its memory.
      memory: bytes of memory per device.
      overhead: seconds that starting one unfused operation costs.
      half_side: rows, columns or summed elements at which a matrix product reaches half its rate
        (n_1/2; Hockney and Jesshope 1981): a product of ``m x k`` by ``k x n`` takes ``(1 + half_side / m)``
        times as long as its FLOPs say, and so on for n and k.
      grouped: FLOP/s per device of convolutions in groups, depthwise ones among them; 0 for as fast as others.
      links: innermost first. ``axes`` overrides them for axes that were measured one by one.
    """

    name: str
    flops16: float
    flops32: float
    memory_bandwidth: float
    memory: float
    overhead: float
    links: tuple[Link, ...]
    axes: tuple[tuple[str, Link], ...] = ()
    half_side: float = 0.0
    grouped: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse what are no costs."""
        above = ("flops16", "flops32", "memory_bandwidth", "memory")
        check_costs(f"topology {self.name}", self, above, ("overhead", "half_side", "grouped"))
        if not self.links:
            raise ArgumentError(f"topology {self.name} has no links; give at least one, the innermost first")

    def flops(self, itemsize: int, grouped: bool = False) -> float:
        """FLOP/s of matrix products for operands of ``itemsize`` bytes, or of convolutions in groups."""
        if grouped and self.grouped:
            return self.grouped
        return self.flops16 if itemsize <= 2 else self.flops32

    def axis_links(self, axes: Iterable[tuple[str, int]]) -> dict[str, Link]:
        """The link that each mesh axis runs over, for ``(name, size)`` pairs outermost first."""
        found: dict[str, Link] = {}
        inside = 1
        for name, size in reversed(list(axes)):
            inside *= size
            found[name] = self._reaching(inside)
        return {**found, **dict(self.axes)}

    def check_shape(self, axes: Iterable[tuple[str, int]]) -> None:
        """LayoutError in one line if a mesh of these axes, outermost first, does not fit the links."""
        sizes = list(axes)
        size, known = prod(n for _, n in sizes), dict(self.axes)
        most = self.links[-1].devices
        if most and size > most:
            raise LayoutError(f"a mesh of {size} devices: topology {self.name} joins {most:g}")
        for link in self.links:
            inside = 1
            for name, n in reversed(sizes):
                inside *= n
                if name not in known and link.devices and inside < size > link.devices and _straddles(inside, link):
                    raise LayoutError(
                        f"{name}={n}: groups of {inside} devices do not divide the {link.devices:g} that a link of "
                        f"topology {self.name} joins, nor hold several of them whole"
                    )

    def _reaching(self, devices: int) -> Link:
        return next((link for link in self.links if link.devices >= devices), self.links[-1])


def _straddles(inside: int, link: Link) -> bool:
    """Whether neighbouring groups of so many devices lie partly behind the same link."""
    return bool(link.devices % inside and inside % link.devices)


def topology(name: str) -> Topology:
    """The preset of this name; MeshDSLError with the nearest name when there is none."""
    known = preset_names()
    if name not in known:
        raise MeshDSLError(f"no topology {name!r}{nearest(name, known)}")
    return _preset(name)


def check_costs(what: str, costs: object, above: Iterable[str], from_zero: Iterable[str]) -> None:
    """ArgumentError unless these fields are finite numbers, above 0 or from 0 on."""
    rows = [f"{name}={n!r} is no number above 0" for name in above if not _is_cost(n := getattr(costs, name)) or n == 0]
    rows += [f"{name}={n!r} is no number from 0 on" for name in from_zero if not _is_cost(n := getattr(costs, name))]
    if rows:
        raise ArgumentError(faults(f"what {what} costs has to be finite numbers:", rows))


def _is_cost(n: object) -> bool:
    return isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < float("inf")


@cache
def _preset(name: str) -> Topology:
    file = resources.files("meshdsl.layouts") / "topologies" / f"{name}.toml"
    return read_topology(tomllib.loads(file.read_text()))


def preset_names() -> tuple[str, ...]:
    """Names of the presets that ship with meshdsl."""
    folder = resources.files("meshdsl.layouts") / "topologies"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def read_topology(data: dict[str, Any]) -> Topology:
    """A topology from the tables of a file; ArgumentError lists names that are missing, or that are none."""
    links, axes = data.get("links", []), data.get("axes", {})
    tables = {f"links[{i}]": link for i, link in enumerate(links if isinstance(links, list) else [links])}
    tables |= {f"axes.{name}": link for name, link in (axes.items() if isinstance(axes, dict) else [("", axes)])}
    rows = [f"{where}: {row}" for where, link in tables.items() for row in _misnamed(Link, link)]
    rows = [*_misnamed(Topology, {k: v for k, v in data.items() if k != "sources"}), *rows]
    if rows:
        raise ArgumentError("\n".join(f"  {row}" for row in rows))
    rest = {k: v for k, v in data.items() if k not in ("links", "axes", "sources")}
    by_axis = tuple((name, Link(**link)) for name, link in axes.items())
    return Topology(links=tuple(Link(**link) for link in links), axes=by_axis, **rest)


def _misnamed(kind: type[Link | Topology], table: object) -> list[str]:
    """What a table has that is no field, and what it lacks."""
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if not isinstance(table, dict):
        return [f"{is_a(table)}, not a table of {', '.join(known)}"]
    missing = [name for name, needed in known.items() if needed and name not in table]
    rows = [f"{name}: no such name{nearest(name, known)}" for name in table if name not in known]
    return [*rows, f"{', '.join(missing)}: missing"] if missing else rows
