"""Which part of a step each stage of a pipeline runs.

A model's layers are a scan over stacked parameters; where their first dim is split over a mesh axis, the devices of
that axis are the stages. What is done per microbatch is then

    prologue   what the layers start from (embeddings)         "prologue"
    layers     the scan over them, a part of it per stage
    epilogue   what follows: head, loss, their gradients        "head"
    layers     the scan backward
    rest       what their gradients lead to (embeddings again)  "tail"

A step without a backward scan (an evaluation) ends with the epilogue. Epilogue and rest of one microbatch lie some
ticks apart: a sum of both (a tied embedding's gradient) is taken after the loop, from the totals of each.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from numpy.typing import NDArray

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Atom, Graph, TracedProgram, Value
from meshdsl.ir.rewrite import values
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.pipelining.layer_scan import Axes, LayerScan, split_scan
from meshdsl.pipelining.time_axis import EACH, TimePlacement, held
from meshdsl.schedules.partition import share_faults
from meshdsl.schedules.spec import Pipeline

# ---- Stages ----------------------------------------------------------------------------------------------------------


PROLOGUE, HEAD, TAIL, AFTER = "prologue", "head", "tail", "after"


@dataclass
class Stages:
    """A step as a pipeline.

    Args:
      scans: over the layers, forward and backward; only forward in an evaluation.
      times: per operation that is done in turns, when.
      layers: per stage, in the order of the model, once they are dealt out.
      past: what the epilogue makes of a microbatch and the rest reads, as for what goes past the layers; gradients of
        the layers bring it along.
    """

    placing: TimePlacement
    axis: str
    ranks: int
    scans: tuple[LayerScan, ...]
    times: dict[int, str] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    past: list[Value] = field(default_factory=list)

    @property
    def forward(self) -> LayerScan:
        """The scan over the layers."""
        return self.scans[0]

    @property
    def backward(self) -> LayerScan:
        """The scan over their gradients; there is none if the step is ``forward_only``."""
        return self.scans[1]

    @property
    def forward_only(self) -> bool:
        """Whether nothing goes backward."""
        return len(self.scans) == 1

    def consts(self, layers: LayerScan) -> list[Value]:
        """Consts of a scan that differ from microbatch to microbatch; backward, those that are new."""
        known = set[int]() if layers is self.forward else {v.id for v in self.consts(self.forward)}
        found = [x for x, _ in layers.consts if isinstance(x, Value) and self.placing.of(x) is not B]
        found += self.past if layers is not self.forward else []
        return [x for x in dict.fromkeys(found) if x.id not in known]

    def brought(self, layers: LayerScan) -> list[tuple[Atom, Placement]]:
        """What a microbatch brings along from stage to stage, carries and consts, and how a turn has it."""
        carries = [(x, held(self.placing.of(v))) for x, v in layers.carries]
        return [*carries, *((x, held(self.placing.of(x))) for x in self.consts(layers))]


def find_stages(
    program: TracedProgram, placing: TimePlacement, mesh: Mesh, split: Axes, asked: Pipeline
) -> Stages | None:
    """The stages, if layers that are done in turns lie split over an axis; PipelineError if they are no pipeline."""
    found = split_scan(program, placing, split)
    if found is None:
        return None
    axis, graph, (forward, *others) = found.axis, program.graph, found.scans
    first = LayerScan(forward)
    made = {v.id for v in first.made}
    backward = [op for op in graph.ops if op.name == "scan" and op.phase == "backward" and placing.in_turns(op)]
    backward = [op for op in backward if op in others or any(v.id in made for v in values(op.inputs))]
    if len(backward) > 1:
        text = f"the scan over layers at {first.op.source} has {len(backward)} scans backward, a pipeline takes one"
        raise PipelineError(text)
    stages = Stages(placing, axis, mesh.axis(axis), (first, *map(LayerScan, backward)))
    rows = [*share_faults(first.length, stages.ranks, asked), *_unknown(stages), *_times(graph, stages)]
    if rows:
        raise PipelineError(faults(f"the scan over layers at {first.op.source} is no pipeline over {axis}:", rows))
    return stages


def _unknown(stages: Stages) -> Iterator[str]:
    """What a stage would have to know of others, or of another microbatch."""
    placing, made = stages.placing, {v.id for v in stages.forward.made}
    if stages.forward.op.params["reverse"]:
        yield "it goes from the last layer to the first; turn the stacks around, and go forward"
    for layers in stages.scans:
        for x, v in layers.stacks:
            if placing.of(x) is not B and (layers is stages.forward or x.id not in made):
                yield f"it goes over {v.dtype}{list(x.shape)}, which depends on the batch"
        for brought, _ in stages.brought(layers):
            if dtypes.issubdtype(brought.dtype, jax.dtypes.extended):
                yield "it carries random keys; split one key into a key per layer, and scan over those"


def _times(graph: Graph, stages: Stages) -> Iterator[str]:
    """Say when every operation runs that is done in turns."""
    placing, when, wrong = stages.placing, dict[int, str](), set[int]()
    ends = {id(layers.op): (layers, time) for layers, time in zip(stages.scans, (HEAD, TAIL), strict=False)}
    for op in graph.ops[:-1]:
        if not placing.in_turns(op):
            continue
        read = {when[v.id] for v in values(op.inputs) if v.id in when}
        parts = any(isinstance(placing.of(x), Split) for x in op.inputs)
        if id(op) in ends:
            _ends(when, *ends[id(op)])
        else:
            late = bool(read & {AFTER, "layers"})
            if late and parts and not any(v.id in wrong for v in values(op.inputs)):
                yield f"{op.called} at {op.source} reads what the layers make, and cannot be done in their stages"
            wrong |= {v.id for v in op.outputs if late and parts}
            if {HEAD, TAIL} <= read and parts:
                stages.past += [v for v in values(op.inputs) if when.get(v.id) == HEAD]
            late = late or ({HEAD, TAIL} <= read and not parts)
            time = AFTER if late else TAIL if TAIL in read else HEAD if HEAD in read else PROLOGUE
            stages.times[op.id] = time
            when.update((v.id, time) for v in op.outputs)
    yield from _unread(graph, stages)


def _ends(when: dict[int, str], layers: LayerScan, time: str) -> None:
    when.update((v.id, time) for v in layers.last)
    when.update((v.id, "layers") for v in layers.made)


def _unread(graph: Graph, stages: Stages) -> Iterator[str]:
    """Stacks of parts that the layers make and somebody else reads."""
    backward = [layers.op for layers in stages.scans[1:]]
    read = {v.id for op in graph.ops if op not in backward for v in values(op.inputs)}
    for v in (v for layers in stages.scans for v in layers.made):
        place = stages.placing.of(v)
        if v.id in read and not isinstance(place, Partial) and place is not EACH:
            yield f"it stacks {v.dtype}{list(v.shape)}, which is read outside of it ({held(place)})"


# ---- Dealing ---------------------------------------------------------------------------------------------------------
# Layers dealt out to stages: which device has which, and back.
#
# Stacks of layers lie in the order of the model. A pipeline has them by chunk, rank and place within the stage, and
# where stages have unequal numbers of layers, the places of the shorter ones are filled up: with a layer of theirs, so
# that what is computed there is a number, which is then masked.


@dataclass(frozen=True)
class LayerAssignment:
    """Layers by stage.

    Args:
      layers: per stage, how many.
      order: by chunk and rank, the stage.
    """

    layers: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]

    @property
    def even(self) -> bool:
        """Whether all stages have as many."""
        return len(set(self.layers)) == 1

    @property
    def most(self) -> int:
        """Layers of the largest stage: places that every stage has."""
        return max(self.layers)

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """By chunk, rank and place, the layer."""
        begin = np.cumsum([0, *self.layers[:-1]])
        at = np.minimum(np.arange(self.most), np.array(self.layers)[:, None] - 1) + begin[:, None]
        return np.asarray(at[np.array(self.order)], np.int32)

    @cached_property
    def used(self) -> NDArray[np.bool_]:
        """By chunk, rank and place, whether there is a layer."""
        return np.asarray((np.arange(self.most) < np.array(self.layers)[:, None])[np.array(self.order)])

    def dealt(self, x: jax.Array) -> jax.Array:
        """A stack of layers by chunk, rank and place."""
        ranked = self.places.swapaxes(0, 1)
        return jnp.swapaxes(_dealt(x, ranked).reshape(*ranked.shape, *x.shape[1:]), 0, 1)

    def gathered(self, x: jax.Array) -> jax.Array:
        """The stack of layers again, in the order of the model."""
        ranked, used = self.places.swapaxes(0, 1), self.used.swapaxes(0, 1)
        order = np.flatnonzero(used)[np.argsort(ranked[used])]
        return _dealt(jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[3:]), order)


def _dealt(x: jax.Array, which: NDArray[np.integer]) -> jax.Array:
    """Layers of a stack, by their numbers."""
    places = tuple(which.ravel().tolist())
    if places == tuple(range(x.shape[0])):
        return x
    dealt: jax.Array = deal_p.bind(x, which=places)
    return dealt


def _picked(x: jax.Array, *, which: tuple[int, ...]) -> jax.Array:
    return x.at[jnp.asarray(which)].get(mode="promise_in_bounds")


def _shaped(x: ShapedArray, *, which: tuple[int, ...]) -> ShapedArray:
    shaped: ShapedArray = x.update(shape=(len(which), *x.shape[1:]))
    return shaped


deal_p = Primitive("deal")  # element i of dim 0 is which[i] of the operand
deal_p.def_impl(_picked)
deal_p.def_abstract_eval(_shaped)
mlir.register_lowering(deal_p, mlir.lower_fun(_picked, multiple_results=False))
