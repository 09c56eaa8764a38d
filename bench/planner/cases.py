"""The planned steps: a model of every family on meshes of one, two and three axes, the batch pinned to ``data``."""

import time
from dataclasses import dataclass
from functools import cache

from bench.example_steps import deep_gpt
from meshdsl import models
from meshdsl.api import Program
from meshdsl.ir.graph import TracedProgram as Traced
from meshdsl.ir.graph import walk
from meshdsl.ir.solution import Pins
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.mesh import Mesh
from meshdsl.models import mlp
from meshdsl.pins import make_pins
from meshdsl.plan.types import relative_gap
from meshdsl.planner.objective import CostedPlan
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search.search import search
from meshdsl.trace import trace
from meshdsl.util.runtime import gc_paused

TOPOLOGY = "dgx-h100"
FAMILIES = (
    "mlp dlrm wide-and-deep gpt2-124m llama3-8b switch-base mixtral-8x7b mamba-130m resnet50 t5-small vit-b".split()
)
MESHES = ("data=8", "data=4,model=2", "pod=2,data=2,model=2")
RULES = Rules("batch:data")


@dataclass(frozen=True)
class PlannedStep:
    """A plan without a memory limit, its lower bound, and the processor seconds of planning without tracing."""

    model: Model
    pins: Pins
    choice: CostedPlan
    bound: float
    seconds: float

    @property
    def cost(self) -> float:
        """Predicted seconds per step."""
        return self.model.scale.seconds(self.choice.cost)

    @property
    def gap(self) -> float:
        """Relative optimality gap, ``1 - bound / cost``; 0 if that is rounding."""
        return relative_gap(self.cost, self.bound)

    @property
    def equations(self) -> int:
        """Operations of the step; a loop body counts once."""
        return sum(1 for _ in walk(self.model.problem.program.graph))


@cache
def traced_step(name: str, **sizes: int) -> Traced:
    """Returns the traced training step of a model."""
    program = program_of(name, **sizes)
    return trace(program.step, program.args)


def program_of(name: str, **sizes: int) -> Program:
    """Returns the program of a model."""
    return mlp.program() if name == "mlp" else models.build(name, "data", **sizes)


def unrolled_gpt(layers: int) -> tuple[Traced, Program]:
    """Returns the demo's GPT with ``layers`` unrolled layers, traced, and its program."""
    program = deep_gpt(layers)
    return trace(program.step, program.args), program


@gc_paused
def plan_on(program: Traced, mesh: str, rules: Rules | None = RULES, **pins_of: object) -> PlannedStep:
    """Plans a step on a mesh; ``pins_of`` are further pins as ``make_pins`` takes them."""
    start = time.process_time()
    over = Mesh.parse(mesh, TOPOLOGY)
    pins = make_pins(program, over, rules=rules, **pins_of)
    model = Model(make_problem(program, over, pins))
    found = search(model)
    return PlannedStep(model, pins, found.plan, found.lower_bound(), time.process_time() - start)
