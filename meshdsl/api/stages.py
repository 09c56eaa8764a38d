"""One kind of call of a step on its way to an executable, stage by stage.

    traced       the graph of the whole batch; independent of pins               meshdsl.trace
    checked      the same on this mesh, without rows of rules that do not hold   meshdsl.pins, meshdsl.custom_rules
    microbatched the same in microbatches, or as a pipeline                      meshdsl.pipelining
    program      the same with uneven pins as constraints, if they are padded    meshdsl.padding
    pins         what the user fixed, resolved for the program and checked       meshdsl.pins
    planned      the best variant of the program with its plan                   meshdsl.api.plan_variants
    executable   the program under its plan on devices, compiled on first use    meshdsl.api.executable

Each stage is computed on first use from the ones above, and its result is kept: ``print(sharded.stages(*args).traced)``
shows the graph. Two calls are of one kind if trees, shapes, dtypes, static arguments and jax's settings are equal
(``calls.CallKind``).

If a program is equal to that of another kind but for weak types, its plan is taken as it is: a scale that is a Python
number in the first call and an array in the next, a state restored from a file. If only weak types changed and that
makes another program (bfloat16 times a weak float32 is bfloat16), arguments and results keep their layouts, so that the
arrays of one call are where the next one takes them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from math import inf
from typing import Any, TypeVar

import jax

from meshdsl.api.ambient import JaxSettings, typed_shape
from meshdsl.api.axis_names import trace_found
from meshdsl.api.calls import CallKind
from meshdsl.api.executable import Executable
from meshdsl.api.options import Options, donated_leaves
from meshdsl.api.overlap_option import OFF
from meshdsl.api.plan_variants import PlannedProgram, briefly, plan_best_variant
from meshdsl.api.stage_remat import Staging
from meshdsl.custom_rules import check_rules
from meshdsl.errors import ArgumentError, MemoryLimitError, PinError, TraceError
from meshdsl.ir.graph import Leaf, TracedProgram
from meshdsl.ir.host import keep_on_host
from meshdsl.ir.solution import Pins
from meshdsl.ir.text import is_equal_but_weak
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.roundness import Roundness
from meshdsl.layouts.topology import Link, Topology, no_host_memory
from meshdsl.lowering.shardings import device_mesh
from meshdsl.padding.uneven_pins import UnevenPins, padded_variant
from meshdsl.pins import GivenLayouts, ResolvedTable, UserPins, fit_constraints, nearly_replaced, overridden_pins
from meshdsl.pipelining import to_microbatches
from meshdsl.plan.plan import Plan
from meshdsl.plan.types import Array
from meshdsl.plan.validate import check_runnable, check_same_program
from meshdsl.planner.limits import EFFORTS
from meshdsl.recomputation.hosting import hostable
from meshdsl.recomputation.levels import recomputable
from meshdsl.recomputation.loop_parts import dividing
from meshdsl.recomputation.rewrite import recomputing
from meshdsl.trace import Call, trace_call
from meshdsl.trace.device_axes import DeviceMap
from meshdsl.trace.ragged_exchange import fit_exchanges
from meshdsl.trace.shard_maps import check_stated_specs, explicit_specs
from meshdsl.trace.spec_errors import asks_for_types

SLOW_DEVICES = Topology(  # no message costs anything beside their work, and starting an operation costs nothing
    "slow devices", flops16=1e6, flops32=1e6, memory_bandwidth=1e6, memory=1e18, overhead=0.0, links=(Link(0.0, 1e12),)
)


Stage = TypeVar("Stage")


def trace_for(
    step: Callable[..., Any],
    options: Options,
    call: Call,
    kind: CallKind,
    choices: Iterable[tuple[str, str]] = (),
) -> tuple[DeviceMap | None, TracedProgram]:
    """Return the program of a call, the whole batch at once.

    It depends on the pins only if the step is written for one device; the map of devices is returned then.
    Arguments are shapes without types over Explicit axes, so that calls with arrays that lie elsewhere are of one kind;
    they have their types only where a ``jax.shard_map`` over such axes compares its specs with them.

    Args:
      choices: which function is taken of ``md.alternatives``, by name; by default those of the given plan.

    Raises:
      TraceError: the step cannot be traced, or its ``in_specs`` are inferred from types.
    """
    keep_cuts, keep = bool(options.pipeline and options.pipeline.axis), options.constraints == "keep"
    checkpoints, roundness = options.keeps_checkpoints, Roundness.of(options.mesh.sizes)
    inside, shapes = options.rules.inside, kind.shapes()
    choices = tuple(choices or (options.plan.alternatives if options.plan else ()))
    untyped, typed = (replace(call, leaves=tuple(leaves)) for leaves in (shapes, map(typed_shape, call.leaves, shapes)))

    def trace(call: Call) -> tuple[DeviceMap | None, TracedProgram]:
        def run(devices: DeviceMap | None) -> TracedProgram:
            kept = inside, keep_cuts, devices, keep
            return trace_call(step, call, *kept, roundness=roundness, checkpoints=checkpoints, choices=choices)

        return trace_found(run, options, call)

    try:
        found = kind.settings.run(lambda: trace(untyped))
    except TraceError as error:
        if typed.leaves == untyped.leaves or not asks_for_types(error):
            raise
        with kind.settings.applied():
            return trace(typed)
    if typed.leaves != untyped.leaves and explicit_specs(found[1]):
        with kind.settings.applied():
            check_stated_specs(found[1], trace(typed)[1])
    return found


def check_inferred_specs(
    step: Callable[..., Any], options: Options, call: Call, kind: CallKind, traced: TracedProgram
) -> None:
    """Raise TraceError if shard_maps infer other specs from this call's types than in the program of its kind.

    Specs that the user states hold wherever arguments lie, even where jax would compare them with types.
    """
    try:
        check_stated_specs(traced, trace_for(step, options, call, kind)[1])
    except TraceError as error:
        if not asks_for_types(error):
            raise


def stage(compute: "Callable[[CallStages], Stage]") -> "cached_property[Stage]":
    """Return the stage as a property that is computed once, under the settings of the call's kind."""

    @wraps(compute)
    def run(stages: "CallStages") -> Stage:
        with stages.settings.lowering():
            return compute(stages)

    return cached_property(run)


@dataclass(frozen=True)
class CallStages:
    """The stages of one kind of call under one set of options.

    Args:
      traced: the step's program, from ``trace_for``.
      devices: from ``trace_for``, for a step that is written for one device.
      start: a plan of the same program under other pins, from which planning starts.
      former: the stages of another kind, whose layouts are taken over.
      settings: of jax, under which the stages run; default is those set now.
      chosen: the program and its plan, where one of several alternatives has been chosen (``api.alternatives``).
      rivals: the stages with other alternatives.
    """

    step: Callable[..., Any]
    options: Options
    traced: TracedProgram
    devices: DeviceMap | None = None
    start: PlannedProgram | None = None
    former: "CallStages | None" = None
    settings: JaxSettings = field(default_factory=JaxSettings.current)
    chosen: PlannedProgram | None = None
    rivals: tuple["CallStages", ...] = ()

    @cached_property
    def _stated(self) -> ResolvedTable:
        """What ``layouts=`` states for this step."""
        return self.options.layouts.resolved(self.traced, self.options.mesh)

    @cached_property
    def user_pins(self) -> UserPins:
        """What the user fixed, for every rewrite of the program to resolve."""
        o, stated = self.options, self._stated
        donated = donated_leaves(self.step, self.traced, o)
        return UserPins(stated.layouts, o.outputs, o.rules, donated, o.uneven, stated.by)

    @stage
    def checked(self) -> TracedProgram:
        """The traced program, its constraints and ragged exchanges fitted to the mesh, its user-defined rules checked.

        Rules are checked on simulated devices; this executes user code.
        """
        mesh = self.options.mesh
        program = check_rules(fit_exchanges(fit_constraints(self.traced, mesh), mesh.topology))
        unused = self.user_pins.unused_rules(program)
        notes = [*program.notes, *self.options.notes, *unused, *self._stated.notes]
        notes += nearly_replaced(program)
        notes += overridden_pins(self.options.layouts.on(mesh), program)
        warnings, low_bits = [*program.warnings, *unused], self.options.low_bits
        return replace(program, notes=notes, warnings=warnings, low_bits=low_bits)

    @stage
    def microbatched(self) -> TracedProgram:
        """The checked program in microbatches or as a pipeline, if asked."""
        return self._in_stages(self.checked)

    def _in_stages(self, program: TracedProgram, recompute: str = "") -> TracedProgram:
        """Return a program of this call in microbatches or as a pipeline, if asked.

        Args:
          recompute: ``Pipeline.recompute``; by default the user's.
        """
        o = self.options
        if o.pipeline is None:
            return program
        pipeline = replace(o.pipeline, recompute=recompute) if recompute else o.pipeline
        return to_microbatches(program, pipeline, o.mesh, self.user_pins)

    @stage
    def program(self) -> TracedProgram:
        """The program that is planned: its uneven pins are noted, and are constraints if they are to be padded."""
        return self.with_uneven_pins(self.microbatched)

    def with_uneven_pins(self, program: TracedProgram) -> TracedProgram:
        """Return a program of this call with notes on its uneven pins, and constraints if they are to be padded."""
        uneven = self._uneven_in(program)
        if not uneven:
            return program
        notes = [*program.notes, *uneven.notes(program, self.options.mesh, self._pads_uneven)]
        return replace(uneven.constrained(program) if self._pads_uneven else program, notes=notes)

    def _uneven_in(self, program: TracedProgram) -> UnevenPins:
        o = self.options
        return UnevenPins({}, {}) if o.uneven == "error" else UnevenPins.of(program, o.mesh, self.user_pins)

    @cached_property
    def uneven(self) -> UnevenPins:
        """The pins that do not divide and are loosened; none if that is an error."""
        return self._uneven_in(self.microbatched)

    @cached_property
    def uneven_notes(self) -> list[str]:
        """What becomes of these pins, in sentences."""
        return self.uneven.notes(self.microbatched, self.options.mesh, self._pads_uneven)

    @property
    def _pads_uneven(self) -> bool:
        """Whether uneven pins are constraints inside the step; in microbatches these would not split whole rows."""
        return self.options.uneven == "pad" and not self.options.pipeline

    @stage
    def pins(self) -> Pins:
        """The pins of ``program``, checked; its variants have pins of their own, since their values have other ids."""
        mesh = self.options.mesh
        return self.user_pins.resolve(padded_variant(self.program, {}, mesh, self.user_pins), mesh)

    @stage
    def planned(self) -> PlannedProgram:
        """The program that runs and its plan: the given plan if it fits, else a new one."""
        o = self.options
        if self.chosen is not None:
            return self.chosen
        if o.plan is not None:
            return self._check_given_plan(o.plan)
        start = None if o.pipeline or self.uneven or (o.remat, o.host) != ("off", "off") else self.start
        if start is not None and (found := start.replan(self.user_pins)):
            return found
        if self.former is not None:
            return self._take_over(self.former)
        return self._plan(self.user_pins)

    def _plan(self, pins: UserPins, memory: float | None = None, is_brief: bool = False) -> PlannedProgram:
        o = self.options
        limits, remat, memory = EFFORTS[o.effort], o.remat != "off", o.memory if memory is None else memory
        limits = briefly(limits) if is_brief else limits
        if o.host == "auto" and not o.mesh.topology.host_memory:
            raise ArgumentError(f"host='auto': {no_host_memory(o.mesh.topology)}")
        return plan_best_variant(
            *(self.program, o.mesh, pins, memory, o.overlap, o.time_limit, limits, remat, o.host == "auto"),
            staging=self.staging if remat else None,
        )

    @property
    def staging(self) -> Staging:
        """The program before it is cut into stages, and what cuts it."""
        return Staging(
            self.checked, lambda program, recompute: self.with_uneven_pins(self._in_stages(program, recompute))
        )

    def takes(self, given: GivenLayouts) -> bool:
        """Whether arguments lie where the plan takes them, those that lie anywhere."""
        taken = (array.layout for array in self.planned.plan.inputs)
        pairs = zip(given.layouts, taken, strict=True)
        return all(
            at is None
            or (all(layout.on(axis) is placed for axis, placed in at.placements) and at.memory in ("", layout.memory))
            for at, layout in pairs
        )

    def has_program_of(self, other: "CallStages") -> bool:
        """Whether the traced programs are equal but for weak types, under equal pins, so that they share a plan."""
        if self.settings.values != other.settings.values or self._cuts != other._cuts:
            return False
        if self.options.layouts != other.options.layouts:  # arguments that are pinned as given, and lie otherwise
            return False
        return is_equal_but_weak(self.traced, other.traced)

    @property
    def _cuts(self) -> Any:
        """Where devices cut the arguments of a step that is written for one device."""
        return self.devices and (self.devices.axes, self.devices.splits)

    def _take_over(self, former: "CallStages") -> PlannedProgram:
        """Return the plan of ``former`` for this program, or a plan between its layouts if the programs differ."""
        before = former.planned.plan
        if self.has_program_of(former):
            return PlannedProgram(self._padded_as(before), before)
        free = (array for array in before.outputs if not array.follows)
        inputs, outputs = dict(_kept(before.inputs, self.program.inputs)), dict(_kept(free, self.program.outputs))
        try:
            return self._plan(replace(self.user_pins, layouts=inputs, outputs=outputs))
        except (MemoryLimitError, PinError):
            return self._plan(self.user_pins)

    def _check_given_plan(self, plan: Plan) -> PlannedProgram:
        """Return the program padded as in ``plan``; PlanFileError if the plan is not one of this program."""
        padded = self._padded_as(plan)
        pins = self.user_pins.resolve(padded, self.options.mesh)
        check_same_program(plan, padded, self.options.mesh, pins, self.options.memory)
        check_runnable(plan, padded, pins.donated, self.options.memory)
        return PlannedProgram(padded, plan)

    def _padded_as(self, plan: Plan) -> TracedProgram:
        """Return the program with what ``plan`` pads, its regions, what it keeps on the host and computes again."""
        known, program = plan.recomputation, self.program
        if known and known.stages and self.options.pipeline:
            possible = recomputable(self.checked).intersection(known.ops)
            made = recomputing(self.checked, possible, known.spared)
            program = self.staging.cut(made.program, known.stages)
        padded = padded_variant(program, dict(plan.padded), self.options.mesh, self.user_pins, plan.regions)
        inputs, outputs = (
            {i for i, array in enumerate(arrays[: len(leaves)]) if array.layout.memory == "host"}
            for arrays, leaves in ((plan.inputs, padded.inputs), (plan.outputs, padded.outputs))
        )
        if inputs or outputs:
            padded = keep_on_host(padded, inputs, outputs, self.user_pins.resolve(padded, self.options.mesh).follows)
        if known is None or known.stages:
            return padded
        if known.divided:
            padded = dividing(padded, dict(known.divided)).program
        possible = recomputable(padded).intersection(known.ops)  # in another program, other operations have these ids
        hosted = hostable(padded.graph).intersection(known.hosted) if known.hosted else ()
        return recomputing(padded, possible, known.spared, hosted).program

    @property
    def executable(self) -> Executable:
        """The planned program on the devices of the options."""
        return self.executable_on(device_mesh(self.options.mesh, self.options.devices))

    def executable_on(self, devices: jax.sharding.Mesh) -> Executable:
        """Return the planned program on a mesh of devices; it is compiled once for each."""
        if devices not in self._executables:
            found, donated = self.planned, self.user_pins.donated
            self._executables[devices] = Executable(found.program, found.plan, devices, donated, self.settings)
        return self._executables[devices]

    @cached_property
    def _executables(self) -> dict[jax.sharding.Mesh, Executable]:
        return {}

    @cached_property
    def most_divided(self) -> "CallStages":
        """The stages of the same call planned to divide as much as they can, within the same pins."""
        mesh = Mesh(topology=SLOW_DEVICES, **self.options.mesh.sizes_by_name)
        options = replace(self.options, mesh=mesh, plan=None, memory=None, overlap=OFF, remat="off", host="off")
        return CallStages(self.step, options, self.traced, settings=self.settings)

    def plan_pinned(self, layouts: Mapping[str, Layout | str]) -> Plan:
        """Return a new plan of ``program`` with these layouts in place of the options'."""
        with self.settings.lowering():
            return self._plan(replace(self.user_pins, layouts=layouts)).plan

    def plan_within(self, memory: float, is_brief: bool = False) -> Plan:
        """Return a new plan of ``program`` within so many bytes per device, in place of the options' limit.

        It is the fastest with any alternative.

        Args:
          is_brief: an error says the least memory found, and nothing of larger meshes.
        """
        plans, faults = list[Plan](), list[MemoryLimitError]()
        with self.settings.lowering():
            for stages in (self, *self.rivals):
                try:
                    plans.append(stages._plan(stages.user_pins, memory, is_brief).plan)
                except MemoryLimitError as error:
                    faults.append(error)
        if not plans:
            raise min(faults, key=lambda error: error.least or inf)
        return min(plans, key=self.seconds_of)

    def seconds_of(self, plan: Plan) -> float:
        """Return the seconds by which plans of this call are chosen."""
        return plan.simulated_seconds if self.options.overlap.simulates else plan.seconds

    @property
    def new_plan(self) -> PlannedProgram | None:
        """The plan found here, for other pins to start from; None before planning, or if the plan was given."""
        return None if self.options.plan is not None else self.chosen or vars(self).get("planned")


def _kept(arrays: Iterable[Array], leaves: Iterable[Leaf]) -> Iterator[tuple[str, Layout]]:
    """Yield pins to the planned layouts of those arrays that are still there."""
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    return ((array.path or "*", array.layout) for array in arrays if shapes.get(array.path) == array.shape)
