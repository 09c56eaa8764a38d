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

import jax
from jax import dtypes

from meshdsl.errors import PipelineError, faults
from meshdsl.ir import Graph, Program, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.pipeline.balance import share_faults
from meshdsl.pipeline.spec import Pipeline
from meshdsl.trace.graphs import Atom, values
from meshdsl.turns.layers import Layers
from meshdsl.turns.places import EACH, Placing, held
from meshdsl.turns.split import Axes, split_scan

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

    placing: Placing
    axis: str
    ranks: int
    scans: tuple[Layers, ...]
    times: dict[int, str] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    past: list[Value] = field(default_factory=list)

    @property
    def forward(self) -> Layers:
        """The scan over the layers."""
        return self.scans[0]

    @property
    def backward(self) -> Layers:
        """The scan over their gradients; there is none if the step is ``forward_only``."""
        return self.scans[1]

    @property
    def forward_only(self) -> bool:
        """Whether nothing goes backward."""
        return len(self.scans) == 1

    def consts(self, layers: Layers) -> list[Value]:
        """Consts of a scan that differ from microbatch to microbatch; backward, those that are new."""
        known = set[int]() if layers is self.forward else {v.id for v in self.consts(self.forward)}
        found = [x for x, _ in layers.consts if isinstance(x, Value) and self.placing.of(x) is not B]
        found += self.past if layers is not self.forward else []
        return [x for x in dict.fromkeys(found) if x.id not in known]

    def brought(self, layers: Layers) -> list[tuple[Atom, Placement]]:
        """What a microbatch brings along from stage to stage, carries and consts, and how a turn has it."""
        carries = [(x, held(self.placing.of(v))) for x, v in layers.carries]
        return [*carries, *((x, held(self.placing.of(x))) for x in self.consts(layers))]


def find_stages(program: Program, placing: Placing, mesh: Mesh, split: Axes, asked: Pipeline) -> Stages | None:
    """The stages, if layers that are done in turns lie split over an axis; PipelineError if they are no pipeline."""
    found = split_scan(program, placing, split)
    if found is None:
        return None
    axis, graph, (forward, *others) = found.axis, program.graph, found.scans
    first = Layers(forward)
    made = {v.id for v in first.made}
    backward = [op for op in graph.ops if op.name == "scan" and op.phase == "backward" and placing.in_turns(op)]
    backward = [op for op in backward if op in others or any(v.id in made for v in values(op.inputs))]
    if len(backward) > 1:
        text = f"the scan over layers at {first.op.source} has {len(backward)} scans backward, a pipeline takes one"
        raise PipelineError(text)
    stages = Stages(placing, axis, mesh.axis(axis), (first, *map(Layers, backward)))
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


def _ends(when: dict[int, str], layers: Layers, time: str) -> None:
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
