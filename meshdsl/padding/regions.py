"""Regions of dims: what is computed from a part of a dim and then reduced is computed where the part lies.

    sum(f(x[1024:]))                 sum(select(i >= 1024, f(x), 0))           a far slice, masked
    sum(f(x[::3]))                   sum(select(i % 3 == 0, f(x), 0))          likewise
    sum(f(concatenate [x, y]))       sum(f(x)) + sum(f(y))                     pieces, each reduced by itself
    sum(f(pad(x, (3, 3))))           sum(f(x)) + sum(f(zeros of 6 places))     likewise
    cumsum(concatenate [x, y])       cumsum(x), sum(x) + cumsum(y)             pieces, reduced or cut out behind it

The blocks of half a dim are not those of the dim, and those of joined arrays are not those of any of them, so a slice
that leaves much out, or a join, moves nearly all of its operand. In these forms nothing moves. But a mask computes as
much as the whole dim needs, and pieces are more and smaller operations: that pays where the dim is split, and nowhere
else. So this is a variant of the program, and ``api.plan_variants`` takes it if its plan is faster.

Far slices are found and masked by ``trace.passes.align_shifts``. Here joins are taken apart: a class of dims that are
treated alike is *joined* if it is produced by concatenations and pads with the same joints, passes elementwise
operations and products of its rows, and ends in reductions and products that sum it, or in slices that cut out one of
the pieces, as in gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Atom, Graph, Op, TracedProgram, Value
from meshdsl.ir.rewrite import Table, copied, fresh_ids, look_up, renumber, substitute, with_ops
from meshdsl.rules.dim_groups import ELEMENTWISE, RUNNING, padded_params
from meshdsl.trace.passes.align_shifts import align_shifts
from meshdsl.trace.passes.alignment import DimClasses, ValueDim, aligned_groups
from meshdsl.trace.passes.dce import dce
from meshdsl.trace.read_jaxpr import written
from meshdsl.util.lazy import memoize_by_object

_ALIKE = ELEMENTWISE | frozenset(
    "broadcast_in_dim iota transpose reshape squeeze concatenate pad slice split dot_general".split()
)
_Combine = Callable[[jax.Array, jax.Array], jax.Array]
_COMBINE: dict[str, _Combine] = {  # what a reduction, or a product that sums a dim, gives for pieces of the dim
    "reduce_sum": lax.add,
    "reduce_prod": lax.mul,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_and": lax.bitwise_and,
    "reduce_or": lax.bitwise_or,
    "dot_general": lax.add,
}
_RUNNING: dict[str, _Combine] = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min}
MOST_PIECES = 64  # into which a class is taken apart
Places = tuple[int, int, int]  # the first one, the distance between them, and how many


def compute_regions(program: TracedProgram) -> TracedProgram:
    """Returns the program with far slices masked and joins apart; the program itself if it has none."""
    return _with_regions(program) or program


@memoize_by_object
def _with_regions(program: TracedProgram) -> TracedProgram | None:
    if program.pipeline is not None:
        return None
    apart = program.graph
    while (joined := _joined_class(apart)) is not None:
        apart = dce(_Splitter(apart, *joined).graph())
    aligned = align_shifts(apart, program.roundness, far=True)
    if aligned is program.graph:
        return None
    graph = copied(dce(aligned))
    renumber(graph)
    check_graph(graph)
    return replace(program, graph=graph)


# ---- Joined classes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joints:
    """How a dim of ``length`` places is joined: ``pieces`` of arrays; all other places are padding."""

    length: int
    pieces: tuple[Places, ...]

    @property
    def rest(self) -> int:
        """Places of the padding."""
        return self.length - sum(count for *_, count in self.pieces)

    @property
    def sizes(self) -> list[int]:
        """Elements of the pieces, and last, if there is one, of the padding."""
        return [count for *_, count in self.pieces] + [self.rest] * (self.rest > 0)


def _joints(op: Op, d: int) -> Joints | None:
    """How an operation joins dim ``d`` of its result; None if it does not, or cuts its operand."""
    n = op.outputs[0].shape[d]
    if op.name == "concatenate" and op.params["dimension"] == d:
        sizes = [x.shape[d] for x in op.inputs]
        return Joints(n, tuple((start, 1, m) for start, m in zip(accumulate(sizes, initial=0), sizes, strict=False)))
    if op.name == "pad" and any(op.params["padding_config"][d]):
        low, high, between = map(int, op.params["padding_config"][d])
        return Joints(n, (_places(low, between + 1, op.inputs[0].shape[d]),)) if min(low, high) >= 0 else None
    return None


def _places(first: int, distance: int, count: int) -> Places:
    return first, distance if count > 1 else 1, count


def _cut_out(op: Op, d: int) -> list[Places | None]:
    """The places of dim ``d`` that each result of a slice, split or pad has; None if it pads."""
    if op.name == "split":
        starts = accumulate(map(int, op.params["sizes"]), initial=0)
        return [(start, 1, int(m)) for start, m in zip(starts, op.params["sizes"], strict=False)]
    if op.name == "pad":
        amounts = op.params["padding_config"][d]
        return [None if max(amounts) > 0 else (-int(amounts[0]), 1, op.outputs[0].shape[d])]
    step = op.params["strides"][d] if op.params["strides"] else 1
    return [_places(int(op.params["start_indices"][d]), int(step), op.outputs[0].shape[d])]


def _touched(op: Op, d: int) -> bool:
    """Whether a join or cut changes dim ``d``, which operand and results have."""
    if op.name in ("concatenate", "split"):
        return bool(d == op.params["dimension" if op.name == "concatenate" else "axis"])
    return op.name in ("pad", "slice") and op.inputs[0].shape[d] != op.outputs[0].shape[d]


def _combines(op: Op, i: int, d: int) -> bool:
    """Whether an operation combines the elements along dim ``d`` of operand ``i``, so that its results lack the dim."""
    if op.name == "dot_general":
        contracted, _ = op.params["dimension_numbers"]
        return i < len(op.inputs) and d in contracted[i]
    return op.name in _COMBINE and i == 0 and d in op.params["axes"]


def _runs(op: Op, d: int) -> bool:
    """Whether an operation is a running reduction along dim ``d`` that can be continued from piece to piece."""
    return op.name in _RUNNING and op.params["axis"] == d and RUNNING[op.name](op.outputs[0].dtype) is not None


@dataclass
class _DimClass:
    """What a graph does with a class of dims that are treated alike.

    Args:
      dims: its dim of each value that has one.
      joints: of the concatenations and pads that make it; None for one that cuts.
      cuts: places that slices, splits and pads take out of it; None where they pad.
      reduced, running: whether it ends in reductions; whether it passes running ones.
      in_product: whether it is a dim of a product.
      fixed: whether something needs it whole.
    """

    dims: dict[int, int] = field(default_factory=dict)
    joints: set[Joints | None] = field(default_factory=set)
    cuts: set[Places | None] = field(default_factory=set)
    reduced: bool = False
    running: bool = False
    in_product: bool = False
    fixed: bool = False

    def add(self, op: Op, i: int, d: int, tied: bool) -> None:
        """Adds dim ``d`` of operand or (counted on) result ``i`` of an operation; ``tied`` if others have it too."""
        is_result = i >= len(op.inputs)
        value = (*op.inputs, *op.outputs)[i]
        assert isinstance(value, Value)
        if self.dims.setdefault(value.id, d) != d:  # two dims of one array
            self.fixed = True
        self.in_product |= op.name == "dot_general"
        if op.bodies or op.manual or op.effects:
            self.fixed = True
        elif _combines(op, i, d):
            self.reduced = True
        elif op.name in _ALIKE and _touched(op, d):
            if op.name in ("concatenate", "pad") and is_result:
                self.joints.add(_joints(op, d))
            elif op.name != "concatenate" and not is_result:
                self.cuts.update(_cut_out(op, d))
            else:
                self.fixed = True
        elif _runs(op, d):
            self.running = True
        elif not tied or op.name not in _ALIKE | _COMBINE.keys() | _RUNNING.keys():
            self.fixed = True

    def separable(self, graph: Graph) -> Joints | None:
        """The joints at which the class can be taken apart; None if it cannot."""
        own, *others = self.joints
        if own is None or others or self.fixed or not (self.reduced or self.cuts) or not self.cuts <= {*own.pieces}:
            return None
        if not 1 < len(own.sizes) <= MOST_PIECES or min(own.sizes) == 0:
            return None
        if own.rest and (self.running or _counts_along(graph, self.dims)):  # which padding takes no part in
            return None
        return own


def _joined_class(graph: Graph) -> tuple[dict[int, int], Joints] | None:
    """Returns the dims, by value, of a class that can be taken apart, and its joints; None if there is none."""
    if not any(op.name in ("concatenate", "pad") for op in graph.ops):
        return None
    classes = DimClasses()
    classes.add(graph, 1.0)
    shorter, sources = set[ValueDim](), dict[ValueDim, set[ValueDim]]()  # classes that are cut; what each is made of
    for s in classes.shifts:
        source, made = classes.find(s.source), classes.find(s.result)
        sources.setdefault(made, set()).add(source)
        if classes.size[s.source] > classes.size[s.result]:
            shorter.add(made)
    for c, joined in _joined_classes(graph, classes).items():
        joints = joined.separable(graph)
        if joints is not None and not (joined.in_product and sources[c] <= shorter):  # pieces that are split no better
            return joined.dims, joints
    return None


def _joined_classes(graph: Graph, classes: DimClasses) -> dict[ValueDim, _DimClass]:
    """Returns the classes that concatenations and pads make, the first one first."""
    found: dict[ValueDim, _DimClass] = {}
    joined: dict[ValueDim, _DimClass] = {}
    for v in graph.inputs:
        for d in range(len(v.shape)):
            found.setdefault(classes.find((v.id, d)), _DimClass()).fixed = True
    for op in graph.ops:
        tied = {port for group in aligned_groups(op) for port in group.ports}
        for i, x in enumerate((*op.inputs, *op.outputs)):
            for d in range(len(x.shape) if isinstance(x, Value) else 0):
                c = classes.find((x.id, d))
                each = found.setdefault(c, _DimClass())
                each.add(op, i, d, (i, d) in tied)
                if each.joints:
                    joined.setdefault(c, each)
    return joined


def _counts_along(graph: Graph, dims: dict[int, int]) -> bool:
    """Whether the class has numbers of places, which padding has none of."""
    return any(op.name == "iota" and dims.get(op.outputs[0].id) == op.params["dimension"] for op in graph.ops)


# ---- Taking a class apart --------------------------------------------------------------------------------------------


class _Splitter:
    """Rewrites a graph: every value of the class becomes ``pieces``, one per piece of the joints."""

    def __init__(self, source: Graph, dims: dict[int, int], joints: Joints) -> None:
        self.source, self.dims, self.joints = source, dims, joints
        self.ids: Iterator[int] = fresh_ids(source)
        self.ops: list[Op] = []
        self.table: Table = {}
        self.pieces: dict[int, list[Atom]] = {}

    def graph(self) -> Graph:
        """Returns the rewritten graph."""
        for op in self.source.ops:
            self._rewrite(substitute(op, self.table))
        return with_ops(self.source, self.ops)

    def _rewrite(self, op: Op) -> None:
        read = [x for x in op.inputs if isinstance(x, Value) and x.id in self.dims]
        if op.outputs and op.outputs[0].id in self.dims:
            d = self.dims[op.outputs[0].id]
            if _touched(op, d):
                self.pieces[op.outputs[0].id] = self._joined(op, d)
            elif _runs(op, d):
                self.pieces[op.outputs[0].id] = self._continued(op, d)
            else:
                parts = [self._parts(op, d, which) for which in range(len(self.joints.sizes))]
                self.pieces.update(zip((v.id for v in op.outputs), map(list, zip(*parts, strict=True)), strict=True))
        elif read and op.name in _COMBINE:
            reduced: list[Atom] = [self._reduced(op, which) for which in range(len(self.joints.sizes))]
            combine = _COMBINE[op.name]
            self.table[op.outputs[0].id] = self._write(lambda *xs: reduce(combine, xs), reduced, op)
        elif read:
            d = self.dims[read[0].id]
            for v, places in zip(op.outputs, _cut_out(op, d), strict=True):
                piece = self.pieces[read[0].id][self.joints.pieces.index(places)]  # type: ignore[arg-type]
                self.table[v.id] = self._cut(op, piece, d)
        else:
            self.ops.append(op)

    def _joined(self, op: Op, d: int) -> list[Atom]:
        """The pieces of a concatenation or pad."""
        if op.name == "concatenate":
            return list(op.inputs)
        x, fill = op.inputs
        config = [(0, 0, 0) if e == d else amounts for e, amounts in enumerate(op.params["padding_config"])]
        shape = [self.joints.rest if e == d else n for e, n in enumerate(op.outputs[0].shape)]
        held = self._write(lambda y, z: lax.pad(y, z, config), [x, fill], op) if any(map(any, config)) else x
        return [held, self._write(lambda z: lax.broadcast(z, shape), [fill], op)]

    def _parts(self, op: Op, d: int, which: int) -> list[Atom]:
        """A piece of each result of an operation that treats places alike."""
        inputs = tuple(self._piece(x, which) for x in op.inputs)
        made = tuple(Value(next(self.ids), self._shape(v, which), v.dtype) for v in op.outputs)
        self.ops.append(replace(op, inputs=inputs, outputs=made, params=padded_params(op, inputs, made)))
        if op.name != "iota" or op.params["dimension"] != d or not which:
            return list(made)
        first = self.joints.pieces[which][0]
        return [self._write(lambda x: x + jnp.asarray(first, x.dtype), [made[0]], op)]

    def _continued(self, op: Op, d: int) -> list[Atom]:
        """The pieces of a running reduction: each goes on from the reduction of those before it."""
        combine, identity = _RUNNING[op.name], RUNNING[op.name](op.outputs[0].dtype)

        def total(x: jax.Array) -> jax.Array:
            return lax.expand_dims(lax.reduce(x, identity, combine, (d,)), (d,))

        def go_on(x: jax.Array, before: jax.Array) -> jax.Array:
            return combine(x, jnp.broadcast_to(before, x.shape))

        order = list(range(len(self.joints.sizes)))[:: -1 if op.params["reverse"] else 1]
        found: dict[int, Atom] = {}
        before: Atom | None = None
        for which in order:
            (own,), own_total = self._parts(op, d, which), self._write(total, [self._piece(op.inputs[0], which)], op)
            found[which] = own if before is None else self._write(go_on, [own, before], op)
            before = own_total if before is None else self._write(combine, [before, own_total], op)
        return [found[which] for which in sorted(order)]

    def _shape(self, v: Value, which: int) -> tuple[int, ...]:
        return tuple(self.joints.sizes[which] if e == self.dims[v.id] else n for e, n in enumerate(v.shape))

    def _cut(self, op: Op, piece: Atom, d: int) -> Atom:
        """What a slice or pad does to other dims than ``d``, which it cuts."""
        if op.name == "split":
            return piece
        if op.name == "pad":
            config = [(0, 0, 0) if e == d else amounts for e, amounts in enumerate(op.params["padding_config"])]
            changed, inputs = any(map(any, config)), [piece, op.inputs[1]]
            return self._write(lambda x, fill: lax.pad(x, fill, config), inputs, op) if changed else piece
        steps = op.params["strides"] or (1,) * len(piece.shape)
        ends = list(zip(op.params["start_indices"], op.params["limit_indices"], steps, strict=True))
        ends[d] = (0, piece.shape[d], 1)
        changed = any(end != (0, n, 1) for end, n in zip(ends, piece.shape, strict=True))
        return self._write(lambda x: lax.slice(x, *zip(*ends, strict=True)), [piece], op) if changed else piece

    def _reduced(self, op: Op, which: int) -> Value:
        made = Value(next(self.ids), op.outputs[0].shape, op.outputs[0].dtype)
        self.ops.append(replace(op, inputs=tuple(self._piece(x, which) for x in op.inputs), outputs=(made,)))
        return made

    def _piece(self, x: Atom, which: int) -> Atom:
        return self.pieces[x.id][which] if isinstance(x, Value) and x.id in self.dims else x

    def _write(self, function: Callable[..., jax.Array], inputs: list[Atom], like: Op) -> Atom:
        made, result = written(function, inputs, self.ids, like)
        self.ops += made
        return look_up(result, self.table)
