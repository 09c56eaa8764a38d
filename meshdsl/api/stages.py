"""One kind of call of a step on its way to an executable, stage by stage.

    traced     the graph of the whole batch; independent of mesh and pins      meshdsl.trace
    checked    the same on this mesh, without rows of rules that do not hold   meshdsl.pins, meshdsl.custom_rules
    program    the same in microbatches, or as a pipeline                      meshdsl.pipelining
    pins       what the user fixed, resolved for the program and checked       meshdsl.pins
    planned    the best variant of the program with its plan                   meshdsl.api.plan_variants
    executable the program under its plan on devices, compiled on first use    meshdsl.api.executable

Each stage is computed on first use from the ones above, and its result is kept: ``print(sharded.stages(*args).traced)``
shows the graph. Two calls are of one kind if trees, shapes, dtypes, static arguments and jax's settings are equal
(``call_key``).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from meshdsl.api.axis_names import trace_found
from meshdsl.api.executable import Executable
from meshdsl.api.options import Options, donated_leaves, jax_settings
from meshdsl.api.plan_variants import PlannedProgram, plan_best_variant
from meshdsl.custom_rules import check_rules
from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.solution import Pins
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import Link, Topology
from meshdsl.lowering.shardings import device_mesh
from meshdsl.padding.uneven_pins import UnevenPins, padded_variant
from meshdsl.pins import UserPins, fit_constraints
from meshdsl.pipelining import to_microbatches
from meshdsl.plan.plan import Plan
from meshdsl.plan.validate import check_runnable, check_same_program
from meshdsl.trace import Call, trace_call
from meshdsl.trace.device_axes import DeviceMap

SLOW_DEVICES = Topology(  # no message costs anything beside their work, and starting an operation costs nothing
    "slow devices", flops16=1e6, flops32=1e6, memory_bandwidth=1e6, memory=1e18, overhead=0.0, links=(Link(0.0, 1e12),)
)


def call_key(call: Call) -> Any:
    """Return a hashable key that is equal for calls of one kind, which share all stages."""
    static = tuple(sorted(call.static.items(), key=str))
    return call.tree, static, tuple(map(_abstract_value, call.leaves)), jax_settings()


def _abstract_value(x: Any) -> tuple[Any, ...]:
    aval = x if hasattr(x, "dtype") else jax.typeof(x)
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))


def trace_for(step: Callable[..., Any], options: Options, call: Call) -> tuple[DeviceMap | None, TracedProgram]:
    """Return the program of a call, the whole batch at once.

    It depends on the mesh and the pins only if the step is written for one device; the map of devices is returned then.
    """
    keep_cuts, keep = bool(options.pipeline and options.pipeline.axis), options.constraints == "keep"
    inside = options.rules.inside
    return trace_found(lambda devices: trace_call(step, call, inside, keep_cuts, devices, keep), options, call)


@dataclass(frozen=True)
class CallStages:
    """The stages of one kind of call under one set of options.

    Args:
      traced: the step's program, from ``trace_for``.
      devices: from ``trace_for``, for a step that is written for one device.
      start: a plan of the same program under other pins, from which planning starts.
    """

    step: Callable[..., Any]
    options: Options
    traced: TracedProgram
    devices: DeviceMap | None = None
    start: PlannedProgram | None = None

    @cached_property
    def user_pins(self) -> UserPins:
        """What the user fixed, for every rewrite of the program to resolve."""
        o = self.options
        return UserPins(o.layouts, o.outputs, o.rules, donated_leaves(self.step, self.traced, o), o.uneven)

    @cached_property
    def checked(self) -> TracedProgram:
        """The traced program, its constraints fitted to the mesh, and its user-defined rules checked.

        Rules are checked on simulated devices; this executes user code.
        """
        program = check_rules(fit_constraints(self.traced, self.options.mesh))
        unused = self.user_pins.unused_rules(program)
        return replace(program, notes=[*program.notes, *unused], warnings=[*program.warnings, *unused])

    @cached_property
    def program(self) -> TracedProgram:
        """The program that is planned: in microbatches or as a pipeline, and uneven pins as constraints, if asked."""
        o = self.options
        program = to_microbatches(self.checked, o.pipeline, o.mesh, self.user_pins) if o.pipeline else self.checked
        return self.with_uneven_pins(program)

    def with_uneven_pins(self, program: TracedProgram) -> TracedProgram:
        """Return a program of this call with notes on its uneven pins, and constraints if they are to be padded."""
        if not self.uneven:
            return program
        padded = self.options.uneven == "pad" and not self.options.pipeline
        notes = [*program.notes, *self.uneven_notes]
        return replace(self.uneven.constrained(program) if padded else program, notes=notes)

    @cached_property
    def uneven(self) -> UnevenPins:
        """The pins that do not divide and are loosened; none if that is an error."""
        o = self.options
        return UnevenPins({}, {}) if o.uneven == "error" else UnevenPins.of(self.checked, o.mesh, self.user_pins)

    @cached_property
    def uneven_notes(self) -> list[str]:
        """What becomes of these pins, in sentences."""
        o = self.options
        return self.uneven.notes(self.checked, o.mesh, padded=o.uneven == "pad" and not o.pipeline)

    @cached_property
    def pins(self) -> Pins:
        """The pins of ``program``, checked; its variants have pins of their own, since their values have other ids."""
        mesh = self.options.mesh
        return self.user_pins.resolve(padded_variant(self.program, {}, mesh, self.user_pins), mesh)

    @cached_property
    def planned(self) -> PlannedProgram:
        """The program that runs and its plan: the given plan if it fits, else a new one."""
        o = self.options
        if o.plan is not None:
            return self._check_given_plan(o.plan)
        start = None if o.pipeline or self.uneven else self.start
        if start is not None and (found := start.replan(self.user_pins)):
            return found
        return plan_best_variant(self.program, o.mesh, self.user_pins, o.memory, o.overlap, o.time_limit)

    def _check_given_plan(self, plan: Plan) -> PlannedProgram:
        """Return the program padded as in ``plan``; PlanFileError if the plan is not one of this program."""
        padded = padded_variant(self.program, dict(plan.padded), self.options.mesh, self.user_pins)
        pins = self.user_pins.resolve(padded, self.options.mesh)
        check_same_program(plan, padded, self.options.mesh, pins, self.options.memory)
        check_runnable(plan, padded, pins.donated, self.options.memory)
        return PlannedProgram(padded, plan)

    @cached_property
    def executable(self) -> Executable:
        """The planned program on the devices of the options."""
        return self.executable_on(self.options.devices)

    def executable_on(self, devices: Sequence[jax.Device] | None) -> Executable:
        """Return the planned program on other devices; None takes the first of all."""
        found = self.planned
        return Executable(found.program, found.plan, device_mesh(self.options.mesh, devices), self.user_pins.donated)

    @cached_property
    def most_divided(self) -> "CallStages":
        """The stages of the same call planned to divide as much as they can, within the same pins."""
        mesh = Mesh(topology=SLOW_DEVICES, **self.options.mesh.sizes_by_name)
        return CallStages(
            self.step, replace(self.options, mesh=mesh, plan=None, memory=None, overlap=False), self.traced
        )

    def plan_pinned(self, layouts: Mapping[str, Layout | str]) -> Plan:
        """Return a new plan of ``program`` with these layouts in place of the options'."""
        o, donated = self.options, self.user_pins.donated
        pins = UserPins(layouts, o.outputs, o.rules, donated, o.uneven)
        return plan_best_variant(self.program, o.mesh, pins, o.memory, o.overlap, o.time_limit).plan

    @property
    def new_plan(self) -> PlannedProgram | None:
        """The plan found here, for other pins to start from; None before planning, or if the plan was given."""
        return None if self.options.plan is not None else vars(self).get("planned")
