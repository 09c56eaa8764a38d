"""A tensor that a compiled program sends: on which line of the user's program, for how long, and what is wasteful."""

from collections.abc import Collection
from dataclasses import dataclass
from linecache import getline

from meshdsl.api.traced_step import GatheredShapes
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
    gathered: GatheredShapes,
) -> InspectedCollective:
    """One tensor of a collective, on its line.

    Args:
      found: the collective. part: the number of the tensor among those that it sends.
      scope: the name stack of the tensor.
      source: its line. names: of lines.
      flow: of the program's values.
      gathered: shapes of arguments.
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
        note=_waste(c, part, flow, gathered.over(c.axes or ()), scope),
    )


# ---- Names of waste --------------------------------------------------------------------------------------------------


def _waste(c: CompiledCollective, part: int, flow: Dataflow, gathered: Collection[tuple[int, ...]], scope: str) -> str:
    """What is wasteful about a tensor of a collective, by what it is made of and what becomes of it.

    Args:
      gathered: shapes of arguments that lie split over its axes, when they are gathered over them.
    """
    dims = c.tensors[part].dims
    if c.kind == "all-gather":
        if flow.is_sliced(c.name, part):
            return "gathered whole, then sliced: involuntary rematerialisation"
        if not flow.is_argument(c.name, part):
            return ""
        if dims in gathered:
            return f"gathers a whole argument{f', {c.trips} times' if c.trips > 1 else ''}"
        of_a_stack = c.trips > 1 and any(shape[1:] == dims for shape in gathered)
        return "gathers a layer of an argument in each iteration" if of_a_stack else ""
    if c.kind == "all-reduce":
        if c.trips > 1 and flow.is_accumulated(c.name, part):
            return f"reduces in each of {c.trips} iterations; once behind the loop would do"
        if flow.is_sliced(c.name, part) or (dims in gathered and "transpose(" in scope):
            return "all-reduces what lies split: a reduce-scatter would do"
    return ""


def shortened_line(text: str) -> str:
    """A source line, cut to the width of a column."""
    return text if len(text) <= _WIDE else f"{text[: _WIDE - 3]}..."
