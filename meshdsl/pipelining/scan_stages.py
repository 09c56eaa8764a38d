"""The stages of a pipelined layer scan: which part of a step each one runs, and which layers it holds.

Everything that a step computes per microbatch belongs to one of five times:

    prologue   operations that lead to the layers (embedding)                  PROLOGUE
    layers     the scan forward, a part of it per stage
    head       operations that follow the layers: head, loss, their gradients  HEAD
    layers     the transposed scan backward, a part of it per stage
    tail       what the gradients of the layers lead to (embedding gradient)   TAIL

A step without a transposed scan (an evaluation) ends with the head. Head and tail of one microbatch run some ticks
apart: a sum of contributions from both (the gradient of a tied embedding) is taken AFTER the loop, from their totals.
Prologue, head and tail are small next to the layers, and all ranks compute them together.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from numpy.typing import NDArray

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.rewrite import values
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.pipelining.layer_scan import LayerAxes, LayerScan, find_layer_scan
from meshdsl.pipelining.time_axis import PER_MICROBATCH, TimePlacement, local_placement
from meshdsl.schedules.partition import partition_faults
from meshdsl.schedules.spec import Pipeline
from meshdsl.trace.passes.permutations import deal_p

# ---- Times -----------------------------------------------------------------------------------------------------------

PROLOGUE, HEAD, TAIL, AFTER = "prologue", "head", "tail", "after"
_LAYERS = "layers"  # of stacked results: they exist only where the stages keep them


@dataclass
class Stages:
    """A step as a pipeline of its layer scan.

    Args:
      placement: the time placement of every value.
      axis: the mesh axis of the stages.
      ranks: devices along that axis.
      scans: the layer scan forward, and backward unless the step is an evaluation.
      times: per operation id that runs per microbatch, its time.
      layers: layers per stage, in model order; assigned by ``stage_cost.layers_per_stage``.
      skips: values of the head that the tail uses; they accompany the gradients backward through the stages.
    """

    placement: TimePlacement
    axis: str
    ranks: int
    scans: tuple[LayerScan, ...]
    times: dict[int, str] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    skips: list[Value] = field(default_factory=list)

    @property
    def forward(self) -> LayerScan:
        """The scan over the layers."""
        return self.scans[0]

    @property
    def backward(self) -> LayerScan:
        """The transposed scan; absent if the step is ``forward_only``."""
        return self.scans[1]

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward pass."""
        return len(self.scans) == 1

    def consts(self, layers: LayerScan) -> list[Value]:
        """Returns consts of a scan that differ between microbatches; backward, those that did not come forward."""
        known = set[int]() if layers is self.forward else {v.id for v in self.consts(self.forward)}
        found = [x for x, _ in layers.consts if isinstance(x, Value) and self.placement.of(x) is not B]
        found += self.skips if layers is not self.forward else []
        return [x for x in dict.fromkeys(found) if x.id not in known]

    def sent(self, layers: LayerScan) -> list[tuple[Atom, Placement]]:
        """Returns what a microbatch carries from stage to stage, carries then consts, and how each is held."""
        carries = [(x, local_placement(self.placement.of(v))) for x, v in layers.carries]
        return [*carries, *((x, local_placement(self.placement.of(x))) for x in self.consts(layers))]


def find_stages(
    program: TracedProgram, placement: TimePlacement, mesh: Mesh, split: LayerAxes, pipeline: Pipeline
) -> Stages | None:
    """Returns the stages if layers that run per microbatch are split over an axis, None otherwise.

    Raises PipelineError if these layers cannot be pipelined.
    """
    found = find_layer_scan(program, placement, split)
    if found is None:
        return None
    axis, graph, (forward, *others) = found.axis, program.graph, found.scans
    if forward.manual:
        rows = [f"it is in the body of a shard_map over {', '.join(forward.manual)}"]
        remedy = "call jax.shard_map in the layer, and scan outside of it"
        raise PipelineError(faults(_title(forward, axis), rows, remedy))
    first = LayerScan(forward)
    made = {v.id for v in first.stacked_results}
    backward = [
        op for op in graph.ops if op.name == "scan" and op.phase == "backward" and placement.is_per_microbatch(op)
    ]
    backward = [op for op in backward if op in others or any(v.id in made for v in values(op.inputs))]
    if len(backward) > 1:
        text = f"the scan over layers at {first.op.source} has {len(backward)} backward scans; a pipeline takes one"
        raise PipelineError(text)
    stages = Stages(placement, axis, mesh.axis(axis), (first, *map(LayerScan, backward)))
    rows = [
        *partition_faults(first.length, stages.ranks, pipeline),
        *_unavailable_operands(stages),
        *_assign_times(graph, stages),
        *_external_uses(graph, stages),
    ]
    if rows:
        raise PipelineError(faults(_title(forward, axis), rows))
    return stages


def _title(layers: Op, axis: str) -> str:
    return f"the scan over layers at {layers.source} cannot be a pipeline over {axis}:"


def _unavailable_operands(stages: Stages) -> Iterator[str]:
    """Yields faults of operands that a stage would need from other stages or microbatches."""
    placement, made = stages.placement, {v.id for v in stages.forward.stacked_results}
    if stages.forward.op.params["reverse"]:
        yield "it runs from the last layer to the first; reverse the stacks, and scan forward"
    for layers in stages.scans:
        for x, v in layers.stacks:
            if placement.of(x) is not B and (layers is stages.forward or x.id not in made):
                yield f"it scans over {v.dtype}{list(x.shape)}, which depends on the batch"
        for sent, _ in stages.sent(layers):
            if dtypes.issubdtype(sent.dtype, jax.dtypes.extended):
                yield "it carries random keys; split one key into a key per layer, and scan over those"


def _assign_times(graph: Graph, stages: Stages) -> Iterator[str]:
    """Set ``stages.times`` and ``stages.skips``; yields faults of operations that belong to no time.

    The time of an operation is the latest of its operands'. One that uses both head and tail values waits until AFTER
    the loop if it combines totals; if it works on the microbatch, it belongs to the tail and its head operands are sent
    along. One that works on a microbatch of the layers' stacked results belongs nowhere.
    """
    placement, when, unassigned = stages.placement, dict[int, str](), set[int]()
    scans = {id(layers.op): (layers, time) for layers, time in zip(stages.scans, (HEAD, TAIL), strict=False)}
    for op in graph.ops[:-1]:
        if not placement.is_per_microbatch(op):
            continue
        if id(op) in scans:
            layers, time = scans[id(op)]
            when.update((v.id, time) for v in layers.final_carries)
            when.update((v.id, _LAYERS) for v in layers.stacked_results)
            continue
        uses = {when[v.id] for v in values(op.inputs) if v.id in when}
        has_block = any(isinstance(placement.of(x), Split) for x in op.inputs)
        late = bool(uses & {AFTER, _LAYERS})
        if late and has_block and not any(v.id in unassigned for v in values(op.inputs)):
            yield f"{op.called} at {op.source} uses what the layers compute, and cannot run in their stages"
        unassigned |= {v.id for v in op.outputs if late and has_block}
        if {HEAD, TAIL} <= uses and has_block:
            stages.skips += [v for v in values(op.inputs) if when.get(v.id) == HEAD]
        late = late or ({HEAD, TAIL} <= uses and not has_block)
        time = AFTER if late else TAIL if TAIL in uses else HEAD if HEAD in uses else PROLOGUE
        stages.times[op.id] = time
        when.update((v.id, time) for v in op.outputs)


def _external_uses(graph: Graph, stages: Stages) -> Iterator[str]:
    """Yields faults of the layers' stacked results that are no totals and are used outside of the scans."""
    backward = [layers.op for layers in stages.scans[1:]]
    used = {v.id for op in graph.ops if op not in backward for v in values(op.inputs)}
    for v in (v for layers in stages.scans for v in layers.stacked_results):
        place = stages.placement.of(v)
        if v.id in used and not isinstance(place, Partial) and place is not PER_MICROBATCH:
            yield f"it stacks {v.dtype}{list(v.shape)}, which is used outside of it ({local_placement(place)})"


# ---- Layer assignment ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerAssignment:
    """Which layer each stage holds in each of its places.

    Stacks outside are in model order. Inside they are by chunk, rank and place within the stage. If stages have unequal
    numbers of layers, the smaller ones repeat their last layer as padding: its results are finite, and masked.

    Args:
      layers: layers per stage, in model order.
      order: by chunk and rank, the stage.
    """

    layers: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same number of layers."""
        return len(set(self.layers)) == 1

    @property
    def places_per_stage(self) -> int:
        """Places of every stage: the layers of the largest."""
        return max(self.layers)

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """By chunk, rank and place, the layer."""
        begin = np.cumsum([0, *self.layers[:-1]])
        at = np.minimum(np.arange(self.places_per_stage), np.array(self.layers)[:, None] - 1) + begin[:, None]
        return np.asarray(at[np.array(self.order)], np.int32)

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """By chunk, rank and place, False for padding."""
        return np.asarray((np.arange(self.places_per_stage) < np.array(self.layers)[:, None])[np.array(self.order)])

    def scatter(self, x: jax.Array) -> jax.Array:
        """Returns a stack in model order by chunk, rank and place."""
        ranked = self.places.swapaxes(0, 1)
        return jnp.swapaxes(_permuted(x, ranked).reshape(*ranked.shape, *x.shape[1:]), 0, 1)

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns a stack by chunk, rank and place in model order again."""
        ranked, used = self.places.swapaxes(0, 1), self.used.swapaxes(0, 1)
        order = np.flatnonzero(used)[np.argsort(ranked[used])]
        return _permuted(jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:]), order)


def _permuted(x: jax.Array, which: NDArray[np.integer]) -> jax.Array:
    layers = tuple(which.ravel().tolist())
    if layers == tuple(range(x.shape[0])):
        return x
    permuted: jax.Array = deal_p.bind(x, which=layers)
    return permuted
