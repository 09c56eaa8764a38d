"""The scan over layers that lies split over a mesh axis, and errors where several do, or none goes over the layers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from meshdsl.errors import PipelineError, faults
from meshdsl.ir import Graph, Op, Program, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, S
from meshdsl.planner.solution import Pins
from meshdsl.trace.graphs import Atom, makers_of, origin
from meshdsl.turns.layers import Layers
from meshdsl.turns.places import Placing

Axes = Mapping[int, Sequence[str]]  # per input, over which its first dim is pinned to lie split


class SplitScan(NamedTuple):
    """The scan over the layers, then others over the same arrays, as their gradients take it."""

    axis: str
    scans: list[Op]


def stage_axes(program: Program, mesh: Mesh, pins: Pins, batch: Sequence[int]) -> Axes:
    """Per input that is pinned to lie split on its first dim, the axes; those that split the batch are not meant."""
    taken = {axis for i in batch for axis in pins.inputs[i].axes if pins.inputs[i].on(axis) is not B}
    found = {
        value.id: tuple(a for a in pin.axes if pin.on(a) is S(0) and a not in taken and mesh.axis(a) > 1)
        for value, pin in zip(program.graph.inputs, pins.inputs, strict=True)
    }
    return {i: axes for i, axes in found.items() if axes}


def split_scan(program: Program, placing: Placing, split: Axes) -> SplitScan | None:
    """The scan that is done in turns and lies split over an axis, if one does; PipelineError if several do."""
    graph = program.graph
    makers = makers_of(graph)
    found: dict[str, dict[Op, list[int]]] = {}
    for op in graph.ops:
        if op.name == "scan" and placing.in_turns(op):
            origins = [o for x, _ in Layers(op).stacks if (o := _origin(x, makers, placing)) in split]
            for axis, origin in ((axis, i) for i in origins for axis in split[i]):
                found.setdefault(axis, {}).setdefault(op, []).append(origin)
    if not found:
        _check_indexed(graph, placing, split, makers)
        return None
    axis, scans = next(iter(found.items()))
    forward = [op for op in scans if op.phase == "forward"]
    if len(found) > 1 or len(forward) != 1:
        raise _several(program, found)
    return SplitScan(axis, [*forward, *(op for op in scans if op is not forward[0])])


def _several(program: Program, found: Mapping[str, Mapping[Op, Sequence[int]]]) -> PipelineError:
    """What is wrong, and what to do."""
    ahead = [(axis, op, ids) for axis, ops in found.items() for op, ids in ops.items() if op.phase == "forward"]
    rows = [f"{axis}: the scan at {op.source}, over {_named(program, ids)}" for axis, op, ids in ahead]
    if len({op for _, op, _ in ahead}) == 1:
        title = "one axis is the pipeline, and layers lie split over several:"
        return PipelineError(faults(title, rows, f"split them over one of {', '.join(found)}"))
    pinned = f"""layouts={{"...": "{next(iter(found))}=B"}} for the arrays of the others, or dims of other names"""
    remedy = (
        f"{pinned} in their rules, makes a pipeline of one, and they are planned as usual\n"
        "Pipeline(axis=...) with md.stage between them makes stages of several"
    )
    return PipelineError(faults("one scan over layers is a pipeline, and here are more:", rows, remedy))


def _named(program: Program, ids: Sequence[int]) -> str:
    """Inputs by their paths; of several, the first."""
    paths = sorted(leaf.path for v, leaf in zip(program.graph.inputs, program.inputs, strict=True) if v.id in ids)
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _check_indexed(graph: Graph, placing: Placing, split: Axes, makers: Mapping[int, Op]) -> None:
    """PipelineError if layers are split over an axis, and a loop over them, or the step, picks each by its number."""
    rows = [f"{v.dtype}{list(v.shape)}, split over {split[v.id][0]}" for v in _picked(graph, split)]
    for op in graph.ops:
        if op.name == "scan" and placing.in_turns(op):
            layers = Layers(op)
            for x, v in layers.consts:
                axes = split.get(_origin(x, makers, placing))
                if axes and x.shape[:1] == (layers.length,) and _is_indexed(layers.body, v):
                    rows.append(f"{v.dtype}{list(v.shape)}, split over {axes[0]}, in the loop at {op.source}")
    if rows:
        remedy = "go over them, as in lax.scan(layer, x, weights), so that each stage has its own"
        raise PipelineError(faults("layers that are picked by number are no stages:", rows, remedy))


def _picked(graph: Graph, split: Axes) -> Iterator[Value]:
    """Inputs that the model reads one by one of their first dim alone."""
    for v in graph.inputs:
        reads = [op for op in graph.ops if op.phase == "forward" and v in op.inputs]
        if v.id in split and len(reads) > 1 and all(op.name == "slice" and op.outputs[0].shape[0] == 1 for op in reads):
            yield v


def _is_indexed(body: Graph, v: Value) -> bool:
    return any(v in op.inputs and op.name in ("dynamic_slice", "gather") for op in body.ops)


def _origin(x: Atom, makers: Mapping[int, Op], placing: Placing) -> int:
    """The id of the input that a stack is made of before the turns, cast or transposed; else its own."""
    return origin(x, makers, lambda y: placing.of(y) is B).id if isinstance(x, Value) else -1
