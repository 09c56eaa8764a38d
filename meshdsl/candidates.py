"""Candidates of a search: ways to run a step on so many devices, and what no plan of each can undercut."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from meshdsl.api import parallelize
from meshdsl.errors import MeshDSLError
from meshdsl.ir import Op, Value
from meshdsl.ir import Program as Traced
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.layouts.topology import Topology
from meshdsl.making import Making
from meshdsl.pins import follows
from meshdsl.pipeline.spec import CHUNKED, Pipeline
from meshdsl.plan.value import Plan
from meshdsl.planner.least import least_memory, least_seconds
from meshdsl.program import Program
from meshdsl.trace import trace
from meshdsl.trace.phases import FORWARD

AXIS = "pipe"


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
    microbatches: Sequence[int],
    schedules: Sequence[str],
    chunks: Sequence[int],
    recompute: Sequence[str] = ("stage",),
) -> list[Way]:
    """Every way, once; without stages schedules do not matter, and several chunks go with some only.

    Args:
      own: the program's pipeline, which says what is not tried.
    """
    found = []
    for m, sizes in product(microbatches, shares(devices, axes)):
        plain = replace(own, microbatches=m, schedule="1f1b", chunks=1) if own else Pipeline(m)
        if sizes.get(AXIS, 1) == 1:
            found.append(Way(sizes, plain if m > 1 else None))
            continue
        pairs = [(s, v) for s, v in product(schedules, chunks) if v == 1 or s in CHUNKED]
        pairs = [(s, v) for s, v in pairs if (s, v) != ("interleaved", 1) or "1f1b" not in schedules]  # the same
        every = product(pairs, recompute)
        found += [Way(sizes, replace(plain, schedule=s, chunks=v, recompute=again)) for (s, v), again in every]
    return found


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
            return Bounded(way, fault=" ".join(str(error).split()))

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
        return sharded.making

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
    def _layouts(self) -> dict[str, Layout | str]:
        """The program's own, and where nothing lies on the pipeline's axis, its layers do."""
        own = dict(self.program.layouts or {})
        ruled = any(AXIS in axes for table in self._rules.tables.values() for axes in table.values())
        if ruled or any(AXIS in Layout.of(layout).axes for layout in own.values()):
            return own
        return {**dict.fromkeys(stacked(self.traced), f"{AXIS}=S(0)"), **own}


def stacked(program: Traced) -> list[str]:
    """The parameters that the longest forward scan over parameters goes over: stacks of layers."""
    graph, replaced = program.graph, {i for i in follows(program.inputs, program.outputs) if i is not None}
    makers = {v.id: op for op in graph.ops for v in op.outputs}
    paths = {
        v.id: leaf.path for i, (v, leaf) in enumerate(zip(graph.inputs, program.inputs, strict=True)) if i in replaced
    }
    found: list[tuple[int, list[str]]] = []
    for op in graph.ops:
        if op.name == "scan" and op.phase == FORWARD:
            stacks = op.inputs[op.params["num_consts"] + op.params["num_carry"] :]
            origins = (origin(x, makers) for x in stacks if isinstance(x, Value))
            found.append((op.params["length"], [paths[x.id] for x in origins if x.id in paths]))
    return max((own for own in found if own[1]), default=(0, []))[1]


def origin(x: Value, makers: Mapping[int, Op]) -> Value:
    """What a stack was made of, cast or transposed."""
    while x.id in makers:
        read = [y for y in makers[x.id].inputs if isinstance(y, Value)]
        if len(read) != 1 or read[0].shape[:1] != x.shape[:1]:
            break
        x = read[0]
    return x
