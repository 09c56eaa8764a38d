"""A tensor that a compiled program sends: on which line of the user's program, for how long, and what is wasteful."""

from collections.abc import Mapping
from dataclasses import dataclass
from linecache import getline

from meshdsl.ir.graph import Source
from meshdsl.lowering.hlo.collectives import CompiledCollective
from meshdsl.lowering.hlo.dataflow import Dataflow
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
    part: int,
    scope: str,
    source: Source,
    names: SourceNames,
    flow: Dataflow,
    split: Mapping[tuple[int, ...], set[str]],
) -> InspectedCollective:
    """One tensor of a collective, on its line.

    Args:
      found: the collective. part: the number of the tensor among those that it sends.
      scope: the name stack of the tensor.
      source: its line. names: of lines.
      flow: of the program's values.
      split: the axes over which arguments lie split, by their whole shapes.
    """
    tensor = found.sent.tensors[part]
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
        note=_waste(c, part, flow, split, scope),
    )


# ---- Names of waste --------------------------------------------------------------------------------------------------


def _waste(
    c: CompiledCollective, part: int, flow: Dataflow, split: Mapping[tuple[int, ...], set[str]], scope: str
) -> str:
    """What is wasteful about a tensor of a collective, by what it is made of and what becomes of it."""
    dims, axes = c.tensors[part].dims, set(c.axes or ())
    is_split = bool(split.get(dims, set()) & axes)  # as large as a whole argument that lies split over these axes
    if c.kind == "all-gather":
        if flow.is_sliced(c.name, part):
            return "gathered whole, then sliced: involuntary rematerialisation"
        if not flow.is_argument(c.name, part):
            return ""
        if is_split:
            return f"gathers a whole argument{f', {c.trips} times' if c.trips > 1 else ''}"
        of_a_stack = any(shape[1:] == dims and over & axes for shape, over in split.items())
        return "gathers a layer of an argument in each iteration" if c.trips > 1 and of_a_stack else ""
    if c.kind == "all-reduce":
        if c.trips > 1 and flow.is_accumulated(c.name, part):
            return f"reduces in each of {c.trips} iterations; once behind the loop would do"
        if flow.is_sliced(c.name, part) or (is_split and "transpose(" in scope):
            return "all-reduces what lies split: a reduce-scatter would do"
    return ""


def shortened_line(text: str) -> str:
    """A source line, cut to the width of a column."""
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
