"""The step in microbatches: which inputs are the batch, and whether its layers are stages of a pipeline."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Leaf, TracedProgram
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import UserPins, follows
from meshdsl.pipelining.accumulate import Step, retraced
from meshdsl.pipelining.cut_executor import by_parts
from meshdsl.pipelining.layer_scan import stage_axes
from meshdsl.pipelining.scan_executor import PipelinedStep
from meshdsl.pipelining.scan_stages import find_stages
from meshdsl.pipelining.stage_cost import shares
from meshdsl.pipelining.tick_loops import TickTable
from meshdsl.pipelining.time_axis import analyze_time_axis
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.spec import Pipeline
from meshdsl.util.paths import matches, split_path, suggest


def to_microbatches(program: TracedProgram, asked: Pipeline, mesh: Mesh, user_pins: UserPins) -> TracedProgram:
    """The program in microbatches, as a pipeline where its layers are pinned to lie split over an axis.

    Args:
      user_pins: what the user fixed; resolved, and so checked, for the program on the way.

    Raises PipelineError if there is no batch, if they do not divide it, if the step needs it whole, or if its layers
    are no pipeline; PinError as ``make_pins`` does.
    """
    graph, batch, m = program.graph, find_batch(program, asked), asked.microbatches
    if asked.axis:
        return by_parts(program, asked, mesh, batch, user_pins)
    placing = analyze_time_axis(graph, m, [graph.inputs[i].id for i in batch], asked.per_microbatch)
    split = stage_axes(program, mesh, user_pins.resolve(replace(program, pipeline=Pipelined(asked)), mesh), batch)
    stages, made = find_stages(program, placing, mesh, split, asked), Pipelined(asked)
    if stages:
        stages.layers = shares(graph, stages, mesh, asked)
        made = Pipelined(asked, stages.axis, stages.ranks, stages.forward_only, stages.layers)
    else:
        user_pins.resolve(program, mesh)  # where nothing is dealt out, blocks are equal
    if not stages and m == 1:
        return replace(program, pipeline=made)
    step = PipelinedStep(graph, stages, TickTable(made.table, made.rooms)) if stages else Step(graph, placing)
    notes = [f"{made}; {len(step.inside)} of {len(graph.ops) - 1} operations run per microbatch"]
    if sum(made.layers) % made.ranks:
        notes.append(f"{sum(made.layers)} layers do not divide over {made.axis}: their arrays lie there as is cheapest")
    if not stages and replace(asked, batch=None, per_microbatch=False) != Pipeline(asked.microbatches):
        notes.append(f"there are no stages for {asked.name}: no scan over layers is pinned to lie split over an axis")
    return replace(program, graph=retraced(graph, step.run), notes=[*program.notes, *notes], pipeline=made)


def find_batch(program: TracedProgram, asked: Pipeline) -> list[int]:
    """Positions of the inputs that are split in microbatches; PipelineError if none are, or if they do not divide."""
    leaves = dict(enumerate(program.inputs))
    if asked.batch is not None:
        found = {i: leaf for i, leaf in leaves.items() if matches(asked.batch, leaf.path)}
        more = suggest(asked.batch, [leaf.path for leaf in program.inputs])
        rows = [] if found else [f"batch={asked.batch!r}: matches no input{more}"]
        rows += [f"{leaf.path} {leaf.type}: has no dim to split" for leaf in found.values() if not leaf.shape]
    else:
        kept = _kept(program)
        found = {i: leaf for i, leaf in leaves.items() if i not in kept and leaf.shape}
        rows = [] if found else ["every argument is replaced by a result: Pipeline(batch=...) names the batch"]
    rows = rows or list(_uneven(list(found.values()), asked))
    if rows:
        raise PipelineError(faults(f"microbatches={asked.microbatches} of {program.name}:", rows))
    return list(found)


def _kept(program: TracedProgram) -> set[int]:
    """Inputs that are no batch: what results replace; where they replace nothing, as in an evaluation, the first."""
    replaced = {i for i in follows(program.inputs, program.outputs) if i is not None}
    firsts = [split_path(leaf.path)[0] for leaf in program.inputs]
    return replaced or {i for i, first in enumerate(firsts) if first == firsts[0] and len(set(firsts)) > 1}


def _uneven(batch: Sequence[Leaf], asked: Pipeline) -> Iterator[str]:
    sizes: dict[int, Leaf] = {}
    for leaf in batch:
        sizes.setdefault(leaf.shape[0], leaf)
    if len(sizes) > 1:
        said = ", ".join(f"{leaf.path} {leaf.type}" for leaf in sizes.values())
        yield f"the first dims of the batch differ: {said}; Pipeline(batch=...) names the arrays of the batch"
    elif next(iter(sizes)) % asked.microbatches:
        n, m = next(iter(sizes)), asked.microbatches
        near = [k for k in range(1, n + 1) if n % k == 0]
        near = sorted(sorted(near, key=lambda k: abs(k - m))[:3])
        said = " or ".join(map(str, near))
        yield f"the batch of {n} ({batch[0].path}) does not divide into {m} microbatches; use {said}"
