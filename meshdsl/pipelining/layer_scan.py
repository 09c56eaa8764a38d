"""The scan over layers that lies split over a mesh axis, and errors where several do, or none goes over the layers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.errors import PipelineError, faults
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.rewrite import makers_of, origin, values
from meshdsl.ir.solution import Pins
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Placement, S
from meshdsl.lowering.interpreter import Arrays
from meshdsl.pipelining.interpreter import Runner, scan_options
from meshdsl.pipelining.time_axis import TimePlacement, held

# ---- Layers ----------------------------------------------------------------------------------------------------------
# A scan over layers, by what it is given and what it makes.


@dataclass(frozen=True)
class LayerScan:
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


# ---- Split -----------------------------------------------------------------------------------------------------------


Axes = Mapping[int, Sequence[str]]  # per input, over which its first dim is pinned to lie split


class SplitScan(NamedTuple):
    """The scan over the layers, then others over the same arrays, as their gradients take it."""

    axis: str
    scans: list[Op]


def stage_axes(program: TracedProgram, mesh: Mesh, pins: Pins, batch: Sequence[int]) -> Axes:
    """Per input that is pinned to lie split on its first dim, the axes; those that split the batch are not meant."""
    taken = {axis for i in batch for axis in pins.inputs[i].axes if pins.inputs[i].on(axis) is not B}
    found = {
        value.id: tuple(a for a in pin.axes if pin.on(a) is S(0) and a not in taken and mesh.axis(a) > 1)
        for value, pin in zip(program.graph.inputs, pins.inputs, strict=True)
    }
    return {i: axes for i, axes in found.items() if axes}


def split_scan(program: TracedProgram, placing: TimePlacement, split: Axes) -> SplitScan | None:
    """The scan that is done in turns and lies split over an axis, if one does; PipelineError if several do."""
    graph = program.graph
    makers = makers_of(graph)
    found: dict[str, dict[Op, list[int]]] = {}
    for op in graph.ops:
        if op.name == "scan" and placing.in_turns(op):
            origins = [o for x, _ in LayerScan(op).stacks if (o := _origin(x, makers, placing)) in split]
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


def _several(program: TracedProgram, found: Mapping[str, Mapping[Op, Sequence[int]]]) -> PipelineError:
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


def _named(program: TracedProgram, ids: Sequence[int]) -> str:
    """Inputs by their paths; of several, the first."""
    paths = sorted(leaf.path for v, leaf in zip(program.graph.inputs, program.inputs, strict=True) if v.id in ids)
    return paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def _check_indexed(graph: Graph, placing: TimePlacement, split: Axes, makers: Mapping[int, Op]) -> None:
    """PipelineError if layers are split over an axis, and a loop over them, or the step, picks each by its number."""
    rows = [f"{v.dtype}{list(v.shape)}, split over {split[v.id][0]}" for v in _picked(graph, split)]
    for op in graph.ops:
        if op.name == "scan" and placing.in_turns(op):
            layers = LayerScan(op)
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


def _origin(x: Atom, makers: Mapping[int, Op], placing: TimePlacement) -> int:
    """The id of the input that a stack is made of before the turns, cast or transposed; else its own."""
    return origin(x, makers, lambda y: placing.of(y) is B).id if isinstance(x, Value) else -1


# ---- Layered ---------------------------------------------------------------------------------------------------------
# A scan over layers, run over some of them, or for some of what each does.


Stacks = dict[Value, jax.Array]
Wanted = Sequence[tuple[Atom, Placement]]


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
    """What is carried in the end, and stacks of what is wanted.

    Args:
      runner: knows the consts.
      ops: what is done of each layer.
      start: of the carries; none if nothing is carried.
      stacks: by what a layer has of them.
      used: per layer, whether there is one; where there is none, carries stay as they are. Default is all.
    """
    places = runner.placing
    read = {v.id for v in values((*(x for op in ops for x in op.inputs), *(x for x, _ in wanted)))}
    known = {(v.id, held(places.of(v))): runner.natural(x) for x, v in layers.consts if v.id in read}
    carried = [v for _, v in layers.carries][: len(start)]
    given = (*carried, *stacks)
    ends = [(x, held(places.of(v))) for x, v in zip(layers.body.returned, carried, strict=False)]

    def step(carry: Arrays, each: tuple[Arrays, jax.Array | None]) -> tuple[Arrays, Arrays]:
        slices, counts = each
        inner = Runner(places, dict(known))
        inner.add(layers.body)
        inner.define(given, (*carry, *slices), [held(places.of(v)) for v in given])
        inner.run(ops)
        found = tuple(inner.get(x, p) for x, p in (*ends, *wanted))
        return _counted(counts, found, carry), found[len(ends) :]

    slices = tuple(stacks.values()), used
    found: tuple[Arrays, Arrays] = lax.scan(step, start, slices, length=length, **scan_options(layers.op))
    return found


def _counted(counts: jax.Array | None, found: Arrays, before: Arrays) -> Arrays:
    """Carries after a layer, which are those before it if there is none."""
    pairs = zip(found, before, strict=False)
    return tuple(x if counts is None else jnp.where(counts, x, y) for x, y in pairs)


def kept_stacks(layers: LayerScan, known: Mapping[int, jax.Array]) -> Stacks:
    """Stacks by what a layer has of them, from those by what they are outside."""
    return {v: known[x.id] for x, v in layers.stacks if x.id in known}
