"""Topology: the links that mesh axes run over, and the speeds of one device.

A topology lists its links innermost (fastest) first, each with the number of devices that it joins. The last mesh axis
takes the fastest link until that link's devices are used up, and so on outwards; an axis that crosses a boundary is
priced at the slower link. If it has several devices on the near side of the boundary, they share the bandwidth that
each has beyond it (``Link.shared``). On a torus, each axis runs along a dim of its own while there are any
(``Link.torus``).

    dgx-h100: NVLink joins 8, InfiniBand the rest      data=4,model=8: model over NVLink, data over InfiniBand

Presets are TOML files in ``topologies/``, with the source of every figure; ``save_topology`` writes the same format.
"""

import json
import tomllib
from collections.abc import Collection, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from importlib import resources
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

from meshdsl.errors import ArgumentError, LayoutError, MeshDSLError, faults, is_a, nearest
from meshdsl.util.files import read_regular
from meshdsl.util.html import tables_html
from meshdsl.util.text import bytes_text, seconds_text

HOST = ("host_memory", "host_load", "host_store")  # fields on the memory of the host
FUSIONS = ("chains", "kernels")  # models of what a compiler fuses
EIGHT_BITS = ("flops8", "ops8")  # rates of products whose operands have 8 bits
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")  # of collectives

# ---- Links and topologies --------------------------------------------------------------------------------------------


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
        """Check the costs."""
        check_costs("a link", self, ("bandwidth", "ring"), ("latency", "devices", "shared"))
        if self.short and not (len(self.short) == 2 and all(_is_cost(n) and n for n in self.short)):
            raise ArgumentError(f"short={self.short!r} is not a latency and bandwidth above 0, such as [2e-5, 1e10]")
        if not (isinstance(self.torus, tuple) and all(isinstance(n, int) and n > 0 for n in self.torus)):
            raise ArgumentError(f"torus={self.torus!r} is not a list of lengths, such as [16, 16]")
        if self.torus and prod(self.torus) != self.devices:
            raise ArgumentError(f"a torus of {list(self.torus)} joins {prod(self.torus)} devices, not {self.devices}")

    @property
    def gathering(self) -> float:
        """Bytes per second of gathers and reductions over this link."""
        return self.shared or self.bandwidth

    @property
    def for_short(self) -> "Link":
        """The link with its protocol for short messages."""
        return (
            replace(self, latency=self.short[0], bandwidth=self.short[1], shared=0.0, short=()) if self.short else self
        )

    def along(self, size: int, dims: int) -> "tuple[Link, int]":
        """Returns the link of an axis of ``size`` devices if ``dims`` torus dims are taken, and the dims it takes.

        An axis that is longer than a dim takes several; the bandwidths of those that it fills add up. Axes that find
        no free dim share the last one, as lines.
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
      flops16, flops32: matrix FLOP/s per device for operands of at most 16 bits, and of more.
      flops8, ops8: of products of two float8 operands, and of two int8 ones; 0 where the device is no faster at them
        than at 16 bits, as where it widens them.
      memory_bandwidth: bytes per second between a device and its memory.
      memory: bytes of memory per device.
      overhead: seconds that starting one unfused operation costs.
      half_side: rows, columns or summed elements at which a matrix product reaches half its rate
        (n_1/2; Hockney and Jesshope 1981): a product of ``m x k`` by ``k x n`` takes ``(1 + half_side / m)``
        times as long as its FLOPs say, and so on for n and k.
      fusion: how operations are fused, which decides what they read and write: "chains" or "kernels", as XLA does for
        GPUs (``meshdsl.planner.costs.fusion``).
      grouped: FLOP/s per device of convolutions in groups, depthwise ones among them; 0 for as fast as others.
      pieces: into how many pieces the system that runs the step cuts a collective of a matrix product's operand or
        result, to send it during the product (Wang et al. 2023; NeMo's ``tp_comm_overlap``). It
        counts in ``plan.simulated_seconds`` alone. Our programs send whole: 1.
      asynchronous: kinds of collectives that the compiler of our programs runs beside independent computation; by
        default all. Of any other kind, nothing is hidden in ``plan.simulated_seconds``.
      ragged: whether the compiler of our programs has an all-to-all whose lengths are data
        (``jax.lax.ragged_all_to_all``); if not, ``md.ragged_exchange`` is rounds of all-to-alls with equal slots.
      beside_products: whether collectives run beside matrix products and convolutions alone, and wait while a device
        computes anything else. It counts in ``plan.simulated_seconds`` alone.
      merges: the compiler of our programs makes one product of two that read the same operand if one of them reads and
        writes so many bytes at most on a device; 0 if it never does. It counts in ``plan.simulated_seconds`` alone.
      across_loops: whether the system that runs the step sends beside other iterations of a loop, and stacks slice by
        slice, as systems do that prefetch parameters and reduce gradients in buckets. Our programs do not.
      contention: by which part of its time computation takes longer while a collective runs beside it, since both use
        the device's processors and memory; 0.2 for a fifth longer. It counts in ``plan.simulated_seconds`` alone.
      host_memory: bytes of the host's memory per device; 0 where there is none to keep arrays in, or none is known.
      host_load, host_store: bytes per second from the host's memory to a device, and back.
      backend: XLA's, which compiles for the devices and decides what memory holds: ``tpu`` keeps less than others,
        ``cpu`` fills stacks of loops early (``meshdsl.planner.liveness.aliasing``); others are not told apart.
      links: innermost first. ``axes`` overrides them for axes that were measured one by one.

    Example:
      >>> import dataclasses
      >>> mine = dataclasses.replace(md.topology("dgx-h100"), name="half", memory=4e10)
      >>> md.Mesh(data=8, topology=mine).topology.memory
      40000000000.0
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
    fusion: str = "chains"
    grouped: float = 0.0
    pieces: int = 1
    asynchronous: tuple[str, ...] = KINDS
    ragged: bool = False
    across_loops: bool = False
    contention: float = 0.0
    backend: str = ""
    source: str = ""
    host_memory: float = 0.0
    host_load: float = 0.0
    host_store: float = 0.0
    flops8: float = 0.0
    ops8: float = 0.0
    merges: float = 0.0
    beside_products: bool = False

    def __post_init__(self) -> None:
        """Check the costs."""
        above = ("flops16", "flops32", "memory_bandwidth", "memory")
        from_zero = ("overhead", "half_side", "grouped", "merges", "contention", *HOST, *EIGHT_BITS)
        check_costs(f"topology {self.name}", self, above, from_zero)
        if any(getattr(self, name) for name in HOST) and not all(getattr(self, name) for name in HOST):
            missing = ", ".join(name for name in HOST if not getattr(self, name))
            raise ArgumentError(f"topology {self.name}: {missing} is 0; host memory needs {', '.join(HOST)}")
        if self.fusion not in FUSIONS:
            known = " nor ".join(map(repr, FUSIONS))
            raise ArgumentError(
                f"topology {self.name}: fusion={self.fusion!r} is neither {known}{nearest(str(self.fusion), FUSIONS)}"
            )
        if not isinstance(self.pieces, int) or self.pieces < 1:
            raise ArgumentError(
                f"topology {self.name}: pieces={self.pieces!r} is not a number of pieces; 1 sends whole"
            )
        for name in ("ragged", "across_loops", "beside_products"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"topology {self.name}: {name}={getattr(self, name)!r} is neither true nor false")
        if self.across_loops and len(self.asynchronous) < len(KINDS):
            raise ArgumentError(
                f"topology {self.name}: across_loops needs all kinds asynchronous, which is the default"
            )
        unknown = [kind for kind in self.asynchronous if kind not in KINDS]
        if unknown or not isinstance(self.asynchronous, tuple):
            kind = unknown[0] if unknown else self.asynchronous
            raise ArgumentError(
                f"topology {self.name}: asynchronous has {kind!r}, no kind of collective{nearest(kind, KINDS)}"
            )
        if not self.links:
            raise ArgumentError(f"topology {self.name} has no links; give at least one, the innermost first")

    def _repr_html_(self) -> str:
        """Speeds of a device and of the links, for notebooks."""
        device = [
            ("products of 16 bits", f"{self.flops16 / 1e12:.4g} TFLOP/s"),
            ("products of 32 bits", f"{self.flops32 / 1e12:.4g} TFLOP/s"),
            ("memory", f"{bytes_text(self.memory)} at {bytes_text(self.memory_bandwidth)}/s"),
            ("start of an operation", seconds_text(self.overhead)),
        ]
        if self.flops8:
            device.insert(0, ("products of float8", f"{self.flops8 / 1e12:.4g} TFLOP/s"))
        if self.host_memory:
            device.append(("memory of the host", f"{bytes_text(self.host_memory)} at {bytes_text(self.host_load)}/s"))
        levels = [("x".join(map(str, link.torus)) or str(link.devices or "any"), link) for link in self.links]
        rows = [
            (joined, f"{bytes_text(link.bandwidth)}/s", seconds_text(link.latency))
            for joined, link in [*levels, *((f"axis {name}", link) for name, link in self.axes)]
        ]
        links = [("devices joined", "a device sends", "latency"), *rows]
        title = f"topology {self.name}" + (f": {self.source}" if self.source else "")
        return tables_html(title, [[("device", ""), *device], links])

    def flops(self, rate: str, grouped: bool = False) -> float:
        """Returns FLOP/s of matrix products at a rate, as ``rate_of`` names it, or of grouped convolutions."""
        if grouped and self.grouped:
            return self.grouped
        return float(getattr(self, rate)) or self.flops16

    def axis_links(self, axes: Iterable[tuple[str, int]]) -> dict[str, Link]:
        """Returns the link that each mesh axis runs over, for ``(name, size)`` pairs outermost first."""
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
        """Returns the shared bandwidth beyond the links that already join some devices of an axis; 0 if none do."""
        inner = [n for n in self.links[: self.links.index(link)] if n.devices >= 2 * within]
        return min(inner[-1].bandwidth, link.bandwidth * (inner[-1].devices // within)) if inner else 0.0

    def check_shape(self, axes: Iterable[tuple[str, int]]) -> None:
        """Raise LayoutError, in one line, if a mesh of these axes, outermost first, does not fit the links."""
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
    """Returns whether neighbouring groups of so many devices share a link with only a part of each."""
    return bool(link.devices % inside and inside % link.devices)


def _fitting(name: str, n: int, inside: int, link: Link) -> str:
    """Returns the text of the nearest sizes of an axis whose groups fill whole links; one device always does."""
    within = inside // n
    fitting = [size for size in range(1, n + link.devices + 1) if not _straddles(size * within, link)]
    below, above = [size for size in fitting if size < n], [size for size in fitting if size > n]
    return "nearest sizes that work: " + ", ".join(f"{name}={size}" for size in (*below[-1:], *above[:1]))


def rate_of(dtypes: Collection[str], itemsize: float) -> str:
    """Returns the field of ``Topology`` that is the rate of a product of these operands.

    Args:
      dtypes: of the operands.
      itemsize: bytes per element of the widest one.

    Example:
      >>> rate_of(["float8_e5m2", "float8_e4m3fn"], 1), rate_of(["float8_e4m3fn", "bfloat16"], 2)
      ('flops8', 'flops16')
    """
    for rate, eight in (("flops8", {"float8_e4m3fn", "float8_e5m2"}), ("ops8", {"int8", "uint8"})):
        if dtypes and eight.issuperset(dtypes):
            return rate
    return "flops16" if itemsize <= 2 else "flops32"


def topology(name: str) -> Topology:
    """Returns a preset.

    Args:
      name: such as ``"dgx-h100"``; ``meshdsl topology list`` lists all.

    Raises:
      MeshDSLError: with the nearest name if there is none.

    Example:
      >>> md.topology("tpu-v5e").memory
      16000000000.0
    """
    known = preset_names()
    if name not in known:
        raise MeshDSLError(f"no topology {name!r}{nearest(name, known)}")
    return _preset(name)


def check_costs(what: str, costs: object, above: Iterable[str], from_zero: Iterable[str]) -> None:
    """Raise ArgumentError unless these fields are finite numbers, above 0 or from 0 on."""
    rows = [
        f"{name}={n!r} is not a number above 0" for name in above if not _is_cost(n := getattr(costs, name)) or n == 0
    ]
    rows += [f"{name}={n!r} is not a number >= 0" for name in from_zero if not _is_cost(n := getattr(costs, name))]
    if rows:
        raise ArgumentError(faults(f"the costs of {what} have to be finite numbers:", rows))


def _is_cost(n: object) -> bool:
    return isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < float("inf")


def no_host_memory(topology: Topology) -> str:
    """Returns the text of an error: a topology states no host memory, and how to state it."""
    known = ", ".join(name for name in preset_names() if _preset(name).host_memory)
    stated = ", ".join(f"{name}=..." for name in HOST)
    remedy = f"dataclasses.replace(topology, {stated}) states it"
    return f"topology {topology.name} states no host memory; presets that do are {known}, and {remedy}"


def without_host_of_preset(topology: Topology) -> Topology:
    """Returns a preset without what it says of the host's memory; any other topology as it is.

    Plans that keep nothing there are written so, and are the same whatever the preset says of it later.
    """
    is_preset = topology.name in preset_names() and topology == _preset(topology.name)
    return replace(topology, host_memory=0.0, host_load=0.0, host_store=0.0) if is_preset else topology


def with_host_of_preset(topology: Topology) -> Topology:
    """Returns a preset whole that was written by ``without_host_of_preset``; any other topology as it is."""
    preset = _preset(topology.name) if topology.name in preset_names() else topology
    return preset if topology == without_host_of_preset(preset) else topology


@cache
def _preset(name: str) -> Topology:
    file = resources.files("meshdsl.layouts") / "topologies" / f"{name}.toml"
    return read_topology(tomllib.loads(file.read_text()))


def preset_names() -> tuple[str, ...]:
    """Returns the names of the presets that ship with meshdsl."""
    folder = resources.files("meshdsl.layouts") / "topologies"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def read_topology(data: dict[str, Any]) -> Topology:
    """Returns a topology from the tables of a file; raises ArgumentError listing missing and unknown names."""
    links, axes = data.get("links", []), data.get("axes", {})
    tables = {f"links[{i}]": link for i, link in enumerate(links if isinstance(links, list) else [links])}
    tables |= {f"axes.{name}": link for name, link in (axes.items() if isinstance(axes, dict) else [("", axes)])}
    rows = [f"{where}: {row}" for where, link in tables.items() for row in _misnamed(Link, link)]
    rows = [*_misnamed(Topology, {k: v for k, v in data.items() if k != "sources"}), *rows]
    if rows:
        raise ArgumentError("\n".join(f"  {row}" for row in rows))
    rest = {k: v for k, v in data.items() if k not in ("links", "axes", "sources")}
    by_axis = tuple((name, _link(link)) for name, link in axes.items())
    rest |= {"asynchronous": tuple(rest["asynchronous"])} if isinstance(rest.get("asynchronous"), list) else {}
    return Topology(links=tuple(map(_link, links)), axes=by_axis, **rest)


def _link(table: dict[str, Any]) -> Link:
    values: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in table.items()}
    return Link(**values)


def _misnamed(kind: type[Link | Topology], table: object) -> list[str]:
    """Returns the unknown names of a table, and the missing ones."""
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if not isinstance(table, dict):
        return [f"{is_a(table)}, not a table of {', '.join(known)}"]
    missing = [name for name, needed in known.items() if needed and name not in table]
    rows = [f"{name}: no such name{nearest(name, known)}" for name in table if name not in known]
    return [*rows, f"{', '.join(missing)}: missing"] if missing else rows


# ---- Files -----------------------------------------------------------------------------------------------------------
# The TOML of the presets, so that a measured topology can be saved, read and edited.

MOST_BYTES = 1_000_000  # of a file


def save_topology(topology: Topology, file: str | Path) -> None:
    """Write ``topology`` to ``file``, for ``load_topology`` and for people."""
    Path(file).write_text(topology_text(topology))


def load_topology(file: str | Path) -> Topology:
    """Returns the topology in ``file``; raises MeshDSLError if it cannot be read."""
    try:
        return read_topology(tomllib.loads(read_regular(file, MOST_BYTES).decode()))
    except OSError as error:
        raise MeshDSLError(f"cannot read the topology {str(file)!r}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise MeshDSLError(f"{str(file)!r} is not a topology: {error}") from error
    except ArgumentError as error:
        raise MeshDSLError(f"{str(file)!r} is not a topology:\n{error}") from error


def topology_text(topology: Topology) -> str:
    """Returns the TOML of ``topology``; reading it back gives an equal value."""
    plain = [name for name in written_fields(topology) if name not in ("links", "axes")]
    lines = [f"{name} = {_toml(getattr(topology, name))}" for name in plain]
    for link in topology.links:
        lines += ["", "[[links]]", *_link_from_file(link)]
    for name, link in topology.axes:
        lines += ["", f"[axes.{json.dumps(name)}]", *_link_from_file(link)]
    return "\n".join(lines) + "\n"


def written_fields(topology: Topology) -> list[str]:
    """Returns the names of the fields that files have: those that earlier files lack only where they say something."""
    later = {
        "fusion": FUSIONS[0],
        "asynchronous": KINDS,
        "ragged": False,
        "merges": 0.0,
        "beside_products": False,
        "across_loops": False,
        "contention": 0.0,
        **dict.fromkeys((*HOST, *EIGHT_BITS), 0.0),
    }
    return [f.name for f in fields(Topology) if f.name not in later or getattr(topology, f.name) != later[f.name]]


def _link_from_file(link: Link) -> list[str]:
    hidden = {name for name in ("shared", "short") if not getattr(link, name)}
    hidden |= {"torus", "ring"} if not link.torus else set()
    known = [f.name for f in fields(Link) if f.name not in hidden]
    return [f"{name} = {_toml(getattr(link, name))}" for name in known]


def _toml(value: str | float | tuple[float | str, ...]) -> str:
    plain = list(value) if isinstance(value, tuple) else value
    return repr(plain) if isinstance(plain, float) else json.dumps(plain)
