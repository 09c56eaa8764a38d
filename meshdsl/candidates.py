"""Candidates of a search: ways to run a step on so many devices, and what no plan of each can undercut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from meshdsl.api import parallelize
from meshdsl.errors import MeshDSLError
from meshdsl.ir import Program as Traced
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.layouts.topology import Topology
from meshdsl.making import Making
from meshdsl.pipeline.spec import CHUNKED, Pipeline
from meshdsl.plan.value import Plan
from meshdsl.planner.least import least_memory, least_seconds
from meshdsl.program import Program
from meshdsl.stacks import AXIS, stacked, staged_layouts
from meshdsl.trace import trace

_PER_STAGE = 4
_USUAL = {"data": 0, "model": 2}  # and where others stand between them


@dataclass(frozen=True)
class Way:
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


def ways(
    devices: int,
    axes: Sequence[str],
    own: Pipeline | None,
    microbatches: Sequence[int] | None,
    schedules: Sequence[str],
    chunks: Sequence[int],
    recompute: Sequence[str] = ("stage",),
) -> list[Way]:
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


def _ways(sizes: Mapping[str, int], plain: Pipeline, tried: Sequence[tuple[str, int, str]]) -> Iterator[Way]:
    """Those over one mesh, with so many microbatches."""
    if sizes.get(AXIS, 1) == 1:
        yield Way(sizes, plain if plain.microbatches > 1 else None)
    else:
        yield from (Way(sizes, replace(plain, schedule=s, chunks=v, recompute=again)) for s, v, again in tried)


def shares(devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to share the devices out over the axes."""
    if len(axes) == 1:
        yield {axes[0]: devices}
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ({axes[0]: size, **rest} for rest in shares(devices // size, axes[1:]))


@dataclass(frozen=True)
class Bounded:
    """A way with the seconds and bytes per device that no plan of it can undercut, or why it cannot be planned."""

    way: Way
    seconds: float = float("inf")
    memory: int = 0
    making: Making | None = None
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
class Seeker:
    """Bounds the ways to run a program, traced once, and taken in turns once per number of stages and pipeline."""

    program: Program
    topology: Topology | str
    rules: Rules | str | None
    memory: str | None
    _turned: dict[Any, Traced] = field(default_factory=dict)

    def bounded(self, way: Way) -> Bounded:
        """What no plan of a way can undercut."""
        try:
            making = self._making(way)
            program = self._taking_turns(making, way)
            mesh, pins = making.options.mesh, making.pins(program)
            return Bounded(way, least_seconds(program, mesh), least_memory(program, mesh, pins), making, program)
        except MeshDSLError as error:
            return Bounded(way, fault=short_fault(error))

    @property
    def axes(self) -> list[str]:
        """Those to try if nothing else is said: what pins and rules name, or usual ones, and that of stages."""
        pinned = [axis for layout in (self.program.layouts or {}).values() for axis in Layout.of(layout).axes]
        ruled = [axis for table in self._rules.tables.values() for axes in table.values() for axis in axes]
        named = [axis for axis in dict.fromkeys((*pinned, *ruled)) if axis != AXIS]
        usual = [axis for axis in reversed(_USUAL) if axis not in named][: max(2 - len(named), 0)]
        staged = AXIS in (*pinned, *ruled) or bool(stacked(self.traced))
        return [AXIS] * staged + sorted([*named, *usual], key=lambda axis: _USUAL.get(axis, 1))

    def limit(self, each: Bounded) -> float:
        """Bytes that a device may hold."""
        options = each.making.options if each.making else None
        return (options.memory or options.mesh.topology.memory) if options else float("inf")

    def _making(self, way: Way) -> Making:
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

    def _taking_turns(self, making: Making, way: Way) -> Traced:
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
        return staged_layouts(self.program, self._rules, lambda: self.traced)
