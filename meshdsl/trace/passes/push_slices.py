"""Slices are pushed through operations on a dim that is longer than the grid: ghost rows and faces of cells.

    p = concatenate [u[-1:], u, u[:1]];  sin(p)[2:]     sin(concatenate [u[1:], u[:1]]), which is a roll
    flux(p[1:], p[:-1])[1:]                             flux(p[2:], p[1:-1]), each of n elements

A grid of 2048 cells with a ghost cell at each end has 2050, and 2049 faces: none of these can be split where 2048 can.
Mostly only slices of them are used, each as long as the grid, or a few elements. These are computed from slices of the
operands, down to where these are as long as the grid: the concatenation or pad that added the ghosts then moves
the grid by a few places. Elementwise operations may run once per slice; in their compiled form, in which slices read
what they need, that is so anyway.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import accumulate, pairwise

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Atom, Graph, Op, Value
from meshdsl.ir.rewrite import Table, fresh_ids, look_up, substitute, with_ops
from meshdsl.layouts.roundness import Roundness
from meshdsl.rules.dim_groups import ELEMENTWISE, dim_groups, padded_params
from meshdsl.trace.passes.static_windows import slice_starts
from meshdsl.trace.read_jaxpr import written

_THROUGH = ELEMENTWISE | {"broadcast_in_dim", "transpose", "squeeze", "reshape", "reduce_sum"}
DEEPEST = 64  # operations that a slice is pushed through, one after the other
LONGER = 8  # a dim is a little longer than a grid if no more than one of so many elements are ghosts
MUCH_ROUNDER = 16  # times as many devices split the slice as the whole dim: then the dim is the slice with ghosts
Range = tuple[int, int, int]  # a dim, and the first and one past the last of its elements


def push_slices(graph: Graph, roundness: Roundness) -> Graph:
    """Returns the graph with slices of dims that are longer than their grid pushed to what they are computed from."""
    return _pushed(graph, fresh_ids(graph), roundness)


def _pushed(graph: Graph, ids: Iterator[int], roundness: Roundness) -> Graph:
    pusher = _Pusher(ids, roundness)
    for op in graph.ops:
        if op.bodies:
            op = replace(op, bodies=tuple(_pushed(body, ids, roundness) for body in op.bodies))
        pusher.add(op)
    return with_ops(graph, pusher.ops)


class _Pusher:
    """Copies one graph operation by operation: ``parts`` are the slices already there, by value and range."""

    def __init__(self, ids: Iterator[int], roundness: Roundness) -> None:
        self.ids, self.roundness, self.ops = ids, roundness, list[Op]()
        self.makers: dict[int, Op] = {}
        self.table: Table = {}
        self.parts: dict[tuple[int, Range], Atom | None] = {}
        self.grid = 0  # elements of the slice that is pushed
        self.depth = 0  # operations that it has been pushed through

    def add(self, op: Op) -> None:
        """Appends an operation, or what it shows in place of a slice or split."""
        op = substitute(op, self.table)
        if (apart := _one_dim_at_a_time(op, self.roundness)) is not None:
            made, result = written(apart, op.inputs[:1], self.ids, op)
            for each in made:
                self.add(each)
            self.table[op.outputs[0].id] = look_up(result, self.table)
            return
        wanted = _cuts(op)
        longer = any(_has_ghosts(op.inputs[0].shape[d], stop - start, self.roundness) for d, start, stop in wanted)
        shown = [self._shown(op.inputs[0], each, op) for each in wanted if longer]
        if shown and None not in shown:
            self.table.update({v.id: x for v, x in zip(op.outputs, shown, strict=True) if x is not None})
        else:
            self.append(op)

    def _shown(self, x: Atom, wanted: Range, like: Op) -> Atom | None:
        """The part of a longer dim if it can be computed without the rest."""
        _, start, stop = wanted
        count, known = len(self.ops), dict(self.parts)
        self.grid = stop - start
        found = self.part(x, wanted, like)
        if found is None:
            del self.ops[count:]
            self.parts = known
        return found

    def append(self, op: Op) -> None:
        """Appends an operation as it is."""
        self.ops.append(op)
        self.makers.update((v.id, op) for v in op.outputs)

    def part(self, x: Atom, wanted: Range, like: Op) -> Atom | None:
        """Returns elements of a dim of ``x``, computed from slices that are not longer than the grid; None if none."""
        d, start, stop = wanted
        if not isinstance(x, Value) or d >= len(x.shape) or (start, stop) == (0, x.shape[d]):
            return x
        key = x.id, wanted
        if key not in self.parts and self.depth < DEEPEST:
            self.depth += 1
            self.parts[key] = self._computed(x, wanted, like)
            self.depth -= 1
        return self.parts.get(key)

    def _computed(self, x: Value, wanted: Range, like: Op) -> Atom | None:
        d, start, stop = wanted
        op = self.makers.get(x.id)
        if op is None or not self._is_longer(x.shape[d]):
            return self._write(lambda y: lax.slice_in_dim(y, start, stop, axis=d), (x,), like)
        if op.name == "pad" and not op.params["padding_config"][d][2]:
            return self._of_pad(op, wanted)
        if op.name == "concatenate":
            return self._of_concatenation(op, wanted)
        if (starts := slice_starts(op, x)) is not None:
            return self._of_slice(op, x, starts, wanted)
        if op.name == "iota":
            return self._of_count(op, wanted)
        return self._of_alike(op, wanted) if op.name in _THROUGH else None

    def _is_longer(self, n: int) -> bool:
        """Whether the slice has to be pushed further, through a dim of ``n`` elements."""
        is_round = self.roundness.is_round
        return n > self.grid if is_round(self.grid) else not is_round(n)

    def _of_alike(self, op: Op, wanted: Range) -> Atom | None:
        """An operation that treats the elements alike, on parts of its operands."""
        (d, start, stop), count = wanted, len(op.inputs)
        groups = [g for g in dim_groups(op) if (count, d) in g.ports and g.fill is None and g.column is None]
        if len(groups) != 1:
            return None
        at = dict(groups[0].ports)
        inputs = [self.part(x, (at[i], start, stop), op) if i in at else x for i, x in enumerate(op.inputs)]
        known = [x for x in inputs if x is not None]
        if len(known) < len(inputs):
            return None
        v = op.outputs[0]
        made = Value(next(self.ids), (*v.shape[:d], stop - start, *v.shape[d + 1 :]), v.dtype)
        params = padded_params(op, known, [made])
        self.append(replace(op, inputs=tuple(known), outputs=(made,), params=params))
        return made

    def _of_pad(self, op: Op, wanted: Range) -> Atom | None:
        """A pad by less, or by negative amounts, of what falls in the range."""
        (d, start, stop), (x, fill), v = wanted, op.inputs, op.outputs[0]
        low, n = int(op.params["padding_config"][d][0]), x.shape[d]
        first, last = min(max(start - low, 0), n), min(max(stop - low, 0), n)
        if first == last:
            shape = (*v.shape[:d], stop - start, *v.shape[d + 1 :])
            return self._write(lambda z: lax.broadcast(z, shape), (fill,), op)
        if self._is_longer(n) or not self.roundness.is_round(self.grid):
            low, n = low + first, last - first
            held = self.part(x, (d, first, last), op)
        else:
            held = x
        if held is None:
            return None
        amounts = (low - start, stop - low - n, 0)
        config = [amounts if e == d else a for e, a in enumerate(op.params["padding_config"])]
        return self._write(lambda y, z: lax.pad(y, z, config), (held, fill), op) if any(map(any, config)) else held

    def _of_concatenation(self, op: Op, wanted: Range) -> Atom | None:
        """The pieces that overlap the range; or along another dim, all of them in part. None for an empty range."""
        d, start, stop = wanted
        axis, begin, parts = op.params["dimension"], 0, list[Atom | None]()
        for x in op.inputs:
            n = x.shape[axis]
            if not n:
                continue
            first, last = (max(start - begin, 0), min(stop - begin, n)) if axis == d else (start, stop)
            if first < last:
                parts.append(self.part(x, (d, first, last), op))
            begin += n
        known = [x for x in parts if x is not None]
        if len(known) < len(parts) or not parts:
            return None
        return known[0] if len(known) == 1 else self._write(lambda *xs: lax.concatenate(xs, axis), tuple(known), op)

    def _of_slice(self, op: Op, v: Value, starts: list[int], wanted: Range) -> Atom | None:
        """A part of the source of a slice, or of a result of a split, cut along the other dims as before."""
        (d, start, stop), x = wanted, op.inputs[0]
        held = self.part(x, (d, starts[d] + start, starts[d] + stop), op)
        starts[d] = 0
        if held is None or all(n == m for e, (n, m) in enumerate(zip(x.shape, v.shape, strict=True)) if e != d):
            return held
        limits = [at + (stop - start if e == d else n) for e, (at, n) in enumerate(zip(starts, v.shape, strict=True))]
        return self._write(lambda y: lax.slice(y, starts, limits), (held,), op)

    def _of_count(self, op: Op, wanted: Range) -> Atom:
        (d, start, stop), v = wanted, op.outputs[0]
        shape, along = (*v.shape[:d], stop - start, *v.shape[d + 1 :]), op.params["dimension"]
        offset = start if along == d else 0
        return self._write(lambda: lax.broadcasted_iota(v.dtype, shape, along) + jnp.asarray(offset, v.dtype), (), op)

    def _write(self, function: Callable[..., jax.Array], inputs: tuple[Atom, ...], like: Op) -> Atom:
        made, result = written(function, inputs, self.ids, like)
        for op in made:
            self.append(op)
        return result


def _one_dim_at_a_time(op: Op, roundness: Roundness) -> Callable[[jax.Array], jax.Array] | None:
    """A slice that cuts a longer dim and others, as one slice per dim."""
    starts = _starts(op)
    if starts is None:
        return None
    ends = [(start, start + m) for start, m in zip(starts, op.outputs[0].shape, strict=True)]
    cut = [d for d, (end, n) in enumerate(zip(ends, op.inputs[0].shape, strict=True)) if end != (0, n)]
    lengths = [(op.inputs[0].shape[d], op.outputs[0].shape[d]) for d in cut]
    if len(cut) < 2 or not any(_has_ghosts(n, m, roundness) for n, m in lengths):
        return None
    return lambda x: reduce(lambda y, d: lax.slice_in_dim(y, *ends[d], axis=d), cut, x)


def _starts(op: Op) -> list[int] | None:
    """The first elements that a slice, or a pad by negative amounts, shows."""
    if op.name == "slice":
        return slice_starts(op, op.outputs[0])
    if op.name == "pad" and all(max(amounts) <= 0 for amounts in op.params["padding_config"]):
        return [-int(low) for low, *_ in op.params["padding_config"]]
    return None


def _cuts(op: Op) -> list[Range]:
    """The elements that a slice, a split, or a pad by negative amounts shows of the only dim that it cuts."""
    if op.name not in ("slice", "split", "pad") or not isinstance(op.inputs[0], Value):
        return []
    shape, shown = op.inputs[0].shape, op.outputs[0].shape
    if op.name == "split":
        ends = list(accumulate(map(int, op.params["sizes"]), initial=0))
        return [(op.params["axis"], start, stop) for start, stop in pairwise(ends)]
    starts = _starts(op)
    if starts is None:
        return []
    dims = [d for d, (n, m) in enumerate(zip(shape, shown, strict=True)) if n != m]
    if len(dims) != 1 or not shown[dims[0]]:
        return []
    return [(dims[0], starts[dims[0]], starts[dims[0]] + shown[dims[0]])]


def _has_ghosts(n: int, m: int, roundness: Roundness) -> bool:
    """Whether a dim of ``n`` elements, of which a slice shows ``m``, is a little longer than a grid.

    A much rounder slice is one. Else there is one below ``n`` if no length a little above it is as round.
    """
    few = max(1, n // LONGER)
    if n - few <= m < n and roundness.degree(m) >= MUCH_ROUNDER * roundness.degree(n):
        return True
    if n <= LONGER or roundness.is_round(n) or few < m < n - few:
        return False
    below, above = roundness.highest_degree(n - few, n - 1), roundness.highest_degree(n + 1, n + few)
    return below >= roundness.enough and below > above
