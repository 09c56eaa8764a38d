"""Formats of fewer bits in which collectives may send floats, what each loses, and what a step in one costs.

A value is cut into the parts that travel; of a part, every ``BLOCK`` numbers share a scale in float32 (Dettmers,
"8-Bit Approximations for Parallelism", 2016). Rounding and restoring are passes over memory, and three more operations
are started. Numbers are added up in float32, so a reduce-scatter is an all-to-all of rounded parts and a local sum:
bits are lost where a number is sent, never where it is added.

    from -> to          kind                 parts, of k devices   a device sends, of n elements
    S(i) -> B           all-gather           its block             n (k-1)/k
    P -> S(j)           all-to-all           k of its value        n (k-1)/k       then a local sum
    S(i) -> S(j)        all-to-all           k of its block        n/k (k-1)/k
    order of S(i)       collective-permute   its block             n/k

n is as in ``layouts.reshard``. All-reduces, maxima and minima, and exchanges inside operations, are sent in full.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from numbers import Real
from typing import Any, NamedTuple

from meshdsl.errors import ArgumentError, is_a, nearest
from meshdsl.layouts.collective_cost import copied_price, link_price
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import P, Partial, Placement

BLOCK = 128  # numbers that share a scale
SCALE = 4  # bytes of a scale
STARTS = 3  # operations that rounding and restoring start: the largest numbers, the rounded ones, the restored ones
FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}  # what may be sent in fewer bits, with bytes


class Format(NamedTuple):
    """A format in which numbers are sent.

    Args:
      bytes: of a number.
      largest: number of a block, to which its scale takes the largest one; 0 without scales.
      error: the root mean square of what rounding normal numbers loses, relative to theirs, rounded up.
    """

    bytes: int
    largest: float
    error: float

    def sent(self, elements: Any) -> Any:
        """Returns the bytes of a part of so many elements, an int or an array."""
        return elements * self.bytes + (-(-elements // BLOCK) * SCALE if self.largest else 0)


FORMATS = {  # of as many bytes, the one that loses less comes first
    "bfloat16": Format(2, 0.0, 0.0017),
    "int8": Format(1, 127.0, 0.0065),
    "float8_e4m3fn": Format(1, 448.0, 0.026),
}


@dataclass(frozen=True)
class LowBits:
    """How much collectives may round what they send, and in which formats.

    Args:
      error: the budget, a relative root mean square: a format may be used if it loses no more of normal numbers.
      formats: names in ``FORMATS``; default is all.

    Raises:
      ArgumentError: the budget is no number, or no format meets it, which lists what each loses; or there is no such
        format.

    Example:
      >>> md.LowBits(0.03, formats="float8_e4m3fn")
      LowBits(error=0.03, formats=('float8_e4m3fn',))
    """

    error: float
    formats: str | Iterable[str] = tuple(FORMATS)

    def __post_init__(self) -> None:
        """Check the budget and the names, which are a tuple afterwards."""
        if not isinstance(self.formats, str | Iterable):
            raise ArgumentError(f"low_bits: formats {is_a(self.formats)}, not names such as 'int8'")
        names = (self.formats,) if isinstance(self.formats, str) else tuple(self.formats)
        if not names:
            raise ArgumentError(f"low_bits: formats is empty; known: {', '.join(FORMATS)}")
        for name in names:
            if name not in FORMATS:
                raise ArgumentError(f"low_bits: no format {name!r}{nearest(name, FORMATS)}")
        object.__setattr__(self, "formats", names)
        if not isinstance(self.error, Real) or isinstance(self.error, bool) or not 0 < self.error <= 1:
            raise ArgumentError(
                f"low_bits: {is_a(self.error)}, not an error budget above 0, and at most 1, such as 0.01"
            )
        object.__setattr__(self, "error", float(self.error))
        if not self.within:
            losses = ", ".join(f"{name} {FORMATS[name].error:.2%}" for name in names)
            raise ArgumentError(
                f"low_bits={self.error:g}: no format rounds so little: of normal numbers, {losses} of their root mean "
                "square are lost; allow more, or leave low_bits out to send in full"
            )

    @staticmethod
    def of(given: "LowBits | float | str") -> "LowBits":
        """Returns the budget that a number, or a text such as ``0.01`` or ``0.03:float8_e4m3fn``, states."""
        if isinstance(given, LowBits):
            return given
        if not isinstance(given, str):
            return LowBits(given)
        error, colon, names = given.partition(":")
        try:
            budget = float(error)
        except ValueError:
            raise ArgumentError(f"low_bits: {given!r} is not an error budget such as '0.01'") from None
        return LowBits(budget, tuple(names.split(",")) if colon else tuple(FORMATS))

    def __str__(self) -> str:
        names = "" if self.formats == tuple(FORMATS) else f":{','.join(self.formats)}"
        return f"{self.error:g}{names}"

    @property
    def within(self) -> tuple[str, ...]:
        """The formats that lose no more than the budget, in the order of ``FORMATS``."""
        return tuple(name for name, each in FORMATS.items() if name in self.formats and each.error <= self.error)

    def allowed(self, dtype: str) -> tuple[str, ...]:
        """Returns the formats in which values of a dtype may be sent: fewer bytes, within the budget."""
        return tuple(name for name in self.within if FORMATS[name].bytes < FLOATS.get(dtype, 0))


class Rounding(NamedTuple):
    """What decides in which bits a tensor is sent: its elements, their bytes, and the formats that are allowed."""

    elements: int
    itemsize: float
    formats: tuple[str, ...]


class LowStep(NamedTuple):
    """A reshard step in fewer bits; ``n`` are the elements that one device would hold without its axes.

    Args:
      kind: the collective that runs.
      parts: how many ``n`` are cut into; each has scales of its own.
      messages: parts that one device sends.
      before, received, after: parts in its block before, that arrive, and in its block after.
      lines: fixed seconds, and seconds per byte of all parts; the cheapest counts.
      copied: seconds per byte of ``n`` in full, of putting blocks together.
      memory: seconds per byte of memory traffic.
      starts: seconds that starting the operations takes.
    """

    kind: str
    parts: int
    messages: int
    before: int
    received: int
    after: int
    lines: tuple[tuple[float, float], ...]
    copied: float
    memory: float
    starts: float

    def bytes_sent(self, n: int, name: str) -> int:
        """Returns the bytes that one device sends in a format."""
        return self.messages * int(FORMATS[name].sent(n // self.parts))

    def seconds(self, n: Any, itemsize: float, name: str) -> list[Any]:
        """Returns the seconds in a format by every protocol, of which the least count; ``n`` may be an array."""
        part, passes = n / self.parts, 2 if FORMATS[name].largest else 1
        sent = FORMATS[name].sent(part)
        moved = part * itemsize * (passes * self.before + self.after) + sent * (self.before + self.received)
        more = self.starts + moved * self.memory + n * itemsize * self.copied
        return [fixed + per_byte * self.parts * sent + more for fixed, per_byte in self.lines]


@cache
def low_step(kind: str, axes: tuple[str, ...], source: Placement, target: Placement, mesh: Mesh) -> LowStep | None:
    """Returns how a reshard step is made in fewer bits; None if it is sent in full."""
    k = prod(mesh.axis(name) for name in axes)
    counts = {  # parts, messages, and parts before, received and after
        "all-gather": (k, k - 1, 1, k, k),
        "reduce-scatter": (k, k - 1, k, k, 1),
        "all-to-all": (k * k, k - 1, k, k, k),
        "collective-permute": (k, 1, 1, 1, 1),
    }.get(kind)
    if counts is None or k == 1 or (kind == "all-to-all" and isinstance(source, Partial)):
        return None
    # an all-to-all of maxima sends whole values in k parts, too
    sent_as, placed = ("all-to-all", P("max")) if kind == "reduce-scatter" else (kind, source)
    lines, copied = link_price(sent_as, axes, placed, mesh).lines, copied_price(kind, axes, (source, target), mesh)
    topology = mesh.topology
    return LowStep(sent_as, *counts, lines, copied, 1 / topology.memory_bandwidth, STARTS * topology.overhead)
