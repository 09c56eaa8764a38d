"""Clean-up: what is computed from a dim without its first or last element is computed on the whole dim.

    concatenate [x[:1], f(y[:-1], x[1:])]               select(i == 0, x, f(pad(y, (1, -1)), x))
    pad(f(g[1:]), (0, 1))                               pad(f(g), (-1, 1))          its gradient

A dim of n - 1 elements cannot be split where one of n can. So the pieces get one more element in
front, whatever it holds; it is dropped, or replaced, where they are put back. What is left moves
by one place: blocks hand on one element. Differences along time are such patterns, and so is every
level of ``jax.lax.associative_scan``, with its gradient: split over devices, it hands on one slice
per level while blocks hold more than one, and gathers only what is left then.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Graph, Op, Value
from meshdsl.trace.graphs import Atom, fresh_ids, in_bodies, value_ids, values, with_ops
from meshdsl.trace.read import Frame, inline
from meshdsl.trace.regions import Cut, Flow
from meshdsl.trace.source import Place

_Dims = Mapping[int, int]  # by value id, the dim that is one too short
_SHAPES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}


def find_shifts(graph: Graph) -> Graph:
    """The graph with such regions on whole dims."""
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
    """Rewrites one graph."""

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
                new.source, new.scope, new.phase = op.source, op.scope, op.phase
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
        """Of ``x``, one element of d: an array, and how to make n elements of that, ``x`` being the first."""
        cut = self.flow.cuts.get(x.id) if isinstance(x, Value) else None
        if cut is not None and cut.dim == d:
            stride, left = divmod(cut.source.shape[d], n)
            if not left and cut.start < stride:
                end = cut.start + stride * (n - 1) + 1
                return cut.source, lambda source: lax.slice_in_dim(source, cut.start, end, stride, d)
        return x, lambda one: jnp.repeat(one, n, axis=d)

    def _spread(self, op: Op) -> bool:
        """One element that is cut out and put among padding stays in its block, if the blocks are as many."""
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
        """The result of ``function``, traced, read and appended; ``result`` stands for it."""
        likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        (made,) = inline(jax.make_jaxpr(function)(*likes), operands, self.frame, Place())
        assert isinstance(made, Value)
        if result is None:
            return made
        *before, last = self.frame.ops
        self.frame.ops[:] = [*before, replace(last, outputs=(result,))]
        return result


def _cut_longer(x: jax.Array, cut: Cut) -> jax.Array:
    """The slice with one more element in front."""
    if cut.start == cut.stride == 1 and x.shape[cut.dim] == cut.length + 1:
        return x
    if cut.start >= cut.stride:
        end = cut.start + cut.stride * (cut.length - 1) + 1
        return lax.slice_in_dim(x, cut.start - cut.stride, end, cut.stride, cut.dim)
    amounts = [(1, cut.length - x.shape[cut.dim], 0) if d == cut.dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), amounts)


def _alone(x: jax.Array, fill: jax.Array, op: Op, cut: Cut, amounts: tuple[int, int, int]) -> jax.Array:
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
