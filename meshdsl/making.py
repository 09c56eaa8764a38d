"""From a step to its plan, stage by stage: traced, taken in turns, pinned, planned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshdsl.ir import Program
from meshdsl.options import Options, donated_leaves
from meshdsl.pad import Chosen, choose_plan, pad_program
from meshdsl.pins import make_pins
from meshdsl.plan.match import check_match
from meshdsl.plan.sound import check_sound
from meshdsl.plan.value import Plan
from meshdsl.planner.solution import Pins
from meshdsl.trace import Call, trace
from meshdsl.turns import in_turns


@dataclass(frozen=True)
class Making:
    """A step with all that it was asked to be planned with."""

    step: Callable[..., Any]
    options: Options

    def trace(self, call: Call) -> Program:
        """The program of a call, the whole batch at once; it does not depend on the mesh."""
        static, rules = (self.options.static_argnums, self.options.static_argnames), self.options.rules.inside
        cuts = bool(self.options.pipeline and self.options.pipeline.axis)
        return trace(self.step, call.args(call.leaves), call.kwargs(call.leaves), *static, rules, cuts)

    def take_turns(self, program: Program) -> Program:
        """The program in microbatches, if that was asked for."""
        pipeline = self.options.pipeline
        return in_turns(program, pipeline, self.options.mesh, self.pins) if pipeline else program

    def pins(self, program: Program) -> Pins:
        """The pins of a program, checked."""
        donated, o = donated_leaves(self.step, program.inputs, self.options), self.options
        return make_pins(program, o.mesh, o.layouts, o.outputs, donated, o.rules)

    def choose(self, program: Program, before: Chosen | None = None) -> Chosen:
        """A new plan of a program.

        Args:
          before: what was chosen for it under other pins, to begin from.
        """
        o = self.options
        chosen = before and before.again(self.pins)
        return chosen or choose_plan(program, o.mesh, self.pins, o.memory, o.overlap, o.time_limit)

    def plan(self, program: Program) -> tuple[Program, Plan]:
        """The program to run and its plan: the given one if it fits, else a new one."""
        mesh, given, memory = self.options.mesh, self.options.plan, self.options.memory
        if given is None:
            chosen = self.choose(program)
            return chosen.program, chosen.plan
        padded = pad_program(program, dict(given.padded))
        pins = self.pins(padded)
        check_match(given, padded, mesh, pins, memory)
        check_sound(given, padded, pins.donated, memory)
        return padded, given

    def make(self, call: Call) -> tuple[Program, Plan]:
        """Both for a call."""
        return self.plan(self.take_turns(self.trace(call)))
