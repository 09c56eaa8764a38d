"""A program of XLA's partitioner beside the best plan of the same step, and what would bring it there.

The plan is one between the same inputs and outputs, free in between: constraints inside the step are ignored.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations
from linecache import getline
from math import prod
from typing import Any, Protocol

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshdsl.api.inspected import InspectedCollective, shortened_line
from meshdsl.api.stages import CallStages
from meshdsl.api.traced_step import TracedStep, is_whole, replace_sharding
from meshdsl.errors import ArgumentError, MeshDSLError
from meshdsl.ir.graph import Source, Value, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import EIGHT_BITS
from meshdsl.lowering.constrained import constrained
from meshdsl.lowering.hlo.collectives import collectives_of_module
from meshdsl.lowering.hlo.flops import is_product, product_at
from meshdsl.lowering.hlo.parse import executed, parse_module
from meshdsl.lowering.hlo.source import InstructionSources
from meshdsl.lowering.reference import is_divided
from meshdsl.plan.op_times import plan_flops
from meshdsl.plan.plan import Plan
from meshdsl.plan.reasons import SourceNames
from meshdsl.planner.costs.op_cost import flops_of
from meshdsl.shardings import partition_spec
from meshdsl.util.text import bytes_text, percent_text, seconds_text, table

_MOST = 0.9  # part of the excess that the lines with a remedy make up together
_LINES = 5  # of them, at most
_STATEMENTS = 3  # constraints of a line that are shown
_PLANS = 7  # that are made at most, for slower and slower devices
_SLOWER = 8  # times as slow, at least
_SLOWEST = 1e3  # times as slow; what is still repeated then is no choice of the plan's
_REPEATED = 0.1  # part of the program's FLOPs by which those of the plan may exceed them
_NEAR = 1.05  # of the plan's bytes


class SentProgram(Protocol):
    """What a comparison reads of an inspected program."""

    @property
    def name(self) -> str:
        """Of the step."""

    @property
    def mesh(self) -> Mesh:
        """Names the axes."""

    @property
    def collectives(self) -> tuple[InspectedCollective, ...]:
        """Every tensor sent."""

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one step."""

    @property
    def seconds(self) -> float:
        """Predicted seconds of all collectives."""

    @property
    def flops(self) -> int:
        """Of the products of one device."""


@dataclass(frozen=True)
class WastefulLine:
    """A line of the source on which a program sends more than the plan does.

    Args:
      source: the line, ``file.py:12``. text: what it reads.
      bytes, planned: bytes that one device sends for it per step, in the program and in the plan.
      instead: what the plan sends for it.
      statements: layouts of the values that are computed there, as constraints, in words of jax.
      partial: values computed there that are partial sums in the plan, which no constraint can state.
    """

    source: str
    text: str
    bytes: int
    planned: int
    instead: str
    statements: tuple[str, ...]
    partial: int


@dataclass(frozen=True)
class RepeatedLine:
    """A line whose products and convolutions are computed by several devices alike.

    Args:
      source: the line, ``file.py:12``. text: what it reads.
      times: devices that compute each of them.
      axes: mesh axes along which they lie, if only these have so many devices; else empty.
      flops: that one device spends on the line.
    """

    source: str
    text: str
    times: int
    axes: tuple[str, ...]
    flops: int


@dataclass(frozen=True)
class FreeEnds:
    """A step whose arguments and results may lie elsewhere than whole on every device.

    Args:
      plan: of the step, free in them.
      arguments: by path, those that lie split in it, the largest first; results that replace them lie as they do.
      bytes: bytes that XLA's partitioner sends per device and step between these ends.
    """

    plan: Plan
    arguments: Mapping[str, PartitionSpec]
    bytes: int


@dataclass(frozen=True, eq=False)
class PlanComparison:
    """A program of the partitioner beside the best plan of the same step; ``print`` shows both.

    Args:
      inspection: of the program.
      plan: between the same inputs and outputs, the fastest that computes no more than the program.
      slowdown: by how much the devices that it was planned for compute slower than those of the topology; 1 if the
        fastest plan computes no more anyway.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
      >>> md.inspect(jax.jit(lambda x: x.sum(0)), rows).compare().ratio
      1.0
    """

    inspection: SentProgram
    plan: Plan
    slowdown: float
    _stages: CallStages
    _step: TracedStep

    @classmethod
    def of(cls, program: SentProgram, step: TracedStep) -> "PlanComparison":
        """Plan the step of a program between the same inputs and outputs.

        Small arguments are computed sooner than messages arrive, so that the fastest plan may repeat on every device
        what the program divides. That says nothing about the program. So devices are taken to be slower until the
        plan computes no more: the price of work is the multiplier of that constraint, raised in proportion to the
        seconds that the plan saves by the work that it repeats.

        Raises:
          ArgumentError: the step cannot be planned.
        """
        return cls(program, *_plan_of_no_more_work(program, step), step)

    @property
    def ratio(self) -> float:
        """Bytes of the program by those of the plan; infinite if the plan sends none."""
        sent, planned = self.inspection.bytes, self.plan.bytes
        return sent / planned if planned else float("inf") if sent else 1.0

    @cached_property
    def plan_flops(self) -> float:
        """FLOPs of the products and convolutions of one device in the plan."""
        return plan_flops(self._stages.planned.program, self.plan.solution)

    @cached_property
    def lines(self) -> tuple[WastefulLine, ...]:
        """The lines on which the program sends more than the plan, by the excess."""
        sent, planned = defaultdict[str, int](int), defaultdict[str, int](int)
        instead: dict[str, list[str]] = {}
        texts: dict[str, str] = {}
        for c in self.inspection.collectives:
            source = self._names.of(c.place) if c.place.file in self._names.files else c.source
            sent[source] += c.bytes * c.trips
            texts[source] = c.text
        for p in self.plan.collectives:
            planned[p.source] += p.bytes * p.trips
            instead.setdefault(p.source, []).append(f"{p.kind}({','.join(p.axes)}) of {p.value}")
        order = sorted(sent, key=lambda source: planned[source] - sent[source])
        return tuple(
            WastefulLine(
                source,
                texts[source],
                sent[source],
                planned[source],
                _listed(instead.get(source, ())),
                tuple(self._statements(source)),
                sum(bool(layout.partial()) for _, layout in self._values_on(source)),
            )
            for source in order
            if sent[source] > planned[source]
        )

    @property
    def worst(self) -> tuple[WastefulLine, ...]:
        """The lines that make up most of the excess."""
        excess, found = sum(line.bytes - line.planned for line in self.lines), list[WastefulLine]()
        for line in self.lines[:_LINES]:
            if sum(each.bytes - each.planned for each in found) < _MOST * excess:
                found.append(line)
        return tuple(found)

    @cached_property
    def suggested(self) -> tuple[WastefulLine, ...]:
        """Those of the worst lines on which the statements help, each compiled."""
        return self._suggestion[0]

    @property
    def constrained_bytes(self) -> int | None:
        """Bytes that XLA's partitioner sends with the statements of the suggested lines.

        The step is compiled with ``jax.lax.with_sharding_constraint`` on every value computed on these lines, in the
        plan's layout unless that is partial. None if its axes are explicit, whose types state where values lie, or have
        other names, or if the compiler fails on it.
        """
        return self._suggestion[1]

    @cached_property
    def _suggestion(self) -> tuple[tuple[WastefulLine, ...], int | None]:
        """The lines whose statements are suggested, and the bytes with them.

        All worst lines together, if that comes near the plan; else one after the other, each if it helps.
        """
        lines = tuple(line for line in self.worst if line.statements)
        if not lines or self.ratio <= _NEAR:
            return (), self.inspection.bytes
        together = self._bytes_with(lines)
        if together is None or together <= _NEAR * self.plan.bytes:
            return lines, together
        helping: tuple[WastefulLine, ...] = ()
        least = self.inspection.bytes
        for line in lines if len(lines) > 1 else ():
            after = self._bytes_with((*helping, line))
            if after is not None and after < least:
                helping, least = (*helping, line), after
        return (lines, together) if together < least else (helping, least)

    def _bytes_with(self, lines: Sequence[WastefulLine]) -> int | None:
        """The bytes of the step compiled with constraints on all values of these lines."""
        sources = {line.source for line in lines}
        if not self._can_be_compiled:
            return None
        places = {
            (source, dtype, shape): NamedSharding(self._step.mesh, spec)
            for source in sources
            for (dtype, shape), spec in self._planned_on(source).items()
        }

        def place(source: Source, aval: Any) -> NamedSharding | None:
            if source.file and source.file not in self._names.files:
                return None  # the plan has nothing of this file
            kind = self._names.of(source), str(getattr(aval, "dtype", "")), getattr(aval, "shape", ())
            return places.get(kind)

        jaxpr = constrained(self._step.traced.jaxpr, place)
        return self._compiled_bytes(jaxpr, [x.sharding for x in self._step.shapes], self._step.results)

    @cached_property
    def free_ends(self) -> "FreeEnds | None":
        """What the step sends if arguments and results that lie whole on every device lie as a plan would have them.

        None if none lies whole, or if the step cannot be compiled so.
        """
        whole = [i for i, x in enumerate(self._step.shapes) if is_whole(x.sharding) and x.shape]
        if not whole or not self._can_be_compiled:
            return None
        try:
            plan, *_ = _plan_of_no_more_work(self.inspection, self._step, free_ends=True)
        except ArgumentError:
            return None
        ins = [partition_spec(at.layout, len(at.shape)) for at in plan.inputs]
        outs = [partition_spec(at.layout, len(at.shape)) for at in plan.outputs]
        if not all(
            _divides(self._step.mesh, spec, at.shape)
            for at, spec in zip((*plan.inputs, *plan.outputs), (*ins, *outs), strict=True)
        ):
            return None
        places = ([NamedSharding(self._step.mesh, spec) for spec in each] for each in (ins, outs))
        compiled = self._compiled_bytes(self._step.traced.jaxpr, *places)
        if compiled is None:
            return None
        moved = [i for i in whole if any(ins[i].partitions)]
        moved.sort(key=lambda i: -prod(plan.inputs[i].shape))
        return FreeEnds(plan, {plan.inputs[i].path: ins[i] for i in moved}, compiled)

    @property
    def _can_be_compiled(self) -> bool:
        """Whether constraints on the plan's axes can be written into the step."""
        mesh = self._step.mesh
        return AxisType.Explicit not in mesh.axis_types and set(mesh.axis_names) >= set(self.plan.mesh.names)

    def _compiled_bytes(self, jaxpr: ClosedJaxpr, ins: Sequence[Any], outs: Sequence[Any]) -> int | None:
        """The bytes that XLA's partitioner sends for a step between these ends; None if it fails."""
        shapes = [replace_sharding(x, at) for x, at in zip(self._step.shapes, ins, strict=True)]
        ends = [at if isinstance(at, NamedSharding) else None for at in outs]
        try:
            compiled = jax.jit(jaxpr_as_fun(jaxpr), out_shardings=ends).lower(*shapes).compile()
        except jax.errors.JaxRuntimeError:
            return None
        found = collectives_of_module(parse_module(compiled.as_text() or ""), self.plan.mesh)
        return round(sum(c.bytes * c.trips for c in found))

    @cached_property
    def repeated(self) -> tuple[RepeatedLine, ...]:
        """The lines whose products several devices compute alike, the costliest first; none of those of a shard_map."""
        graph = self._stages.planned.program.graph
        if is_divided(graph):
            return ()
        text = self._step.compiled.as_text() or ""
        module, mesh = parse_module(text), self.inspection.mesh
        lines, computed, places = InstructionSources(text, module), Counter[str](), dict[str, Source]()
        for site in executed(module, is_product):
            place = lines.of(site.instruction.rest)
            source = self._names.of(place) if place.file in self._names.files else ""
            places[source] = place
            computed[source] += site.trips * product_at(site.instruction, module.computations[site.inside]).flops
        whole = Counter[str]()
        for one, op in walk(graph):
            whole[self._names.of(op.source)] += round(flops_of(op) * one.trips)
        found = list[RepeatedLine]()
        for source, flops in computed.most_common():
            times = round(mesh.size * flops / whole[source]) if whole[source] else 1
            if times > 1:
                place = places[source]
                text = getline(place.file, place.line).strip()
                found.append(RepeatedLine(source, text, times, _only_axes(mesh, times), flops))
        return tuple(found)

    @property
    def saving_ends(self) -> FreeEnds | None:
        """Other layouts of arguments, if they save bytes, and constraints do not save half of them."""
        sent, after = self.inspection.bytes, self.constrained_bytes
        best = sent if after is None else min(sent, after)
        if not best or 2 * best <= sent or self.free_ends is None or not self.free_ends.arguments:
            return None
        return self.free_ends if _NEAR * self.free_ends.bytes < best else None

    @property
    def facts(self) -> dict[str, Any]:
        """All figures as plain values."""
        ends = self.saving_ends
        return {
            "plan": {
                "bytes": self.plan.bytes,
                "seconds": self.plan.seconds if self.slowdown == 1 else None,
                "gap": self.plan.gap,
                "flops": self.plan_flops,
            },
            "slowdown": self.slowdown,
            "ratio": self.ratio,
            "constrained_bytes": self.constrained_bytes,
            "constrained": [line.source for line in self.suggested],
            "lines": [asdict(line) for line in self.lines],
            "repeated": [asdict(line) for line in self.repeated],
            "free_ends": ends
            and {
                "bytes": ends.bytes,
                "plan_bytes": ends.plan.bytes,
                "arguments": {path: _spec_text(spec) for path, spec in ends.arguments.items()},
            },
        }

    def __str__(self) -> str:
        return "\n".join(self._text())

    def _text(self) -> Iterator[str]:
        sent, plan = self.inspection, self.plan
        yield f"{sent.name} on mesh {sent.mesh}: the program of jax.jit beside the best plan of the same step"
        rows = [["", "bytes per device and step", "seconds of collectives", "product FLOPs per device"]]
        planned = seconds_text(sum(c.seconds * c.trips for c in plan.collectives)) if self.slowdown == 1 else "-"
        rows.append(["jax.jit", bytes_text(sent.bytes), seconds_text(sent.seconds), f"{sent.flops:.4g}"])
        rows.append(["plan", bytes_text(plan.bytes), planned, f"{self.plan_flops:.4g}"])
        yield from table(rows)
        if self.slowdown > 1:
            times = f"{self.slowdown:.0f} times as slow" if self.slowdown >= 2 else "slower"
            repeats = self.plan_flops > (1 + _REPEATED) * sent.flops
            why = "but it still computes more" if repeats else "so that it computes no more"
            yield f"(planned for devices {times}, {why} than the program)"
        if self._is_widened:
            yield "(compilers for CPUs send bfloat16 as float32: some tensors of the program count twice)"
        if self.ratio > _NEAR:
            yield from self._excess()
        elif self.ratio > 1 / _NEAR or not sent.bytes:
            yield "it sends what the plan sends"
        else:
            yield f"it sends {self.ratio:.2f} times the bytes of the plan, which has the least predicted step time"
        yield from self._repeated()
        yield from self._ends()

    def _repeated(self) -> Iterator[str]:
        """The lines whose products are computed more than once."""
        if self.repeated:
            wasted = sum(line.flops * (1 - 1 / line.times) for line in self.repeated)
            yield f"duplicated compute: {percent_text(wasted / self.inspection.flops)} of the product FLOPs, most on"
        for line in self.repeated[:_STATEMENTS]:
            over = f" of {','.join(line.axes)}" if line.axes else ""
            yield f"  {line.source}  {shortened_line(line.text)}: {line.times} devices{over} compute the same"

    @property
    def _is_widened(self) -> bool:
        """Whether the step sends numbers that the compiler at hand sends in another width."""
        if self._step.mesh.devices.flat[0].platform != "cpu":
            return False
        values = (value for _, op in walk(self._stages.planned.program.graph) for value in op.outputs)
        return any(str(value.dtype) == "bfloat16" for value in values)

    def _excess(self) -> Iterator[str]:
        """The lines that send too much, and what the statements would do."""
        sent, plan = self.inspection, self.plan
        yield f"it sends {self.ratio:.2f} times the bytes of the plan" if plan.bytes else "the plan sends nothing"
        excess = sum(line.bytes - line.planned for line in self.lines)
        part = sum(line.bytes - line.planned for line in self.worst) / excess
        count = len(self.worst)
        yield f"{percent_text(part)} of the excess comes from {f'{count} lines' if count > 1 else 'one line'}:"
        for line in self.worst:
            unknown = line.source == "?"
            yield "  operations without a line" if unknown else f"  {line.source}  {shortened_line(line.text)}"
            yield f"    sends {bytes_text(line.bytes)}; the plan {bytes_text(line.planned)}{line.instead}"
            yield from (f"    {statement}" for statement in line.statements[:_STATEMENTS])
            if len(line.statements) > _STATEMENTS:
                yield f"    and {len(line.statements) - _STATEMENTS} more values of this line"
        after = self.constrained_bytes
        if after is None or not any(line.statements for line in self.worst):
            return
        if after < sent.bytes:
            some = "these lines" if len(self.suggested) == count else ", ".join(x.source for x in self.suggested)
            found = f"jax.jit sends {bytes_text(after)} (compiled)"
            yield f"with all values of {some} constrained to the plan's layouts, {found}"
        else:
            partial = sum(line.partial for line in self.worst)
            some = f"{partial} values are partial sums" if partial > 1 else "one value is a partial sum"
            why = f"; in the plan {some}, which none can state" if partial else ""
            yield f"constraints on these lines save nothing (compiled){why}; md.parallelize(step, mesh) runs the plan"

    def _ends(self) -> Iterator[str]:
        """What other layouts of arguments would save."""
        found = self.saving_ends
        if found is None:
            return
        yield (
            f"with arguments split that lie whole on every device, jax.jit sends {bytes_text(found.bytes)} (compiled), "
            f"a plan {bytes_text(found.plan.bytes)}:"
        )
        for path, spec in list(found.arguments.items())[:_STATEMENTS]:
            yield f"    {path}: in_shardings and out_shardings {_spec_text(spec)}"
        if len(found.arguments) > _STATEMENTS:
            yield f"    and {len(found.arguments) - _STATEMENTS} more"

    def _statements(self, source: str) -> Iterator[str]:
        explicit = AxisType.Explicit in self._step.mesh.axis_types
        call = "jax.sharding.reshard" if explicit else "jax.lax.with_sharding_constraint"
        for (dtype, shape), spec in sorted(self._planned_on(source).items(), key=lambda each: -prod(each[0][1])):
            yield f"{dtype}[{','.join(map(str, shape))}] of {source}: {call}(x, {_spec_text(spec)})"

    def _planned_on(self, source: str) -> dict[tuple[str, tuple[int, ...]], PartitionSpec]:
        """The planned layouts of what the step computes on a line, by type, unless these are partial.

        Of several layouts of one type, that of most values.
        """
        found = defaultdict[tuple[str, tuple[int, ...]], Counter[PartitionSpec]](Counter)
        for value, layout in self._values_on(source):
            spec = None if layout.partial() else partition_spec(layout, len(value.shape))
            if spec is not None and _divides(self._step.mesh, spec, value.shape):
                found[str(value.dtype), value.shape][spec] += 1
        return {kind: specs.most_common(1)[0][0] for kind, specs in found.items()}

    def _values_on(self, source: str) -> Iterator[tuple[Value, Layout]]:
        """The values of several dims that the step computes on a line, with their planned layouts."""
        graph, layouts = self._stages.planned.program.graph, self.plan.solution.layouts
        for one in (graph, *(body for _, op in walk(graph) for body in op.bodies)):
            for op in one.ops[:-1]:
                if self._names.of(op.source) == source and not op.bodies:
                    yield from ((value, layouts[value.id]) for value in op.outputs if len(value.shape) > 1)

    @cached_property
    def _names(self) -> SourceNames:
        return SourceNames(op.source for _, op in walk(self._stages.planned.program.graph))


def _plan_of_no_more_work(
    program: SentProgram, step: TracedStep, free_ends: bool = False
) -> tuple[Plan, float, CallStages]:
    """A plan that computes no more than the program, how much slower its devices are, and its stages."""
    topology, slowdown = program.mesh.topology, 1.0
    for _ in range(_PLANS):
        rates = ("flops16", "flops32", *EIGHT_BITS, "memory_bandwidth")
        speeds = {name: getattr(topology, name) / slowdown for name in rates}
        mesh = Mesh(topology=replace(topology, **speeds), **program.mesh.sizes_by_name)
        sharded, args = step.planned(mesh, free_ends)
        try:
            plan = sharded.plan(*args)
        except MeshDSLError as error:
            raise ArgumentError(f"{program.name} cannot be planned to compare with: {error}") from error
        stages, of_plan = sharded.stages(*args), slowdown
        repeated = plan_flops(stages.planned.program, plan.solution) - program.flops
        if repeated <= _REPEATED * program.flops or slowdown > _SLOWEST:
            break
        saved = program.seconds - sum(c.seconds * c.trips for c in plan.collectives)
        slowdown = max(2 * saved * topology.flops32 / repeated, _SLOWER * slowdown)
    return plan, of_plan, stages


def _only_axes(mesh: Mesh, devices: int) -> tuple[str, ...]:
    """The mesh axes with so many devices together, if there is one choice of them."""
    names = [name for name, size in mesh.sizes_by_name.items() if size > 1]
    choices = [some for n in range(1, len(names) + 1) for some in combinations(names, n)]
    found = [some for some in choices if prod(mesh.axis(name) for name in some) == devices]
    return found[0] if len(found) == 1 else ()


def _divides(mesh: Any, spec: PartitionSpec, shape: tuple[int, ...]) -> bool:
    """Whether every dim divides by the axes that split it; planned dims may be padded."""
    try:
        NamedSharding(mesh, spec).shard_shape(shape)
    except ValueError:
        return False
    return True


def _listed(items: Sequence[str]) -> str:
    shown = list(dict.fromkeys(items))
    more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
    return f": {', '.join(shown[:2])}{more}" if shown else ""


def _spec_text(spec: Any) -> str:
    return f"P({', '.join(map(repr, spec.partitions))})"
