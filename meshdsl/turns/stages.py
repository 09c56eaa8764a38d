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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
from jax import dtypes

from meshdsl.errors import PipelineError, faults
from meshdsl.ir import Graph, Op, Program, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, S, Split
from meshdsl.pipeline.balance import share_faults
from meshdsl.pipeline.spec import Pipeline
from meshdsl.planner.solution import Pins
from meshdsl.trace.graphs import Atom, values
from meshdsl.turns.places import EACH, Placing, held

PROLOGUE, HEAD, TAIL, AFTER = "prologue", "head", "tail", "after"


@dataclass(frozen=True)
class Layers:
    """A scan over layers, taken apart."""

    op: Op

    @property
    def body(self) -> Graph:
        """One layer."""
        return self.op.bodies[0]

    @property
    def length(self) -> int:
        """How many layers there are."""
        return int(self.op.params["length"])

    @property
    def consts(self) -> Sequence[tuple[Atom, Value]]:
        """Per const, what it is outside and inside."""
        count = self.op.params["num_consts"]
        return list(zip(self.op.inputs[:count], self.body.inputs[:count], strict=True))

    @property
    def carries(self) -> Sequence[tuple[Atom, Value]]:
        """Per carry, what it starts from and what it is inside."""
        first, count = self.op.params["num_consts"], self.op.params["num_carry"]
        return list(zip(self.op.inputs, self.body.inputs, strict=True))[first : first + count]

    @property
    def stacks(self) -> Sequence[tuple[Value, Value]]:
        """Per stack, what it is outside and what a layer has of it."""
        first = self.op.params["num_consts"] + self.op.params["num_carry"]
        pairs = list(zip(self.op.inputs, self.body.inputs, strict=True))[first:]
        return [(x, v) for x, v in pairs if isinstance(x, Value)]  # a literal has no dim to go over

    @property
    def last(self) -> Sequence[Value]:
        """What the carries come to."""
        return self.op.outputs[: self.op.params["num_carry"]]

    @property
    def rows(self) -> Sequence[tuple[Atom, Value]]:
        """Per stack that the layers make, what a layer makes of it and what it is outside."""
        return list(zip(self.body.returned[len(self.last) :], self.made, strict=True))

    @property
    def made(self) -> Sequence[Value]:
        """Stacks that the layers make."""
        return self.op.outputs[self.op.params["num_carry"] :]


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


def stage_axes(program: Program, mesh: Mesh, pins: Pins, batch: Sequence[int]) -> dict[int, str]:
    """Per input that is pinned to lie split on its first dim, the axis; axes that split the batch are not meant."""
    taken = {axis for i in batch for axis in pins.inputs[i].axes if pins.inputs[i].on(axis) is not B}
    return {
        value.id: axis
        for value, pin in zip(program.graph.inputs, pins.inputs, strict=True)
        for axis in pin.axes
        if pin.on(axis) is S(0) and axis not in taken and mesh.axis(axis) > 1
    }


def find_stages(
    program: Program, placing: Placing, mesh: Mesh, split: Mapping[int, str], asked: Pipeline
) -> Stages | None:
    """The stages, if layers that are done in turns lie split over an axis; PipelineError if they are no pipeline."""
    graph = program.graph
    makers = {v.id: op for op in graph.ops for v in op.outputs}
    found: dict[str, dict[Op, list[int]]] = {}
    for op in graph.ops:
        if op.name == "scan" and placing.in_turns(op):
            origins = [o for x, _ in Layers(op).stacks if (o := _origin(x, makers, placing)) in split]
            for o in origins:
                found.setdefault(split[o], {}).setdefault(op, []).append(o)
    if not found:
        _check_indexed(graph, placing, split, makers)
        return None
    axis, scans = next(iter(found.items()))
    forward = [op for op in scans if op.phase == "forward"]
    if len(found) > 1 or len(forward) != 1:
        rows = [
            f"{a}: the scan at {op.source}, over {_named(program, ids)}"
            for a, ops in found.items()
            for op, ids in ops.items()
            if op.phase == "forward"
        ]
        raise PipelineError(faults("one scan over layers is a pipeline, and here are more:", rows, _several(axis)))
    first = Layers(forward[0])
    made = {v.id for v in first.made}
    backward = [op for op in graph.ops if op.name == "scan" and op.phase == "backward" and placing.in_turns(op)]
    backward = [op for op in backward if op in scans or any(v.id in made for v in values(op.inputs))]
    if len(backward) > 1:
        text = f"the scan over layers at {first.op.source} has {len(backward)} scans backward, a pipeline takes one"
        raise PipelineError(text)
    stages = Stages(placing, axis, mesh.axis(axis), (first, *map(Layers, backward)))
    rows = [*share_faults(first.length, stages.ranks, asked), *_unknown(stages), *_times(graph, stages)]
    if rows:
        raise PipelineError(faults(f"the scan over layers at {first.op.source} is no pipeline over {axis}:", rows))
    return stages


def _named(program: Program, ids: Sequence[int]) -> str:
    """Inputs by their paths; of several, the first."""
    paths = sorted(leaf.path for v, leaf in zip(program.graph.inputs, program.inputs, strict=True) if v.id in ids)
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _several(axis: str) -> str:
    """What to do where several scans lie split over an axis."""
    pinned = f"""layouts={{"...": "{axis}=B"}} for the arrays of the others, or dims of other names in their rules"""
    return (
        f"{pinned}, makes a pipeline of one, and they are planned as usual\n"
        "Pipeline(axis=...) with md.stage between them makes stages of several"
    )


def _check_indexed(graph: Graph, placing: Placing, split: Mapping[int, str], makers: Mapping[int, Op]) -> None:
    """PipelineError if layers are split over an axis, and the loop over them picks each by its number."""
    rows = []
    for op in graph.ops:
        if op.name == "scan" and placing.in_turns(op):
            layers = Layers(op)
            for x, v in layers.consts:
                axis = split.get(_origin(x, makers, placing))
                if axis and x.shape[:1] == (layers.length,) and _is_indexed(layers.body, v):
                    rows.append(f"{v.dtype}{list(v.shape)}, split over {axis}, in the loop at {op.source}")
    if rows:
        remedy = "go over them, as in lax.scan(layer, x, weights), so that each stage has its own"
        raise PipelineError(faults("layers that are picked by number are no stages:", rows, remedy))


def _is_indexed(body: Graph, v: Value) -> bool:
    return any(v in op.inputs and op.name in ("dynamic_slice", "gather") for op in body.ops)


def _origin(x: Atom, makers: Mapping[int, Op], placing: Placing) -> int:
    """The id of the input that a stack is made of, cast or transposed; else its own."""
    while isinstance(x, Value) and x.id in makers and placing.of(x) is B:
        read = list(values(makers[x.id].inputs))
        if len(read) != 1 or not read[0].shape or read[0].shape[0] != x.shape[0]:
            break
        x = read[0]
    return x.id if isinstance(x, Value) else -1


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
    placing, when = stages.placing, dict[int, str]()
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
            if late and parts:
                yield f"{op.called} at {op.source} reads what the layers make, and cannot be done in their stages"
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
