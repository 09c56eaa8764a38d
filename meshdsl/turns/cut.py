"""A step that ``md.stage`` cuts, as a pipeline over a named axis."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from meshdsl.errors import PipelineError, nearest
from meshdsl.ir import Graph, Program
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.pipeline.pipelined import Pipelined
from meshdsl.pipeline.spec import Pipeline
from meshdsl.planner.solution import Pins
from meshdsl.trace.graphs import Table, kept, substitute, with_ops
from meshdsl.trace.phases import BACKWARD
from meshdsl.turns.accumulate import retraced
from meshdsl.turns.loads import Clock
from meshdsl.turns.parted import PartedStep
from meshdsl.turns.parts import find_parts
from meshdsl.turns.places import EACH, Placing
from meshdsl.turns.placing import place_step
from meshdsl.turns.rota import Rota


def by_parts(
    program: Program, asked: Pipeline, mesh: Mesh, batch: Sequence[int], pins_of: Callable[[Program], Pins]
) -> Program:
    """The program as a pipeline of the parts that ``md.stage`` cuts.

    Args:
      batch: positions of the inputs that are split in microbatches.

    Raises PipelineError if there is no such axis, no cut, or if the parts are no stages; PinError as ``make_pins``.
    """
    if mesh.sizes_by_name.get(asked.axis, 1) == 1:
        raise PipelineError(f"no axis {asked.axis!r} with several devices{nearest(asked.axis, mesh.names)}")
    if not any(op.name == "stage" for op in program.graph.ops):
        text = "a scan over layers needs none, there a rule such as layers:pipe says it"
        raise PipelineError(f"Pipeline(axis={asked.axis!r}) is for a step that md.stage cuts, and nothing does; {text}")
    again = [op for op in program.graph.ops if op.name == "stage" and not op.params["back"] and op.phase == BACKWARD]
    if again:
        text = f"md.stage at {again[0].source} is run again in the backward pass"
        raise PipelineError(f"{text}; put jax.checkpoint inside of parts, not around the cuts between them")
    pins_of(program)
    ids, examples = [program.graph.inputs[i].id for i in batch], program.inputs[batch[0]].shape[0]
    placing = place_step(program.graph, asked.microbatches, ids, asked.per_microbatch)
    graph, clock = _trimmed(program.graph, placing), Clock(program.graph, mesh)
    seconds = {op.id: clock.seconds([op]) for op in graph.ops if placing.in_turns(op)}
    parts = find_parts(graph, placing, mesh.axis(asked.axis), seconds, asked)
    made = Pipelined(asked, asked.axis, mesh.axis(asked.axis), parts.forward_only, parts.sizes)
    free = _divides(program.graph, placing, ids, examples, asked)
    step = PartedStep(graph, parts, Rota(made.table, made.rooms), asked.axis, free, mesh)
    made = replace(made, loads=step.loads)
    notes = [f"{made}; {len(step.inside)} of {len(graph.ops) - 1} operations run per microbatch"]
    notes += _other_axes(mesh, asked.axis, free, step.examples)
    ignored = [op for op in graph.ops if op.name == "constrain" and placing.in_turns(op)]
    if ignored:
        notes.append(f"layouts that are stated inside of stages are not followed, the first at {ignored[0].source}")
    return replace(program, graph=retraced(graph, step.run), notes=[*program.notes, *notes], pipeline=made)


def _other_axes(mesh: Mesh, axis: str, free: bool, split: bool) -> Iterator[str]:
    """What axes beside that of the stages do for their work.

    Args:
      free: examples of a microbatch do not depend on each other. split: these axes split them.
    """
    others = [name for name, size in mesh.sizes_by_name.items() if name != axis and size > 1]
    if not others:
        return
    if split:
        yield f"over {', '.join(others)} stages are split by examples alone, and have the weights that they read whole"
        return
    why = (
        "the largest or smallest of all examples is wanted" if free else "examples of a microbatch depend on each other"
    )
    yield f"{why}, so that {', '.join(others)} cannot split the work of stages"


def _trimmed(graph: Graph, placing: Placing) -> Graph:
    """The graph whose cuts hand on only what is known per example; the rest goes past them."""
    table, ops = Table(), []
    for op in graph.ops:
        op = substitute(op, table)
        if op.name == "stage":
            stays = [isinstance(placing.of(v), Split) for v in op.outputs]
            table.update({v.id: x for v, x, s in zip(op.outputs, op.inputs, stays, strict=True) if not s})
            op = replace(op, inputs=kept(op.inputs, stays), outputs=kept(op.outputs, stays))
        if op.name != "stage" or op.outputs:
            ops.append(op)
    return with_ops(graph, ops)


def _divides(graph: Graph, placing: Placing, batch: Sequence[int], examples: int, asked: Pipeline) -> bool:
    """Whether every example could be a turn of its own, so that any number of them is a block."""
    if EACH in placing.places.values():
        return False
    try:
        single = place_step(graph, examples, batch, asked.per_microbatch)
    except PipelineError:
        return False
    return single.places == placing.places and single.rows == placing.rows
