"""Shift alignment: computations on a dim without its first or last element are extended to the whole dim.

    concatenate [x[:1], f(y[:-1], x[1:])]               select(i == 0, x, f(pad(y, (1, -1)), x))
    pad(f(g[1:]), (0, 1))                               pad(f(g), (-1, 1))          its gradient

A dim of n - 1 elements cannot be split where one of n can. So the slices get one more element in front, of any value,
which is dropped or replaced where they are put back. The data then only shifts by one place: each block sends one
element to its neighbour. Differences along time are such patterns, and so is every level of
``jax.lax.associative_scan``, with its gradient: split over devices, it sends one slice per level while blocks hold more
than one, and gathers only the remainder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.rewrite import fresh_ids, in_bodies, value_ids, values, with_ops
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.registry import RULES
from meshdsl.trace.read_jaxpr import Frame, inline
from meshdsl.trace.source import SourceContext

# ---- Regions ---------------------------------------------------------------------------------------------------------
# A region is the set of values with a dim that is one too short, from the slices to where the dim is put back.
#
# Slices enter a region; operations that treat every position of a dim alike are inside; it ends in a pad, or in a
# concatenation behind one other element. If a value in it has any other use, the region cannot be extended.


_CUTS = ("split", "slice", "pad")
ValueDim = tuple[Value, int]  # a value and its dim
_LIKE_OTHERS = frozenset(
    "broadcast_in_dim transpose squeeze reshape dot_general reduce_sum reduce_max reduce_min reduce_prod".split()
)  # beside the elementwise ones: operations that treat every position of a kept dim alike


@dataclass(frozen=True)
class DimSlice:
    """A slice of one dim, the ``stride``-th elements of it from ``start`` on."""

    source: Value
    result: Value
    dim: int
    start: int
    stride: int

    @property
    def length(self) -> int:
        """Elements of the slice."""
        return self.result.shape[self.dim]

    @property
    def extensible(self) -> bool:
        """Whether the source has an element before the slice's first one, or ends there."""
        return self.start >= self.stride or (self.start, self.stride) == (0, 1)


def cuts_of(op: Op) -> Iterator[DimSlice]:
    """Yields the results that are slices of one dim."""
    if op.name == "split":
        dim, sizes, (source,) = op.params["axis"], op.params["sizes"], values(op.inputs)
        yield from (DimSlice(source, v, dim, int(sum(sizes[:i])), 1) for i, v in enumerate(op.outputs))
    elif op.name == "slice":
        (source,), (result,) = values(op.inputs), op.outputs
        dims = [d for d, (n, m) in enumerate(zip(source.shape, result.shape, strict=True)) if n != m]
        strides = op.params["strides"] or (1,) * len(source.shape)
        yield from (
            DimSlice(source, result, d, int(op.params["start_indices"][d]), int(strides[d]))
            for d in dims
            if len(dims) == 1
        )
    elif op.name == "pad" and isinstance(op.inputs[0], Value):
        cut = {d: amounts for d, amounts in enumerate(op.params["padding_config"]) if any(amounts)}
        yield from (
            DimSlice(op.inputs[0], op.outputs[0], d, -int(low), 1) for d, (low, *_) in cut.items() if _only_cuts(op, d)
        )


def _only_cuts(op: Op, dim: int) -> bool:
    """Whether a pad does nothing but cut elements off one dim."""
    others = [a for d, a in enumerate(op.params["padding_config"]) if d != dim]
    return not any(map(any, others)) and all(n <= 0 for n in op.params["padding_config"][dim])


class Flow:
    """Producers, consumers and slices of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.cuts = {cut.result.id: cut for op in graph.ops if op.name in _CUTS for cut in cuts_of(op)}

    @cached_property
    def makers(self) -> dict[int, Op]:
        """By value id, its producer."""
        return producers(self._graph)

    @cached_property
    def readers(self) -> dict[int, list[Op]]:
        """By value id, its consumers."""
        return consumers(self._graph)

    def region(self, cut: DimSlice) -> tuple[dict[int, int], bool]:
        """Returns the dims, by value id, that must be extended with this slice, and whether all of them can be."""
        found, todo = {cut.result.id: cut.dim}, [(cut.result, cut.dim)]
        while todo:
            value, dim = todo.pop()
            for together in self._neighbours(value, dim):
                if together is None or any(found.get(v.id, d) != d for v, d in together):
                    return found, False
                todo += [(v, d) for v, d in together if v.id not in found]
                found.update((v.id, d) for v, d in together)
        return found, True

    def _neighbours(self, value: Value, dim: int) -> "Iterator[list[ValueDim] | None]":
        """Yields, per producer or consumer of the value, the dims tied to this one; None if the length is essential."""
        maker = self.makers.get(value.id)
        if maker is None or jnp.issubdtype(value.dtype, jax.dtypes.extended):
            yield None
        elif not self._enters(value, dim):
            yield _together(maker, value, dim)
        for op in self.readers.get(value.id, ()):
            yield [] if _leaves(op, value, dim) else _together(op, value, dim)

    def _enters(self, value: Value, dim: int) -> bool:
        cut = self.cuts.get(value.id)
        return cut is not None and cut.dim == dim and cut.extensible


def _leaves(op: Op, value: Value, dim: int) -> bool:
    """Whether ``op`` restores the dim: behind one other element, or among padding."""
    if op.name == "pad":
        return any(op.params["padding_config"][dim]) and op.inputs[1] is not value and not _only_cuts(op, dim)
    if op.name != "concatenate" or op.params["dimension"] != dim or len(op.inputs) != 2:
        return False
    return op.inputs[0].shape[dim] == 1 and op.inputs[1] is value and op.inputs[0] is not value


def _together(op: Op, value: Value, dim: int) -> list[ValueDim] | None:
    """The dims of operands and results that equal this dim of ``value``; None if the operation does more with it."""
    known = op.name in _LIKE_OTHERS or (op.name in RULES and RULES[op.name] is elementwise)
    if not known or op.effects:
        return None
    rule, ports = RULES[op.name](op), (*op.inputs, *op.outputs)
    placed = [(x, dims) for x, dims in zip(ports, (*rule.inputs, *rule.outputs), strict=True) if isinstance(x, Value)]
    own = {dims[dim] for x, dims in placed if x is value}
    factor = own.pop() if len(own) == 1 else ()
    found = [(x, d) for x, dims in placed for d, names in enumerate(dims) if set(names) & set(factor)]
    alike = len(factor) == 1 and all(x.shape[d] == value.shape[dim] for x, d in found)
    twice = len({x.id for x, _ in found}) < len({(x.id, d) for x, d in found})
    return found if alike and not twice and factor[0] not in rule.reduced else None


# ---- Rewriting -------------------------------------------------------------------------------------------------------


_Dims = Mapping[int, int]  # by value id, the dim that is one too short
_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}


def align_shifts(graph: Graph) -> Graph:
    """Returns the graph with such regions extended to whole dims."""
    return _shifted(graph, fresh_ids(graph))


def _shifted(graph: Graph, ids: Iterator[int]) -> Graph:
    graph = with_ops(graph, [in_bodies(lambda body: _shifted(body, ids), op) for op in graph.ops])
    flow, short, seen = Flow(graph), dict[int, int](), set[int]()
    for cut in flow.cuts.values():
        if 0 < cut.length == cut.source.shape[cut.dim] - 1 and cut.result.id not in seen:
            region, whole = flow.region(cut)
            short.update(region if whole and not region.keys() & short.keys() else {})
            seen |= region.keys()
    if not flow.cuts:
        return graph
    return _Lengthened(graph, short, flow, ids).graph()


class _Lengthened:
    """Rewrites one graph: ``short`` has the regions' dims by value id, ``long`` the extended values."""

    def __init__(self, graph: Graph, short: _Dims, flow: Flow, ids: Iterator[int]) -> None:
        self.source, self.short, self.flow = graph, short, flow
        self.frame, self.ids = Frame(ids, body=False), ids
        self.long: dict[int, Value] = {}

    def graph(self) -> Graph:
        """The rewritten graph."""
        for op in self.source.ops:
            if op.name != "pad" and self.short.keys().isdisjoint(value_ids((*op.inputs, *op.outputs))):
                self.frame.ops.append(op)
                continue
            start = len(self.frame.ops)
            self._rewrite(op)
            for new in self.frame.ops[start:]:
                new.source, new.scope, new.phase, new.manual = op.source, op.scope, op.phase, op.manual
        return with_ops(self.source, self.frame.ops)

    def _rewrite(self, op: Op) -> None:
        made = [v for v in op.outputs if v.id in self.short]
        read = [v for v in values(op.inputs) if v.id in self.short]
        if made and not read and all(v.id in self.flow.cuts for v in made):
            self.frame.ops.append(op)
            for v in made:
                cut = self.flow.cuts[v.id]
                self.long[v.id] = self._emit(partial(_cut_longer, cut=cut), cut.source)
        elif made:
            self._lengthen(op)
        elif read:
            self._put_back(op, read[0])
        elif not self._spread(op):
            self.frame.ops.append(op)

    def _lengthen(self, op: Op) -> None:
        for v in op.outputs:
            self.long[v.id] = Value(next(self.ids), self._shape(v), v.dtype)
        outputs, params = tuple(self.long[v.id] for v in op.outputs), dict(op.params)
        if op.name in _SHAPES:
            params[_SHAPES[op.name]] = outputs[0].shape
        inputs = tuple(self.long.get(x.id, x) if isinstance(x, Value) else x for x in op.inputs)
        self.frame.ops.append(replace(op, inputs=inputs, outputs=outputs, params=params))

    def _shape(self, v: Value) -> tuple[int, ...]:
        return tuple(n + (d == self.short[v.id]) for d, n in enumerate(v.shape))

    def _put_back(self, op: Op, read: Value) -> None:
        d, rest = self.short[read.id], self.long[read.id]
        if op.name == "pad":
            self._emit(lambda x, fill: _padded(x, fill, op, d), rest, op.inputs[1], result=op.outputs[0])
        else:
            first, spread = self._source(op.inputs[0], d, rest.shape[d])
            self._emit(lambda x, y: _first(spread(x), y, d), first, rest, result=op.outputs[0])

    def _source(self, x: Atom, d: int, n: int) -> tuple[Atom, Callable[[jax.Array], jax.Array]]:
        """An array, and a function that makes n elements along d from it, of which ``x``, one element, is the first."""
        cut = self.flow.cuts.get(x.id) if isinstance(x, Value) else None
        if cut is not None and cut.dim == d:
            stride, left = divmod(cut.source.shape[d], n)
            if not left and cut.start < stride:
                end = cut.start + stride * (n - 1) + 1
                return cut.source, lambda source: lax.slice_in_dim(source, cut.start, end, stride, d)
        return x, lambda one: jnp.repeat(one, n, axis=d)

    def _spread(self, op: Op) -> bool:
        """Rewrites one element that is cut out and padded so that it stays in its block, if the blocks are as many."""
        x = op.inputs[0] if op.name == "pad" else None
        cut = self.flow.cuts.get(x.id) if isinstance(x, Value) else None
        if cut is None or cut.length != 1:
            return False
        n, total, low = cut.source.shape[cut.dim], op.outputs[0].shape[cut.dim], op.params["padding_config"][cut.dim][0]
        stride, left = divmod(total, n)
        offset = int(low) - cut.start * stride
        if left or not 0 <= offset < stride:
            return False
        amounts = (offset, stride - 1 - offset, stride - 1)
        self._emit(partial(_alone, op=op, cut=cut, amounts=amounts), cut.source, op.inputs[1], result=op.outputs[0])
        return True

    def _emit(self, function: Callable[..., jax.Array], *operands: Atom, result: Value | None = None) -> Value:
        """Traces and appends ``function`` and returns its result, or defines ``result`` by it."""
        likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        (made,) = inline(jax.make_jaxpr(function)(*likes), operands, self.frame, SourceContext())
        assert isinstance(made, Value)
        if result is None:
            return made
        *before, last = self.frame.ops
        self.frame.ops[:] = [*before, replace(last, outputs=(result,))]
        return result


def _cut_longer(x: jax.Array, cut: DimSlice) -> jax.Array:
    """The slice with one more element in front."""
    if cut.start == cut.stride == 1 and x.shape[cut.dim] == cut.length + 1:
        return x
    if cut.start >= cut.stride:
        end = cut.start + cut.stride * (cut.length - 1) + 1
        return lax.slice_in_dim(x, cut.start - cut.stride, end, cut.stride, cut.dim)
    amounts = [(1, cut.length - x.shape[cut.dim], 0) if d == cut.dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), amounts)


def _alone(x: jax.Array, fill: jax.Array, op: Op, cut: DimSlice, amounts: tuple[int, int, int]) -> jax.Array:
    """The one element of ``x`` that is cut out, where ``op`` puts it."""
    config = [amounts if d == cut.dim else a for d, a in enumerate(op.params["padding_config"])]
    kept = lax.broadcasted_iota(jnp.int32, x.shape, cut.dim) == cut.start
    return lax.pad(lax.select(kept, x, jnp.broadcast_to(fill, x.shape)), fill, config)


def _padded(x: jax.Array, fill: jax.Array, op: Op, d: int) -> jax.Array:
    """``x`` without its first element along d, padded."""
    config = list(op.params["padding_config"])
    low, high, between = config[d]
    config[d] = (low - 1 - between, high, between)
    kept = x if config[d][0] < 0 else _first(jnp.broadcast_to(fill, x.shape), x, d)
    return lax.pad(kept, fill, config)


def _first(first: jax.Array, rest: jax.Array, d: int) -> jax.Array:
    """``rest`` with its first element along d taken from ``first``."""
    return lax.select(lax.broadcasted_iota(jnp.int32, rest.shape, d) == 0, first, rest)
