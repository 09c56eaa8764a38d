"""Search: how to train a step on so many devices; every mesh and pipeline that could be the best, the fastest first.

    print(md.search(program, devices=64, topology="dgx-h100"))
    print(md.search(program, devices=64, axes=("pipe", "data", "model"), microbatches=(8, 32)))

A candidate is a mesh, which shares the devices out over the axes in one of all ways, and a pipeline: microbatches, and
where the axis ``pipe`` has several devices a schedule and its chunks. What no plan of it can undercut, in seconds and
in memory, is known without planning (``meshdsl.planner.least``): candidates are looked at in that order, and those that
cannot fit, or cannot be faster than a plan that is there, are not planned. What cannot be planned is listed last, with
the reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.candidates import Bounded, Seeker, Way, short_fault, ways
from meshdsl.errors import ArgumentError, MeshDSLError, faults, is_a
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.rules import Rules
from meshdsl.layouts.topology import Topology
from meshdsl.pipeline.spec import CHUNKED, Pipeline
from meshdsl.plan.value import Plan
from meshdsl.program import Program
from meshdsl.searched_text import search_text
from meshdsl.units import bytes_text, seconds_text


@dataclass(frozen=True)
class Candidate:
    """A way to run the step: its plan, or why there is none.

    Args:
      least: seconds that no plan of it can undercut.
      pruned: it is not planned, as it cannot be the best.
    """

    way: Way
    plan: Plan | None
    fault: str = ""
    least: float = 0.0
    pruned: bool = False

    @property
    def mesh(self) -> str:
        """The mesh as text."""
        return self.way.mesh

    @property
    def pipeline(self) -> Pipeline | None:
        """How the batch is taken; None for the whole batch at once."""
        return self.way.pipeline

    @property
    def microbatches(self) -> int:
        """Per step."""
        return self.way.microbatches

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; infinite without a plan."""
        return self.plan.seconds if self.plan else float("inf")

    @property
    def bubble(self) -> float | None:
        """Of the pipeline, if it is one."""
        found = self.plan.pipeline if self.plan else None
        return found.bubble if found and found.axis else None

    @property
    def facts(self) -> dict[str, Any]:
        """As plain values."""
        found: dict[str, Any] = {"mesh": self.mesh, "microbatches": self.microbatches, "schedule": self.way.schedule}
        if self.plan is None:
            return found | {"fault": self.fault, "pruned": self.pruned, "least": self.least}
        return (
            found | {name: getattr(self.plan, name) for name in _COSTS} | {"least": self.least, "bubble": self.bubble}
        )


_COSTS = ("seconds", "gap", "bytes", "memory")


@dataclass(frozen=True)
class Search:
    """All candidates, the fastest first; those without a plan follow, pruned ones before those that have a fault."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest; ArgumentError with the reasons if none can be planned."""
        if self.candidates[0].plan is None:
            rows = [f"{each.mesh}: {each.fault}" for each in self.candidates]
            raise ArgumentError(faults("no candidate can be planned:", rows))
        return self.candidates[0]

    def __str__(self) -> str:
        return search_text(self.candidates)


def search(
    step: Callable[..., Any] | Program,
    *args: Any,
    devices: int,
    topology: Topology | str = "cpu",
    axes: Sequence[str] | None = None,
    microbatches: Sequence[int] | None = None,
    schedules: Sequence[str] = ("1f1b",),
    chunks: Sequence[int] = (1,),
    recompute: Sequence[str] = ("stage",),
    layouts: Mapping[str, Layout | str] | None = None,
    rules: Rules | str | None = None,
    memory: str | None = None,
    progress: Callable[[str], None] = lambda said: None,
) -> Search:
    """The plans of a step on ``devices`` devices, over every mesh of these axes.

    Args:
      step: a program, or a function; then ``args`` are its arguments, arrays or ``jax.ShapeDtypeStruct``.
      topology: what the devices and links cost; a preset's name, or a topology.
      axes: of the mesh, outermost first; one may get a single device. Those of ``pipe`` are stages: stacks of
        layers are split over it, also where no rule says so. Default are those that layouts and rules name, ``data``
        and ``model`` where they name fewer than two, and ``pipe`` if the program has a stack of layers.
      microbatches: numbers of microbatches to try, 1 for the whole batch at once. Default is 1, or with stages 4 times
        as many as there are.
      schedules: to try where there are stages. chunks: likewise, with those schedules that take several.
      recompute: likewise, ``stage`` and ``none``, as ``md.Pipeline`` takes it.
      layouts: as in ``parallelize``, for a function. rules, memory: likewise; for a program, instead of its own.
      progress: told of every candidate before it is planned.

    Raises ArgumentError for what is no number of devices, no axes, no microbatches, schedules or chunks.
    """
    _check(devices, axes, microbatches, schedules, chunks, recompute, args, step)
    program = step if isinstance(step, Program) else Program(step, args, layouts)
    seeker, bounded, found = Seeker(program, topology, rules, memory), list[Bounded](), list[Candidate]()
    progress("tracing")
    _ = seeker.traced
    tried = seeker.axes if axes is None else axes
    every = ways(devices, tried, program.pipeline, microbatches, schedules, chunks, recompute)
    for i, way in enumerate(every, 1):
        progress(f"looking at {i} of {len(every)}: {way}")
        bounded.append(seeker.bounded(way))
    for i, each in enumerate(sorted(bounded, key=lambda each: each.seconds), 1):
        progress(f"{i} of {len(every)}: {each.way}")
        found.append(_candidate(each, seeker.limit(each), min((one.seconds for one in found), default=float("inf"))))
    return Search(tuple(sorted(found, key=lambda each: (each.seconds, not each.pruned))))


def _candidate(each: Bounded, limit: float, best: float) -> Candidate:
    """Planned, unless it cannot be the best."""
    if each.fault:
        return Candidate(each.way, None, each.fault)
    if each.memory > limit:
        return Candidate(each.way, None, f"pruned: needs {bytes_text(each.memory)} at least", each.seconds, True)
    if each.seconds >= best:
        return Candidate(each.way, None, f"pruned: takes {seconds_text(each.seconds)} at least", each.seconds, True)
    try:
        return Candidate(each.way, each.plan(), "", each.seconds)
    except MeshDSLError as error:
        return Candidate(each.way, None, short_fault(error), each.seconds)


def _check(
    devices: Any,
    axes: Any,
    microbatches: Any,
    schedules: Any,
    chunks: Any,
    recompute: Any,
    args: tuple[Any, ...],
    step: Any,
) -> None:
    def size(n: object) -> bool:
        return isinstance(n, int) and not isinstance(n, bool) and n >= 1

    def sizes(given: Any) -> bool:
        return not isinstance(given, int | str) and bool(given) and all(map(size, given))

    rows = [] if size(devices) else [f"devices: {is_a(devices)}, not a number of devices"]
    if axes is not None and (isinstance(axes, str) or not axes or len(set(axes)) < len(axes)):
        rows.append(f"axes: {axes!r}, not names of different mesh axes, such as ('data', 'model')")
    if microbatches is not None and not sizes(microbatches):
        rows.append(f"microbatches: {microbatches!r}, not numbers to try, such as (1, 4, 8)")
    if isinstance(schedules, str) or not schedules:
        rows.append(f"schedules: {schedules!r}, not names of schedules to try, such as ('1f1b', 'gpipe')")
    if isinstance(recompute, str) or not recompute:
        rows.append(f"recompute: {recompute!r}, not what to try, such as ('stage', 'none')")
    if not sizes(chunks):
        rows.append(f"chunks: {chunks!r}, not numbers to try, such as (1, 2)")
    elif 1 not in chunks and not set(CHUNKED) & set(schedules):
        rows.append(
            f"chunks: {chunks!r}, more than one goes with {' or '.join(map(repr, CHUNKED))}, which are not tried"
        )
    if isinstance(step, Program) and args:
        rows.append(f"args: {len(args)} beside a program, which has its own")
    if rows:
        raise ArgumentError(faults("arguments of search that do not fit:", rows))
