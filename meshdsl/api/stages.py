"""What a step's calls go through, each stage kept for the next call like it.

    arguments --trace--> program --pad, solve--> solution --> plan --lower--> executable

Calls are alike if trees, shapes, dtypes, static arguments and settings of jax are.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshdsl.api.executable import Executable
from meshdsl.api.options import Options, donated_leaves, settings
from meshdsl.api.plan_variants import PlannedProgram, plan_best_variant
from meshdsl.ir.graph import Leaf, TracedProgram
from meshdsl.ir.solution import Pins
from meshdsl.lowering.shardings import device_mesh
from meshdsl.padding import pad_program
from meshdsl.pins import make_pins
from meshdsl.pipelining import to_microbatches
from meshdsl.plan.plan import Plan
from meshdsl.plan.validate import check_runnable, check_same_program
from meshdsl.trace import Call, flatten_call, trace

# ---- Making ----------------------------------------------------------------------------------------------------------
# From a step to its plan, stage by stage: traced, taken in turns, pinned, planned.


@dataclass(frozen=True)
class Stages:
    """A step with all that it was asked to be planned with."""

    step: Callable[..., Any]
    options: Options

    def trace(self, call: Call) -> TracedProgram:
        """The program of a call, the whole batch at once; it does not depend on the mesh."""
        static, rules = (self.options.static_argnums, self.options.static_argnames), self.options.rules.inside
        cuts = bool(self.options.pipeline and self.options.pipeline.axis)
        return trace(self.step, call.args(call.leaves), call.kwargs(call.leaves), *static, rules, cuts)

    def take_turns(self, program: TracedProgram) -> TracedProgram:
        """The program in microbatches, if that was asked for."""
        pipeline = self.options.pipeline
        return to_microbatches(program, pipeline, self.options.mesh, self.pins) if pipeline else program

    def pins(self, program: TracedProgram) -> Pins:
        """The pins of a program, checked."""
        donated, o = donated_leaves(self.step, program.inputs, self.options), self.options
        return make_pins(program, o.mesh, o.layouts, o.outputs, donated, o.rules)

    def choose(self, program: TracedProgram, before: PlannedProgram | None = None) -> PlannedProgram:
        """A new plan of a program.

        Args:
          before: what was chosen for it under other pins, to begin from.
        """
        o = self.options
        chosen = before and before.again(self.pins)
        return chosen or plan_best_variant(program, o.mesh, self.pins, o.memory, o.overlap, o.time_limit)

    def plan(self, program: TracedProgram) -> tuple[TracedProgram, Plan]:
        """The program to run and its plan: the given one if it fits, else a new one."""
        mesh, given, memory = self.options.mesh, self.options.plan, self.options.memory
        if given is None:
            chosen = self.choose(program)
            return chosen.program, chosen.plan
        padded = pad_program(program, dict(given.padded))
        pins = self.pins(padded)
        check_same_program(given, padded, mesh, pins, memory)
        check_runnable(given, padded, pins.donated, memory)
        return padded, given

    def make(self, call: Call) -> tuple[TracedProgram, Plan]:
        """Both for a call."""
        return self.plan(self.take_turns(self.trace(call)))


# ---- Kept ------------------------------------------------------------------------------------------------------------


log = logging.getLogger("meshdsl")


class StageCache:
    """The stages of one step under one set of options.

    Args:
      like: the same step under other options, planned from where that one's plans were found.
    """

    def __init__(self, step: Callable[..., Any], options: Options, like: "StageCache | None" = None) -> None:
        self.options, self.making = options, Stages(step, options)
        self.planned: dict[Any, tuple[TracedProgram, Plan]] = {}
        self._traced: dict[Any, TracedProgram] = like._traced if like else {}
        self._chosen: dict[Any, PlannedProgram] = {}
        self._before: dict[Any, PlannedProgram] = {**like._before, **like._chosen} if like else {}
        self._ready: dict[Any, Executable] = {}

    def call(self, args: Any, kwargs: Any) -> Call:
        """The arguments as flat arrays."""
        static = self.options.static_argnums, self.options.static_argnames
        return flatten_call(self.making.step, args, kwargs, *static)

    def trace(self, call: Call) -> TracedProgram:
        """The program as it is planned: in microbatches, if that was asked for."""
        key = _key(call)
        if key not in self._traced:
            self._traced[key] = self.making.trace(call)
        return self.making.take_turns(self._traced[key])

    def plan(self, call: Call) -> tuple[TracedProgram, Plan]:
        """The program that runs, and its plan."""
        key = _key(call)
        if key not in self.planned:
            program = self.trace(call)
            self._log_again(program)
            self.planned[key] = self._made(key, program)
        return self.planned[key]

    def executable(self, call: Call) -> Executable:
        """The plan on the devices at hand."""
        key = _key(call)
        if key not in self._ready:
            self._ready[key] = self.on(call, self.options.devices)
        return self._ready[key]

    def on(self, call: Call, devices: Sequence[jax.Device] | None) -> Executable:
        """The plan on other devices; not kept."""
        mesh = device_mesh(self.options.mesh, devices)
        program, plan = self.plan(call)
        return Executable(program, plan, mesh, donated_leaves(self.making.step, program.inputs, self.options))

    def _made(self, key: Any, program: TracedProgram) -> tuple[TracedProgram, Plan]:
        if self.options.plan is not None:
            return self.making.plan(program)
        chosen = self.making.choose(program, None if self.options.pipeline else self._before.get(key))
        self._chosen[key] = chosen
        return chosen.program, chosen.plan

    def _log_again(self, program: TracedProgram) -> None:
        """One line when a step that has been planned is planned for other shapes."""
        if not self.planned or self.options.plan is not None:
            return
        before, _ = next(reversed(self.planned.values()))
        known = {leaf.path: leaf for leaf in before.inputs}
        new = [leaf for leaf in program.inputs if known.get(leaf.path) != leaf]
        what = f"{new[0].path} is {_type(new[0])}" if new else _other_change(before, program)
        more = f" and {len(new) - 1} more changed" if len(new) > 1 else ""
        log.warning("planning %s again: %s%s", program.name, what, more)


def _key(call: Call) -> Any:
    """What of a call a plan depends on."""
    return call.tree, tuple(sorted(call.static.items(), key=str)), tuple(map(_typed, call.leaves)), settings()


def _type(leaf: Leaf) -> str:
    return f"{'weak ' if leaf.weak else ''}{leaf.dtype}{list(leaf.shape)}"


def _other_change(before: TracedProgram, after: TracedProgram) -> str:
    changed = before.in_tree != after.in_tree
    return "the tree of its arguments changed" if changed else "a static argument or a setting of jax changed"


def _typed(x: Any) -> tuple[Any, ...]:
    """What of an argument a plan depends on."""
    aval = x if hasattr(x, "dtype") else jax.typeof(x)
    return tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False))
