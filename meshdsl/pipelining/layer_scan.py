"""The layer scan of a step: the one ``lax.scan`` over layers whose stacked parameters are split over a mesh axis.

A model of equal layers is written as a scan over stacked parameters. If a pin splits their leading dim over a mesh
axis, the devices of that axis become the stages of a pipeline, and each stage runs its part of the scan:

    lax.scan(layer, x, params["layers"])       pin  params/layers/*: pipe=S(0)

``find_layer_scan`` finds that scan and its transposed scans (the gradients), and reports models that it cannot
pipeline: several scans or axes, or layers that are indexed instead of scanned. ``LayerScan`` names a scan's operands
and results; ``run_layers`` traces it for some of the layers, or for some of the operations of each.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.index import producers
from meshdsl.ir.loops import SplitOperands, split_operands
from meshdsl.ir.rewrite import origin, values
from meshdsl.ir.solution import Pins
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, S
from meshdsl.lowering.interpreter import Arrays
from meshdsl.pipelining.interpreter import Runner, scan_options
from meshdsl.pipelining.time_axis import TimePlacement, local_placement

# ---- Operands and results of a layer scan ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerScan:
    """A scan over layers; pairs are (outside, inside) the body, or (inside, outside) for results."""

    op: Op

    @property
    def body(self) -> Graph:
        """The graph of one layer."""
        return self.op.bodies[0]

    @property
    def length(self) -> int:
        """The number of layers."""
        return int(self.op.params["length"])

    @property
    def consts(self) -> Sequence[tuple[Atom, Value]]:
        """Operands that all layers share."""
        return self._operands.consts

    @property
    def carries(self) -> Sequence[tuple[Atom, Value]]:
        """Initial carries."""
        return self._operands.carry

    @property
    def stacks(self) -> Sequence[tuple[Value, Value]]:
        """Stacked operands, of which each layer has a slice; literals have no dim to scan."""
        return [(x, v) for x, v in self._operands.slices if isinstance(x, Value)]

    @property
    def _operands(self) -> SplitOperands[tuple[Atom, Value]]:
        return split_operands(self.op, zip(self.op.inputs, self.body.inputs, strict=True))

    @property
    def final_carries(self) -> Sequence[Value]:
        """Results that are the carries after the last layer."""
        return self.op.outputs[: self.op.params["num_carry"]]

    @property
    def stacked_results(self) -> Sequence[Value]:
        """Results that stack what each layer returns besides its carries."""
        return self.op.outputs[self.op.params["num_carry"] :]

    @property
    def rows(self) -> Sequence[tuple[Atom, Value]]:
        """What a layer returns of each stacked result, with that result."""
        return list(zip(self.body.returned[len(self.final_carries) :], self.stacked_results, strict=True))


# ---- Finding it ------------------------------------------------------------------------------------------------------

LayerAxes = Mapping[int, Sequence[str]]  # per input id, the axes over which its leading dim is pinned to be split


class PipelinedScans(NamedTuple):
    """The layer scan, then other scans over the same parameters (their gradients), and the axis of the stages."""

    axis: str
    scans: list[Op]


def layer_axes(program: TracedProgram, mesh: Mesh, pins: Pins, batch: Sequence[int]) -> LayerAxes:
    """Returns the axes that inputs are pinned to be split over on their leading dim.

    Axes that split the batch are left out: on those, a split leading dim is data parallelism or FSDP, not a pipeline.
    """
    taken = {axis for i in batch for axis in pins.inputs[i].axes if pins.inputs[i].on(axis) is not B}
    found = {
        value.id: tuple(a for a in pin.axes if pin.on(a) is S(0) and a not in taken and mesh.axis(a) > 1)
        for value, pin in zip(program.graph.inputs, pins.inputs, strict=True)
    }
    return {i: axes for i, axes in found.items() if axes}


def find_layer_scan(program: TracedProgram, placement: TimePlacement, split: LayerAxes) -> PipelinedScans | None:
    """Returns the scan that runs per microbatch over layers that are split over an axis; None if there is none.

    Raises PipelineError if there are several such scans or axes, or if such layers are indexed, not scanned.
    """
    graph = program.graph
    producer_of = producers(graph)
    found: dict[str, dict[Op, list[int]]] = {}
    for op in graph.ops:
        if op.name == "scan" and placement.is_per_microbatch(op):
            origins = [o for x, _ in LayerScan(op).stacks if (o := _origin(x, producer_of, placement)) in split]
            for axis, origin in ((axis, i) for i in origins for axis in split[i]):
                found.setdefault(axis, {}).setdefault(op, []).append(origin)
    if not found:
        _check_not_indexed(graph, placement, split, producer_of)
        return None
    axis, scans = next(iter(found.items()))
    forward = [op for op in scans if op.phase == "forward"]
    if len(found) > 1 or len(forward) != 1:
        raise _several(program, found)
    return PipelinedScans(axis, [*forward, *(op for op in scans if op is not forward[0])])


def _origin(x: Atom, producer_of: Mapping[int, Op], placement: TimePlacement) -> int:
    """Returns the id of the input that a stack was cast or transposed from before the loop; else its own id."""
    return origin(x, producer_of, lambda y: placement.of(y) is B).id if isinstance(x, Value) else -1


def _several(program: TracedProgram, found: Mapping[str, Mapping[Op, Sequence[int]]]) -> PipelineError:
    """Returns the error for several scans, or several axes, with the parameters of each and the remedy."""

    def named(ids: Sequence[int]) -> str:
        paths = sorted(leaf.path for v, leaf in zip(program.graph.inputs, program.inputs, strict=True) if v.id in ids)
        return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")

    forward = [(axis, op, ids) for axis, ops in found.items() for op, ids in ops.items() if op.phase == "forward"]
    rows = [f"{axis}: the scan at {op.source}, over {named(ids)}" for axis, op, ids in forward]
    if len({op for _, op, _ in forward}) == 1:
        title = "exactly one axis can be the pipeline; layers are split over several:"
        return PipelineError(faults(title, rows, f"split them over one of {', '.join(found)}"))
    remedy = (
        f"""layouts={{"...": "{next(iter(found))}=B"}} for the parameters of the others, or other dim names in their """
        "rules, selects one; the others are planned as usual\n"
        "Pipeline(axis=...) with md.stage between them puts several into one pipeline"
    )
    return PipelineError(faults("exactly one layer scan can be pipelined; found several:", rows, remedy))


def _check_not_indexed(graph: Graph, placement: TimePlacement, split: LayerAxes, producer_of: Mapping[int, Op]) -> None:
    """Raise PipelineError if layers that are split over an axis are indexed, in a loop or one by one."""
    rows = [f"{v.dtype}{list(v.shape)}, split over {split[v.id][0]}" for v in _sliced_inputs(graph, split)]
    for op in graph.ops:
        if op.name == "scan" and placement.is_per_microbatch(op):
            layers = LayerScan(op)
            for x, v in layers.consts:
                axes = split.get(_origin(x, producer_of, placement))
                indexed = any(
                    v in inner.inputs and inner.name in ("dynamic_slice", "gather") for inner in layers.body.ops
                )
                if axes and x.shape[:1] == (layers.length,) and indexed:
                    rows.append(f"{v.dtype}{list(v.shape)}, split over {axes[0]}, in the loop at {op.source}")
    if rows:
        remedy = "scan over them, as in lax.scan(layer, x, weights), so that each stage holds its own layers"
        raise PipelineError(faults("layers that are indexed one by one cannot be pipeline stages:", rows, remedy))


def _sliced_inputs(graph: Graph, split: LayerAxes) -> Iterator[Value]:
    """Yields inputs that the forward pass uses only through slices of one row each."""
    for v in graph.inputs:
        uses = [op for op in graph.ops if op.phase == "forward" and v in op.inputs]
        if v.id in split and len(uses) > 1 and all(op.name == "slice" and op.outputs[0].shape[0] == 1 for op in uses):
            yield v


# ---- Running a part of it --------------------------------------------------------------------------------------------

Stacks = dict[Value, jax.Array]  # by the body's input, the stack whose slices it is
Wanted = Sequence[tuple[Atom, Placement]]  # values of the body to stack, and how each is held


def run_layers(
    runner: Runner,
    layers: LayerScan,
    ops: Sequence[Op],
    start: Arrays,
    stacks: Stacks,
    wanted: Wanted,
    length: int,
    used: jax.Array | None,
) -> tuple[Arrays, Arrays]:
    """Returns the final carries, and the stacks of the wanted values.

    Args:
      runner: the environment, with the consts.
      ops: the operations of the body to run.
      start: the initial carries; empty if nothing is carried.
      stacks: the stacked operands of these layers.
      length: the number of layers.
      used: per layer, False for a padding layer, which leaves the carries unchanged; None if all are used.
    """
    placement = runner.placement
    read = {v.id for v in values((*(x for op in ops for x in op.inputs), *(x for x, _ in wanted)))}
    consts = {(v.id, local_placement(placement.of(v))): runner.local(x) for x, v in layers.consts if v.id in read}
    carried = [v for _, v in layers.carries][: len(start)]
    inputs = (*carried, *stacks)
    returned = [(x, local_placement(placement.of(v))) for x, v in zip(layers.body.returned, carried, strict=False)]

    def step(carry: Arrays, scanned: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, Arrays]:
        slices, is_used = scanned
        inner = Runner(placement, dict(consts))
        inner.add_producers(layers.body)
        inner.define(inputs, (*carry, *slices), [local_placement(placement.of(v)) for v in inputs])
        inner.run(ops)
        results = tuple(inner.get(x, p) for x, p in (*returned, *wanted))
        pairs = zip(results, carry, strict=False)
        after = tuple(x if is_used is None else jnp.where(is_used, x, before) for x, before in pairs)
        return after, results[len(returned) :]

    slices = tuple(stacks.values()), used
    results: tuple[Arrays, Arrays] = lax.scan(step, start, slices, length=length, **scan_options(layers.op))
    return results


def stacks_of(layers: LayerScan, known: Mapping[int, jax.Array]) -> Stacks:
    """Returns the stacked operands of a scan among arrays by value id."""
    return {v: known[x.id] for x, v in layers.stacks if x.id in known}
