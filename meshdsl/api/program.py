"""Program: a step with everything that planning, training and the command line need to know."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshdsl.api.sharded import Sharded, parallelize
from meshdsl.errors import ArgumentError, faults, is_a
from meshdsl.ir.graph import TracedProgram as Traced
from meshdsl.ir.rewrite import makers_of, origin, values
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import follows
from meshdsl.plan.plan import Plan
from meshdsl.schedules.spec import Pipeline
from meshdsl.trace import trace
from meshdsl.trace.annotate import FORWARD

# ---- Program ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """What a program file defines as ``program``, or returns from ``program()``.

    Args:
      step: the function that is planned.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``; tuples are positional.
      layouts: pins by globs over the arguments' paths.
      rules: mesh axes by named dims, a text or ``md.Rules``.
      pipeline: how the step takes its batch in microbatches.
      overlap: whether the plan is chosen by the time with overlap, as ``parallelize`` does it.
      init: makes the arguments that the step replaces, for training.
      batches: the batches of a training run, from the first: ``meshdsl.training.batches.Batches`` or any iterable.
      evaluate: ``(*state) -> {"held-out loss": 1.3, ...}``, measured on the trained arguments.
      steps: how long a training run is if nothing else is said.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    layouts: Mapping[str, Layout | str] | None = None
    rules: Rules | str | None = None
    pipeline: Pipeline | None = None
    init: Callable[..., Any] | None = None
    batches: Callable[..., Iterable[Any]] | None = None
    evaluate: Callable[..., Mapping[str, Any]] | None = None
    steps: int | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no program."""
        callables = [name for name in ("step", "init", "batches", "evaluate") if self._is_no_function(name)]
        rows = [f"{name}: {is_a(getattr(self, name))}, not a function" for name in callables]
        if not isinstance(self.args, tuple):
            rows.append(f"args: {is_a(self.args)}, not the tuple of the step's arguments")
        if self.layouts is not None and not isinstance(self.layouts, Mapping):
            rows.append(f"layouts: {is_a(self.layouts)}, not a dict of layouts by globs")
        if self.rules is not None and not isinstance(self.rules, Rules | str):
            rows.append(f"rules: {is_a(self.rules)}, not layout rules, such as 'batch:data hidden:model'")
        if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):
            rows.append(f"pipeline: {is_a(self.pipeline)}, not a pipeline, such as md.Pipeline(microbatches=8)")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            rows.append(f"steps: {is_a(self.steps)}, not a number of training steps")
        if not isinstance(self.overlap, bool):
            rows.append(f"overlap: {is_a(self.overlap)}, neither True nor False")
        if rows:
            raise ArgumentError(faults("arguments of Program that do not fit:", rows))

    def _is_no_function(self, name: str) -> bool:
        value = getattr(self, name)
        return not callable(value) and (value is not None or name == "step")


# ---- Stacks ----------------------------------------------------------------------------------------------------------
# Stacks of layers as stages: where nothing says what lies on the mesh axis ``pipe``, the layers of a program do.


AXIS = "pipe"


def pipe_layouts(program: Program, rules: Rules, traced: Callable[[], Traced]) -> Mapping[str, Layout | str]:
    """The program's own layouts, and where nothing lies on the axis of stages, its layers do.

    Args:
      rules: that it is planned under.
      traced: gives the program as it is traced, where that is needed.
    """
    own = dict(program.layouts or {})
    ruled = any(AXIS in axes for table in rules.tables.values() for axes in table.values())
    if ruled or any(AXIS in Layout.of(layout).axes for layout in own.values()):
        return own
    return {**dict.fromkeys(stacked_parameters(traced()), f"{AXIS}=S(0)"), **own}


def stacked_parameters(program: Traced) -> list[str]:
    """The parameters that the longest forward scan over parameters goes over: stacks of layers."""
    graph, replaced = program.graph, {i for i in follows(program.inputs, program.outputs) if i is not None}
    makers = makers_of(graph)
    paths = {
        v.id: leaf.path for i, (v, leaf) in enumerate(zip(graph.inputs, program.inputs, strict=True)) if i in replaced
    }
    found: list[tuple[int, list[str]]] = []
    for op in graph.ops:
        if op.name == "scan" and op.phase == FORWARD:
            stacks = op.inputs[op.params["num_consts"] + op.params["num_carry"] :]
            origins = (origin(x, makers) for x in values(stacks))
            found.append((op.params["length"], [paths[x.id] for x in origins if x.id in paths]))
    return max((own for own in found if own[1]), default=(0, []))[1]


# ---- Planned ---------------------------------------------------------------------------------------------------------
# An ``md.Program`` as it is planned over a mesh: its step, with the pins and rules that its file states.


def parallelize_program(
    program: Program,
    mesh: Mesh,
    rules: Rules | str | None = None,
    memory: str | None = None,
    plan: Plan | None = None,
) -> Sharded[..., Any]:
    """The program's step over ``mesh``; its state, all arguments but the last, is donated.

    In a pipeline, stacks of layers lie on the mesh axis ``pipe`` where nothing else does.

    Args:
      rules: instead of the program's own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
      plan: run this plan instead of planning.
    """
    stated = program.rules if rules is None else rules
    state = tuple(range(len(program.args) - 1))
    return parallelize(
        program.step,
        mesh,
        _layouts(program, mesh, stated),
        rules=stated,
        memory=memory,
        donate_argnums=state,
        plan=plan,
        pipeline=program.pipeline,
        overlap=program.overlap and plan is None,
    )


def _layouts(program: Program, mesh: Mesh, rules: Rules | str | None) -> Mapping[str, Layout | str] | None:
    if program.pipeline is None or program.pipeline.axis or AXIS not in mesh.names:
        return program.layouts
    own = Rules.of(rules or Rules())
    return pipe_layouts(program, own, lambda: trace(program.step, program.args, inside=own.inside))
