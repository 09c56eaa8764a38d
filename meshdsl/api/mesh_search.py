"""Search: how to train a step on so many devices; every mesh and pipeline that could be the best, the fastest first.

    print(md.search(program, devices=64, topology="dgx-h100"))
    print(md.search(program, devices=64, axes=("pipe", "data", "model"), microbatches=(8, 32)))

A candidate is a mesh, which shares the devices out over the axes in one of all ways, and a pipeline: microbatches, and
where the axis ``pipe`` has several devices a schedule and its chunks. What no plan of it can undercut, in seconds and
in memory, is known without planning (``meshdsl.planner.bounds.trivial``): candidates are looked at in that order,
and those that
cannot fit, or cannot be faster than a plan that is there, are not planned. What cannot be planned is listed last, with
the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

from meshdsl.api.program import AXIS, Program, pipe_layouts, stacked_parameters
from meshdsl.api.sharded import parallelize
from meshdsl.api.stages import Stages
from meshdsl.errors import ArgumentError, MeshDSLError, faults, is_a
from meshdsl.ir.graph import TracedProgram as Traced
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Topology
from meshdsl.plan.plan import Plan
from meshdsl.planner.bounds.trivial import least_memory, least_seconds
from meshdsl.schedules.spec import CHUNKED, Pipeline
from meshdsl.trace import trace
from meshdsl.util.text import bytes_text, seconds_text, table

# ---- Candidates ------------------------------------------------------------------------------------------------------
# Candidates of a search: ways to run a step on so many devices, and what no plan of each can undercut.


_PER_STAGE = 4
_USUAL = {"data": 0, "model": 2}  # and where others stand between them


@dataclass(frozen=True)
class Configuration:
    """A mesh, by its axes, and how the step takes its batch over it; None for the whole batch at once."""

    sizes: Mapping[str, int]
    pipeline: Pipeline | None

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.sizes.get(AXIS, 1)

    @property
    def mesh(self) -> str:
        """The mesh as text."""
        return ",".join(f"{axis}={n}" for axis, n in self.sizes.items())

    @property
    def microbatches(self) -> int:
        """Per step."""
        return self.pipeline.microbatches if self.pipeline else 1

    @property
    def schedule(self) -> str:
        """Of the stages, with its chunks, and ``kept`` if nothing is recomputed; empty if there is one stage."""
        if self.pipeline is None or self.stages == 1:
            return ""
        chunks = f"x{self.pipeline.chunks}" if self.pipeline.chunks > 1 else ""
        return " ".join(filter(None, (self.pipeline.name, chunks, "kept" * (self.pipeline.recompute == "none"))))

    def __str__(self) -> str:
        turns = f"{self.microbatches} microbatches" if self.microbatches > 1 else ""
        return ", ".join(filter(None, (self.mesh, self.schedule, turns)))


def configurations(
    devices: int,
    axes: Sequence[str],
    own: Pipeline | None,
    microbatches: Sequence[int] | None,
    schedules: Sequence[str],
    chunks: Sequence[int],
    recompute: Sequence[str] = ("stage",),
) -> list[Configuration]:
    """Every way, once; without stages schedules do not matter, and several chunks go with some only.

    Args:
      own: the program's pipeline, which says what is not tried.
      microbatches: None for the program's own, else 4 per stage, and the whole batch at once where there is one.
    """
    pairs = [(s, v) for s, v in product(schedules, chunks) if v == 1 or s in CHUNKED]
    pairs = [(s, v) for s, v in pairs if (s, v) != ("interleaved", 1) or "1f1b" not in schedules]  # the same
    tried = [(s, v, again) for (s, v), again in product(pairs, recompute)]
    return [
        way
        for sizes in shares(devices, axes)
        for m in microbatches or (_usual(own, sizes),)
        for way in _ways(sizes, replace(own, microbatches=m, schedule="1f1b", chunks=1) if own else Pipeline(m), tried)
    ]


def _usual(own: Pipeline | None, sizes: Mapping[str, int]) -> int:
    """Microbatches, where nothing says how many to try."""
    stages = sizes.get(AXIS, 1)
    return own.microbatches if own else _PER_STAGE * stages if stages > 1 else 1


def _ways(sizes: Mapping[str, int], plain: Pipeline, tried: Sequence[tuple[str, int, str]]) -> Iterator[Configuration]:
    """Those over one mesh, with so many microbatches."""
    if sizes.get(AXIS, 1) == 1:
        yield Configuration(sizes, plain if plain.microbatches > 1 else None)
    else:
        yield from (
            Configuration(sizes, replace(plain, schedule=s, chunks=v, recompute=again)) for s, v, again in tried
        )


def shares(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to share the devices out over the axes."""
    if len(axes) == 1:
        yield {axes[0]: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ({axes[0]: size, **rest} for rest in shares(devices // size, axes[1:]))


@dataclass(frozen=True)
class BoundedConfiguration:
    """A way with the seconds and bytes per device that no plan of it can undercut, or why it cannot be planned."""

    way: Configuration
    seconds: float = float("inf")
    memory: int = 0
    making: Stages | None = None
    program: Traced | None = None
    fault: str = ""

    def plan(self) -> Plan:
        """Its plan."""
        assert self.making and self.program
        return self.making.plan(self.program)[1]


def short_fault(error: MeshDSLError) -> str:
    """The first thing that an error says does not fit."""
    first, *rows = str(error).splitlines()
    return rows[0].strip() if rows and first.endswith(":") else first


@dataclass
class ConfigurationSearch:
    """Bounds the ways to run a program, traced once, and taken in turns once per number of stages and pipeline."""

    program: Program
    topology: Topology | str
    rules: Rules | str | None
    memory: str | None
    _turned: dict[Any, Traced] = field(default_factory=dict)

    def bounded(self, way: Configuration) -> BoundedConfiguration:
        """What no plan of a way can undercut."""
        try:
            making = self._making(way)
            program = self._taking_turns(making, way)
            mesh, pins = making.options.mesh, making.pins(program)
            return BoundedConfiguration(
                way, least_seconds(program, mesh), least_memory(program, mesh, pins), making, program
            )
        except MeshDSLError as error:
            return BoundedConfiguration(way, fault=short_fault(error))

    @property
    def axes(self) -> list[str]:
        """Those to try if nothing else is said: what pins and rules name, or usual ones, and that of stages."""
        pinned = [axis for layout in (self.program.layouts or {}).values() for axis in Layout.of(layout).axes]
        ruled = [axis for table in self._rules.tables.values() for axes in table.values() for axis in axes]
        named = [axis for axis in dict.fromkeys((*pinned, *ruled)) if axis != AXIS]
        usual = [axis for axis in reversed(_USUAL) if axis not in named][: max(2 - len(named), 0)]
        staged = AXIS in (*pinned, *ruled) or bool(stacked_parameters(self.traced))
        return [AXIS] * staged + sorted([*named, *usual], key=lambda axis: _USUAL.get(axis, 1))

    def limit(self, each: BoundedConfiguration) -> float:
        """Bytes that a device may hold."""
        options = each.making.options if each.making else None
        return (options.memory or options.mesh.topology.memory) if options else float("inf")

    def _making(self, way: Configuration) -> Stages:
        program = self.program
        sharded = parallelize(
            program.step,
            Mesh(topology=self.topology, **way.sizes),
            self._layouts if AXIS in way.sizes else program.layouts,
            memory=self.memory,
            donate_argnums=tuple(range(len(program.args) - 1)),
            rules=self._rules,
            pipeline=way.pipeline,
        )
        return sharded.kept.making

    def _taking_turns(self, making: Stages, way: Configuration) -> Traced:
        key = way.stages, way.pipeline
        if key not in self._turned:
            self._turned[key] = making.take_turns(self.traced)
        return self._turned[key]

    @cached_property
    def traced(self) -> Traced:
        """The program, the whole batch at once."""
        cuts = bool(self.program.pipeline and self.program.pipeline.axis)
        return trace(self.program.step, self.program.args, inside=self._rules.inside, cuts=cuts)

    @cached_property
    def _rules(self) -> Rules:
        return Rules.of((self.program.rules if self.rules is None else self.rules) or Rules())

    @cached_property
    def _layouts(self) -> Mapping[str, Layout | str]:
        return pipe_layouts(self.program, self._rules, lambda: self.traced)


# ---- Searched text ---------------------------------------------------------------------------------------------------
# The printed search: every plan, the fastest first, then what was not planned, and why, in few rows.


_HEAD = ("mesh", "microbatches", "schedule", "step", "gap", "bubble", "sent", "memory")
_REASONS = 8


def search_text(candidates: Sequence["Candidate"]) -> str:
    """The candidates in two tables; those without a plan that have one reason share a row."""
    planned = [_row(each) for each in candidates if each.plan]
    left = list(_left(candidates))
    tables = (table([_HEAD, *planned]) if planned else (), table(left) if len(left) > 1 else ())
    return "\n\n".join("\n".join(lines) for one in tables if (lines := list(one)))


def _row(each: "Candidate") -> tuple[str, ...]:
    plan = each.plan
    assert plan is not None
    bubble = "" if each.bubble is None else f"{each.bubble:.1%}"
    costs = seconds_text(plan.seconds), f"{plan.gap:.1%}", bubble, bytes_text(plan.bytes), bytes_text(plan.memory)
    return each.mesh, _count(each), each.way.schedule, *costs


def _left(candidates: Sequence["Candidate"]) -> Iterator[tuple[str, ...]]:
    """Rows of what has no plan."""
    alike: dict[tuple[str, str, str], list[Candidate]] = {}
    for each in (each for each in candidates if not each.plan):
        alike.setdefault((_count(each), each.way.schedule, each.fault), []).append(each)
    yield "not planned", "microbatches", "schedule", "because"
    for (count, schedule, fault), rows in list(alike.items())[:_REASONS]:
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        yield f"{rows[0].mesh}{more}", count, schedule, fault
    rest = list(chain.from_iterable(list(alike.values())[_REASONS:]))
    if rest:
        pruned = sum(each.pruned for each in rest)
        yield f"... {len(rest)} more", "", "", f"{pruned} pruned, {len(rest) - pruned} that cannot be planned"


def _count(each: "Candidate") -> str:
    return str(each.microbatches) if each.microbatches > 1 else ""


# ---- Searched --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A way to run the step: its plan, or why there is none.

    Args:
      least: seconds that no plan of it can undercut.
      pruned: it is not planned, as it cannot be the best.
    """

    way: Configuration
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
    seeker, bounded, found = (
        ConfigurationSearch(program, topology, rules, memory),
        list[BoundedConfiguration](),
        list[Candidate](),
    )
    progress("tracing")
    _ = seeker.traced
    tried = seeker.axes if axes is None else axes
    every = configurations(devices, tried, program.pipeline, microbatches, schedules, chunks, recompute)
    for i, way in enumerate(every, 1):
        progress(f"looking at {i} of {len(every)}: {way}")
        bounded.append(seeker.bounded(way))
    for i, each in enumerate(sorted(bounded, key=lambda each: each.seconds), 1):
        progress(f"{i} of {len(every)}: {each.way}")
        found.append(_candidate(each, seeker.limit(each), min((one.seconds for one in found), default=float("inf"))))
    return Search(tuple(sorted(found, key=lambda each: (each.seconds, not each.pruned))))


def _candidate(each: BoundedConfiguration, limit: float, best: float) -> Candidate:
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
