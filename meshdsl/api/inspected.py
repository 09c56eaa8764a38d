"""A tensor that a compiled program sends: on which line of the user's program, for how long, and what is wasteful."""

from collections.abc import Mapping
from dataclasses import dataclass
from linecache import getline

from meshdsl.ir.graph import Source
from meshdsl.lowering.hlo.collectives import CompiledCollective, SentTensor
from meshdsl.lowering.hlo.schedule import ScheduledCollective
from meshdsl.plan.reasons import SourceNames

_WIDE = 60  # characters of a source line


@dataclass(frozen=True)
class InspectedCollective:
    """A tensor that a compiled program sends by a collective.

    Args:
      kind: of the collective, as plans name it.
      axes: mesh axes that it runs over; empty if its groups of devices are no axes.
      group: devices in a group.
      bytes: bytes that one device sends per iteration.
      trips: iterations per step; those of a loop whose number depends on data count once.
      estimated: whether ``trips`` is such a guess.
      seconds: predicted seconds per iteration under the topology of the mesh; a combined collective's are divided
        among its tensors by their bytes.
      covered: seconds of these that are hidden behind products, in the schedule of a compiler that states one (of TPUs
        and GPUs); 0 if the collective is synchronous.
      phase: forward or backward, by jax's name stack; empty for what is neither.
      place: line of the user's program.
      source: its name, ``file.py:12``.
      text: what it reads.
      tensor: type of one device's result, ``float32[8,64]``.
      note: what is wasteful about it; empty if nothing is known to be.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    bytes: int
    trips: int
    estimated: bool
    seconds: float
    covered: float
    phase: str
    place: Source
    source: str
    text: str
    tensor: str
    note: str = ""

    @property
    def over(self) -> str:
        """The axes, or the size of the groups."""
        return ",".join(self.axes) if self.axes else f"groups of {self.group}"


def inspected_collective(
    found: ScheduledCollective,
    tensor: SentTensor,
    scope: str,
    source: Source,
    names: SourceNames,
    split: Mapping[tuple[int, ...], set[str]],
) -> InspectedCollective:
    """One tensor of a collective, on its line.

    Args:
      found: the collective. tensor: of those that it sends.
      scope: the name stack of the tensor.
      source: its line. names: of lines.
      split: the axes over which arguments lie split, by their whole shapes.
    """
    c = found.sent
    share = float(tensor.bytes / c.bytes) if c.bytes else 0.0
    return InspectedCollective(
        kind=c.kind,
        axes=c.axes or (),
        group=c.group,
        bytes=round(tensor.bytes),
        trips=c.trips,
        estimated=not c.known,
        seconds=found.seconds * share,
        covered=found.covered * share,
        phase="backward" if "transpose(" in scope else "forward" if "jvp(" in scope else "",
        place=source,
        source=names.of(source),
        text=getline(source.file, source.line).strip() if source.file else "",
        tensor=f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]",
        note=_waste(c, bool(split.get(tensor.dims, set()) & set(c.axes or ())), scope),
    )


def _waste(c: CompiledCollective, is_argument: bool, scope: str) -> str:
    """What a reader should know of a collective at once.

    Args:
      is_argument: whether the tensor is as large as a whole argument that lies split over an axis of the collective.
    """
    if c.kind == "all-gather" and is_argument:
        return f"gathers a whole argument{f', {c.trips} times' if c.trips > 1 else ''}"
    if c.kind == "all-reduce" and c.trips > 1 and "transpose(" in scope:
        return f"reduces in every one of {c.trips} iterations"
    if c.kind == "all-reduce" and is_argument:
        return "all-reduces what lies split: a reduce-scatter would do"
    return ""


def shortened_line(text: str) -> str:
    """A source line, cut to the width of a column."""
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
