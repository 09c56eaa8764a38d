"""Topology: what a mesh axis costs, and what one device can do.

A topology lists its links innermost (fastest) first, each with the number of devices it
joins. Mesh axes map to links innermost last: the last mesh axis takes the fastest link until
that link's devices are used up; an axis that crosses a boundary is priced at the slower link. Where it has several
devices on the near side of it, they share what each has beyond (see :class:`Link`, ``shared``).
On a torus, each axis runs along a dim of its own while there are any (see :class:`Link`).
Presets are TOML files beside this module, with the source of every figure.
"""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

from meshdsl.errors import ArgumentError, LayoutError, MeshDSLError, faults, is_a, nearest

# ---- Topology --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One level of the network.

    Args:
      latency: seconds that a collective over this link costs whatever its size.
      bandwidth: bytes per second that one device sends over it.
      devices: devices joined by the link (the innermost levels included); 0 is unbounded.
      torus: lengths of the dims, outermost first, of a level that is a torus; empty for a switch. ``bandwidth`` is then
        that of one dim, both ways around (Austin et al., How to Scale Your Model, 2025, TPUs).
      shared: bytes per second of one device's gathers and reductions where devices that are joined already share what
        each has over this link, as rings do that pass through every adapter of a node; 0 is as ``bandwidth``.
      short: latency and bandwidth of another way that is faster for short messages; empty if there is none.
      ring: on a torus, an axis is a ring if this divides its size; any other is a line, with half the bandwidth.
    """

    latency: float
    bandwidth: float
    devices: int = 0
    torus: tuple[int, ...] = ()
    ring: int = 1
    shared: float = 0.0
    short: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no cost."""
        check_costs("a link", self, ("bandwidth", "ring"), ("latency", "devices", "shared"))
        if self.short and not (len(self.short) == 2 and all(_is_cost(n) and n for n in self.short)):
            raise ArgumentError(f"short={self.short!r} is no latency and bandwidth above 0, such as [2e-5, 1e10]")
        if not (isinstance(self.torus, tuple) and all(isinstance(n, int) and n > 0 for n in self.torus)):
            raise ArgumentError(f"torus={self.torus!r} is no list of lengths, such as [16, 16]")
        if self.torus and prod(self.torus) != self.devices:
            raise ArgumentError(f"a torus of {list(self.torus)} joins {prod(self.torus)} devices, not {self.devices}")

    @property
    def gathering(self) -> float:
        """Bytes per second of gathers and reductions."""
        return self.shared or self.bandwidth

    @property
    def for_short(self) -> "Link":
        """The link as it is for short messages."""
        return (
            replace(self, latency=self.short[0], bandwidth=self.short[1], shared=0.0, short=()) if self.short else self
        )

    def along(self, size: int, dims: int) -> "tuple[Link, int]":
        """What an axis of ``size`` devices runs over where ``dims`` dims of the torus are taken, and the dims it takes.

        An axis that is longer than a dim takes more; the bandwidths of those that it fills add up. Axes that find no
        dim share the last one, as lines.
        """
        if not self.torus or size == 1:
            return self, 0
        free = tuple(accumulate(reversed(self.torus[: len(self.torus) - dims]), mul))
        takes = 1 + sum(reach < size for reach in free[:-1]) if free else 0
        filled = sum(reach <= size for reach in free) or 1
        closed = 2 if takes and size % self.ring == 0 else 1
        return replace(self, bandwidth=self.bandwidth * filled * closed / 2), takes


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
      pieces: into how many a collective of a matrix product's operand or result is cut by the system that runs the
        step, so that it is sent while the product is under way (Wang et al. 2023; NeMo's ``tp_comm_overlap``). It
        counts in ``plan.simulated_seconds`` alone. Our programs send whole: 1.
      backend: XLA's, which compiles for the devices: ``tpu`` keeps less in memory than others (see
        ``meshdsl.planner.liveness.aliasing``), which are not told apart.
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
    pieces: int = 1
    backend: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Refuse what are no costs."""
        above = ("flops16", "flops32", "memory_bandwidth", "memory")
        check_costs(f"topology {self.name}", self, above, ("overhead", "half_side", "grouped"))
        if not isinstance(self.pieces, int) or self.pieces < 1:
            raise ArgumentError(f"topology {self.name}: pieces={self.pieces!r} is no number of pieces; 1 sends whole")
        if not self.links:
            raise ArgumentError(f"topology {self.name} has no links; give at least one, the innermost first")

    def flops(self, itemsize: int, grouped: bool = False) -> float:
        """FLOP/s of matrix products for operands of ``itemsize`` bytes, or of convolutions in groups."""
        if grouped and self.grouped:
            return self.grouped
        return self.flops16 if itemsize <= 2 else self.flops32

    def axis_links(self, axes: Iterable[tuple[str, int]]) -> dict[str, Link]:
        """The link that each mesh axis runs over, for ``(name, size)`` pairs outermost first."""
        found: dict[str, Link] = dict(self.axes)
        dims: dict[Link, int] = {}
        inside = 1
        for name, size in reversed(list(axes)):
            within, inside = inside, inside * size
            if name not in found:
                link = self._reaching(inside)
                along, taken = link.along(size, dims.get(link, 0))
                found[name] = replace(along, shared=along.shared or self._shared(link, within))
                dims[link] = dims.get(link, 0) + taken
        return found

    def _shared(self, link: Link, within: int) -> float:
        """What devices of an axis reach together beyond the links that join some of them already."""
        inner = [n for n in self.links[: self.links.index(link)] if n.devices >= 2 * within]
        return min(inner[-1].bandwidth, link.bandwidth * (inner[-1].devices // within)) if inner else 0.0

    def check_shape(self, axes: Iterable[tuple[str, int]]) -> None:
        """LayoutError in one line if a mesh of these axes, outermost first, does not fit the links."""
        sizes = list(axes)
        size, known = prod(n for _, n in sizes), dict(self.axes)
        most = self.links[-1].devices
        if most and size > most:
            raise LayoutError(
                f"a mesh of {size} devices: topology {self.name} joins {most:g}; make the mesh smaller, or state the "
                "network beyond as a last [[links]] without devices"
            )
        for link in self.links:
            inside = 1
            for name, n in reversed(sizes):
                inside *= n
                if name not in known and link.devices and inside < size > link.devices and _straddles(inside, link):
                    raise LayoutError(
                        f"{name}={n}: groups of {inside} devices do not divide the {link.devices:g} that a link of "
                        f"topology {self.name} joins, nor hold several of them whole; {_fitting(name, n, inside, link)}"
                    )

    def _reaching(self, devices: int) -> Link:
        return next((link for link in self.links if not link.devices or link.devices >= devices), self.links[-1])


def _straddles(inside: int, link: Link) -> bool:
    """Whether neighbouring groups of so many devices lie partly behind the same link."""
    return bool(link.devices % inside and inside % link.devices)


def _fitting(name: str, n: int, inside: int, link: Link) -> str:
    """The nearest sizes of an axis whose groups lie behind whole links; one device always does."""
    within = inside // n
    fitting = [size for size in range(1, n + link.devices + 1) if not _straddles(size * within, link)]
    below, above = [size for size in fitting if size < n], [size for size in fitting if size > n]
    return "nearest sizes that work: " + ", ".join(f"{name}={size}" for size in (*below[-1:], *above[:1]))


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
    by_axis = tuple((name, _link(link)) for name, link in axes.items())
    return Topology(links=tuple(map(_link, links)), axes=by_axis, **rest)


def _link(table: dict[str, Any]) -> Link:
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in table.items()}
    return Link(**values)


def _misnamed(kind: type[Link | Topology], table: object) -> list[str]:
    """What a table has that is no field, and what it lacks."""
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if not isinstance(table, dict):
        return [f"{is_a(table)}, not a table of {', '.join(known)}"]
    missing = [name for name, needed in known.items() if needed and name not in table]
    rows = [f"{name}: no such name{nearest(name, known)}" for name in table if name not in known]
    return [*rows, f"{', '.join(missing)}: missing"] if missing else rows


# ---- Topology file ---------------------------------------------------------------------------------------------------
# Topologies as files: the TOML of the presets, so that a measured one can be kept, read and edited.


def save_topology(topology: Topology, file: str | Path) -> None:
    """Write ``topology`` to ``file``, as ``load_topology`` and a person read it."""
    Path(file).write_text(topology_text(topology))


def load_topology(file: str | Path) -> Topology:
    """The topology in ``file``; MeshDSLError if there is none that can be read."""
    try:
        return read_topology(tomllib.loads(Path(file).read_text()))
    except OSError as error:
        raise MeshDSLError(f"cannot read the topology {str(file)!r}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise MeshDSLError(f"{str(file)!r} is no topology: {error}") from error
    except ArgumentError as error:
        raise MeshDSLError(f"{str(file)!r} is no topology:\n{error}") from error


def topology_text(topology: Topology) -> str:
    """The TOML of ``topology``; reading it back gives an equal value."""
    plain = [f.name for f in fields(Topology) if f.name not in ("links", "axes")]
    lines = [f"{name} = {_toml(getattr(topology, name))}" for name in plain]
    for link in topology.links:
        lines += ["", "[[links]]", *_link_from_file(link)]
    for name, link in topology.axes:
        lines += ["", f"[axes.{json.dumps(name)}]", *_link_from_file(link)]
    return "\n".join(lines) + "\n"


def _link_from_file(link: Link) -> list[str]:
    hidden = {name for name in ("shared", "short") if not getattr(link, name)}
    hidden |= {"torus", "ring"} if not link.torus else set()
    known = [f.name for f in fields(Link) if f.name not in hidden]
    return [f"{name} = {_toml(getattr(link, name))}" for name in known]


def _toml(value: str | float | tuple[int, ...]) -> str:
    return (
        repr(list(value)) if isinstance(value, tuple) else json.dumps(value) if isinstance(value, str) else repr(value)
    )
