"""``Program``: a step with its arguments, pins and data, as a program file defines it for the command line.

program = md.Program(step, (params, batch), rules="batch:data hidden:model")      # train.py

$ meshdsl plan train.py --mesh data=4,model=2
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.api.options import HOSTS, REMAT, UNEVEN, parse_choice, parse_constraints, parse_low_bits
from meshdsl.api.overlap_option import Overlap, parse_overlap
from meshdsl.api.sharded import Sharded, parallelize
from meshdsl.errors import ArgumentError, called, faults, is_a
from meshdsl.ir.graph import TracedProgram
from meshdsl.ir.index import producers
from meshdsl.ir.loops import split_operands
from meshdsl.ir.rewrite import origin, values
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.low_bits import LowBits
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import AS_GIVEN, LayoutTable, replaced_inputs
from meshdsl.plan.plan import Plan
from meshdsl.schedules.spec import Pipeline
from meshdsl.shardings import StatedTree
from meshdsl.trace import trace
from meshdsl.trace.annotate import FORWARD


@dataclass(frozen=True)
class Program:
    """A step with everything that planning, training and the command line need.

    A program file defines it as ``program``, or returns it from ``program()``.

    Args:
      step: the function that is planned.
      args: its positional arguments, pytrees of arrays or of ``jax.ShapeDtypeStruct``; the last one is the batch, the
        others are the state that the step replaces.
      layouts: pins by globs over the arguments' paths, a strategy such as ``md.fsdp()``, or ``"as-given"``: each of
        ``args`` that has a ``sharding`` is pinned as it lies.
      rules: mesh axes by named dims, a text or ``md.Rules``.
      pipeline: how the step takes its batch in microbatches.
      init: makes the state, for training.
      batches: returns the batches of a training run, from the first: ``meshdsl.training.batches.Batches`` or any
        iterable.
      evaluate: ``(*state) -> {"held-out loss": 1.3, ...}``, measured on the trained state.
      steps: default number of steps of a training run.
      overlap: whether communication is hidden behind computation, as in ``parallelize``.
      axis_names: mesh axes by the axis names of the step's collectives, as in ``parallelize``.
      constraints: what shardings of jax inside the step do, as in ``parallelize``.
      uneven: what becomes of pins that do not divide, as in ``parallelize``.
      remat: who chooses what the backward pass computes again, as in ``parallelize``.
      host: whether the planner chooses what lives in the host's memory, as in ``parallelize``.
      low_bits: how much collectives may round what they send, as in ``parallelize``.

    Raises:
      ArgumentError: lists all fields that are not of these kinds.

    Example:
      >>> program = md.Program(step, (params, batch), layouts={"batch": "data=S(0)"}, steps=100)
      >>> md.search(program, devices=8, axes=("data",)).best.mesh
      'data=8'
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    layouts: Mapping[str, StatedTree] | str | None = None
    rules: Rules | str | None = None
    pipeline: Pipeline | None = None
    init: Callable[..., Any] | None = None
    batches: Callable[..., Iterable[Any]] | None = None
    evaluate: Callable[..., Mapping[str, Any]] | None = None
    steps: int | None = None
    overlap: bool | str | Overlap = False
    axis_names: Mapping[str, str | Sequence[str]] | None = None
    constraints: str = "keep"
    uneven: str = "error"
    remat: str = "off"
    host: str = "off"
    low_bits: LowBits | float | str | None = None

    def __post_init__(self) -> None:
        """Check the kinds of all fields."""
        functions = {"step": self.step, "init": self.init, "batches": self.batches, "evaluate": self.evaluate}
        rows = [
            f"{name}: {is_a(value)}, not a function"
            for name, value in functions.items()
            if not callable(value) and (value is not None or name == "step")
        ]
        if not isinstance(self.args, tuple):
            rows.append(f"args: {is_a(self.args)}, not the tuple of the step's arguments")
        as_given = isinstance(self.layouts, str) and self.layouts == AS_GIVEN
        if self.layouts is not None and not as_given and not isinstance(self.layouts, Mapping):  # as strategies are
            remedy = f"neither a dict of layouts by globs nor {AS_GIVEN!r}{called(self.layouts)}"
            rows.append(f"layouts: {is_a(self.layouts)}, {remedy}")
        if self.rules is not None and not isinstance(self.rules, Rules | str):
            rows.append(f"rules: {is_a(self.rules)}, not layout rules, such as 'batch:data hidden:model'")
        if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):
            rows.append(f"pipeline: {is_a(self.pipeline)}, not a pipeline, such as md.Pipeline(microbatches=8)")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            rows.append(f"steps: {is_a(self.steps)}, not a number of training steps")
        parse_overlap(self.overlap, rows)
        if self.axis_names is not None and not isinstance(self.axis_names, Mapping):
            rows.append(f"axis_names: {is_a(self.axis_names)}, not a dict of mesh axes by axis names")
        parse_constraints(self.constraints, rows)
        parse_choice("uneven", self.uneven, UNEVEN, rows)
        parse_choice("remat", self.remat, REMAT, rows)
        parse_choice("host", self.host, HOSTS, rows)
        parse_low_bits(self.low_bits, rows)
        if rows:
            raise ArgumentError(faults("invalid arguments of Program:", rows))


def with_layouts(program: Program, layouts: Mapping[str, StatedTree]) -> Program:
    """Return the program with more layouts by globs; they come last, and so win, and replace those of equal globs."""
    own = LayoutTable.of(program.layouts)
    others = {glob: layout for glob, layout in own.globs.items() if glob not in layouts}
    return replace(program, layouts=replace(own, globs=others) | layouts)


# ---- Stacks ----------------------------------------------------------------------------------------------------------
# Where no pin or rule shards anything over the mesh axis ``pipe``, the program's stacks of layers are.


AXIS = "pipe"  # the mesh axis of pipeline stages


def pipe_layouts(program: Program, rules: Rules, traced: Callable[[], TracedProgram]) -> LayoutTable:
    """Return the program's layouts, with stacks of layers split over ``pipe`` where nothing else is.

    Args:
      rules: the rules that the program is planned under.
      traced: traces the program; called only if the answer depends on it.
    """
    own = LayoutTable.of(program.layouts)
    ruled = any(AXIS in axes for table in rules.tables.values() for axes in table.values())
    if ruled or AXIS in own.axes:
        return own
    return dict.fromkeys(stacked_parameters(traced()), f"{AXIS}=S(0)") | own


def stacked_parameters(program: TracedProgram) -> list[str]:
    """Return the paths of the stacked parameters: those that the longest forward scan over parameters slices."""
    graph, replaced = program.graph, {i for i in replaced_inputs(program) if i is not None}
    makers = producers(graph)
    paths = {
        v.id: leaf.path for i, (v, leaf) in enumerate(zip(graph.inputs, program.inputs, strict=True)) if i in replaced
    }
    found: list[tuple[int, list[str]]] = []
    for op in graph.ops:
        if op.name == "scan" and op.phase == FORWARD:
            origins = (origin(x, makers) for x in values(split_operands(op, op.inputs).slices))
            found.append((op.params["length"], [paths[x.id] for x in origins if x.id in paths]))
    return max((own for own in found if own[1]), default=(0, []))[1]


# ---- Parallelize a program -------------------------------------------------------------------------------------------


def parallelize_program(
    program: Program,
    mesh: Mesh,
    rules: Rules | str | None = None,
    memory: str | None = None,
    plan: Plan | None = None,
    effort: str = "default",
) -> Sharded[..., Any]:
    """Return the program's step over ``mesh``; its state, all arguments but the last, is donated.

    In a pipeline over the mesh axis ``pipe``, stacks of layers are split over it where nothing else is.

    Args:
      rules: in place of the program's own.
      memory: limit per device, such as ``"60GiB"``; default is the topology's.
      plan: run this plan instead of planning.
      effort: how much planning is worth, as in ``parallelize``.
    """
    used_rules = program.rules if rules is None else rules
    layouts = program.layouts
    if program.pipeline is not None and not program.pipeline.axis and AXIS in mesh.names:
        parsed = Rules.of(used_rules or Rules())
        layouts = pipe_layouts(program, parsed, lambda: trace(program.step, program.args, inside=parsed.inside))
    return parallelize(
        program.step,
        mesh,
        layouts,
        rules=used_rules,
        memory=memory,
        donate_argnums=tuple(range(len(program.args) - 1)),
        plan=plan,
        effort=effort,
        pipeline=program.pipeline,
        overlap=program.overlap if plan is None else False,
        axis_names=program.axis_names,
        constraints=program.constraints,
        uneven=program.uneven,
        remat=program.remat if plan is None else "off",
        host=program.host if plan is None else "off",
        low_bits=program.low_bits if plan is None else None,
    )
