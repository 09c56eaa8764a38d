"""The entry of this package: a step in microbatches, pipelined if its layers are pinned to be split over an axis."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from meshdsl.errors import PipelineError, faults, shortened
from meshdsl.ir.graph import Leaf, TracedProgram
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import UserPins, replaced_inputs
from meshdsl.pipelining.accumulate import MicrobatchLoop, SplitStep
from meshdsl.pipelining.body_exports import with_body_exports
from meshdsl.pipelining.cut_executor import pipeline_cuts
from meshdsl.pipelining.layer_scan import layer_axes
from meshdsl.pipelining.scan_executor import ScanPipeline
from meshdsl.pipelining.scan_stages import AFTER, find_stages
from meshdsl.pipelining.shard_map_rows import check_shard_maps
from meshdsl.pipelining.stage_cost import layers_per_stage
from meshdsl.pipelining.stage_shard_maps import without_stage_axis
from meshdsl.pipelining.tick_loops import TickTable
from meshdsl.pipelining.time_axis import analyze_time_axis
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.spec import Pipeline
from meshdsl.util.paths import matches, split_path, suggest

_USUAL_AXIS = "pipe"  # an axis of this name is meant for stages
_SUGGESTED = 3  # numbers of microbatches that an error suggests


def to_microbatches(program: TracedProgram, pipeline: Pipeline, mesh: Mesh, user_pins: UserPins) -> TracedProgram:
    """Returns the program in microbatches, its graph retraced and its ``pipeline`` set.

    There are three forms: a pipeline of the parts that ``md.stage`` cuts, if ``pipeline.axis`` is given; a pipeline of
    the layer scan, if its parameters are pinned to be split over an axis; and one loop over microbatches otherwise.

    Args:
      user_pins: what the user fixed; resolved, and so checked, for this program.

    Raises PipelineError if there is no batch, if it does not divide into the microbatches, if the loop needs the whole
    batch or would be empty, or if the layers cannot be pipelined; PinError as ``make_pins``.
    """
    graph, batch, count = program.graph, find_batch(program, pipeline), pipeline.microbatches
    if pipeline.axis:
        return replace(pipeline_cuts(program, pipeline, mesh, batch, user_pins), unstaged=graph)
    placement = analyze_time_axis(graph, count, [graph.inputs[i].id for i in batch], pipeline.per_microbatch)
    pins = user_pins.stated(replace(program, pipeline=Pipelined(pipeline)), mesh)
    split = layer_axes(program, mesh, pins, batch)
    stages = find_stages(program, placement, mesh, split, pipeline)
    if stages:
        layers = [found.op for found in stages.scans]
        freed = without_stage_axis(program.name, graph, layers, stages.axis, mesh)
        if freed is not graph:
            return to_microbatches(replace(program, graph=freed), pipeline, mesh, user_pins)
    else:
        user_pins.resolve(program, mesh)  # without uneven stages, every pinned dim has to divide
        if count == 1:
            return replace(program, pipeline=Pipelined(pipeline))
    deferred = [op for op, time in stages.times.items() if time == AFTER] if stages else []
    step = SplitStep(graph, placement, deferred)
    if not step.inside:
        causes = (f"{op.called} at {op.source} needs the whole batch" for op in placement.blame.values())
        rows = shortened(list(dict.fromkeys(causes))) or ["no operation reads the batch"]
        raise PipelineError(faults(f"nothing in {program.name} runs per microbatch:", rows))
    own = check_shard_maps(program.name, graph, placement, step.exported)
    if own:
        graph, placement = with_body_exports(step, own)
        stages = find_stages(replace(program, graph=graph), placement, mesh, split, pipeline)
        step = SplitStep(graph, placement, deferred)
    notes = []
    if stages:
        stages.layers = layers_per_stage(graph, stages, mesh, pipeline)
        pipelined = Pipelined(pipeline, stages.axis, stages.ranks, stages.forward_only, stages.layers)
        scan = ScanPipeline(step, stages, TickTable(pipelined.table, pipelined.buffer_slots))
        new = step.retraced(scan, program.roundness)
        if sum(stages.layers) % stages.ranks:
            notes.append(
                f"{sum(stages.layers)} layers do not divide over {stages.axis}: their arrays are sharded freely"
            )
    else:
        pipelined = Pipelined(pipeline)
        new = step.retraced(MicrobatchLoop(step), program.roundness)
        of_stages = replace(pipeline, batch=None, per_microbatch=False) != Pipeline(count)
        if of_stages or mesh.sizes_by_name.get(_USUAL_AXIS, 1) > 1:
            why = "no scan over layers is pinned to be split over an axis"
            notes.append(f"there are no stages for {pipeline.name}: {why}")
    notes.insert(0, f"{pipelined}; {len(step.inside)} of {len(graph.ops) - 1} operations run per microbatch")
    notes, unstaged = [*program.notes, *notes], graph if stages else None
    return replace(program, graph=new, notes=notes, pipeline=pipelined, unstaged=unstaged)


# ---- The batch -------------------------------------------------------------------------------------------------------


def find_batch(program: TracedProgram, pipeline: Pipeline) -> list[int]:
    """Returns the positions of the inputs that are split into microbatches.

    These are the inputs that ``pipeline.batch`` matches, or by default those that no result replaces (not parameters
    and optimizer state), or all but the first argument if results replace none (an evaluation).

    Raises PipelineError if there are none, or if they do not divide into the microbatches.
    """
    if pipeline.batch is not None:
        found = {i: leaf for i, leaf in enumerate(program.inputs) if matches(pipeline.batch, leaf.path)}
        hint = suggest(pipeline.batch, [leaf.path for leaf in program.inputs])
        rows = [] if found else [f"batch={pipeline.batch!r}: matches no input{hint}"]
        rows += [f"{leaf.path} {leaf.type}: has no dim to split" for leaf in found.values() if not leaf.shape]
    else:
        replaced = {i for i in replaced_inputs(program) if i is not None} | program.held.inputs
        first_names = [split_path(leaf.path)[0] for leaf in program.inputs]
        several = len(set(first_names)) > 1
        state = replaced or {i for i, name in enumerate(first_names) if name == first_names[0] and several}
        found = {i: leaf for i, leaf in enumerate(program.inputs) if i not in state and leaf.shape}
        rows = [] if found else ["every argument is replaced by a result: name the batch with Pipeline(batch=...)"]
    rows = rows or list(_uneven_batch(list(found.values()), pipeline))
    if rows:
        raise PipelineError(faults(f"microbatches={pipeline.microbatches} of {program.name}:", rows))
    return list(found)


def _uneven_batch(batch: Sequence[Leaf], pipeline: Pipeline) -> Iterator[str]:
    """Yields a fault if the leading dims of the batch differ, or do not divide into the microbatches."""
    sizes: dict[int, Leaf] = {}
    for leaf in batch:
        sizes.setdefault(leaf.shape[0], leaf)
    examples, count = next(iter(sizes)), pipeline.microbatches
    if len(sizes) > 1:
        listed = ", ".join(f"{leaf.path} {leaf.type}" for leaf in sizes.values())
        yield f"the leading dims of the batch differ: {listed}; name its arrays with Pipeline(batch=...)"
    elif examples % count:
        divisors = [k for k in range(1, examples + 1) if examples % k == 0]
        near = sorted(sorted(divisors, key=lambda k: abs(k - count))[:_SUGGESTED])
        use = " or ".join(map(str, near))
        yield f"the batch of {examples} ({batch[0].path}) does not divide into {count} microbatches; use {use}"
