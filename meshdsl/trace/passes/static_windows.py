"""Static windows: reads and writes at known positions become slices, or are recognised as windows.

    gather at a constant position                   slice                     the gradient of ``x.at[1:-1].set(y)``
    gather of frames of k, hop apart                stack of k slices         x[hop * arange(m)[:, None] + arange(k)]
    gather of a few runs of positions               slices, concatenated      x[np.r_[0:8, 16:24]]
    scatter to every second position                select(i % 2 == 0, pad(y, 1 between), x)
    slice x[3::2]                                   x[1::2][1:]
    pad by (3, 4), 1 between                        pad by (1, 2), then by (1, 0), 1 between
    pad(x[:1], (0, n - 1))                          select(i == 0, x, 0)      the gradient of ``concatenate``

``jax.numpy`` writes static slices with strides as lookups with computed indices. Slices that begin inside a first
stride, and pads likewise, keep all blocks in place; the rest is a shift without a stride. ``written_window`` finds
the window of a scatter or a dynamic update.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.loops import loop_ports
from meshdsl.ir.rewrite import Table, fresh_ids, in_bodies, look_up, substitute, with_ops
from meshdsl.rules.indexing import COMBINE, SCATTERS, Combine, Lookup, gather_dims, scatter_dims
from meshdsl.trace.read_jaxpr import written

Array = NDArray[Any]
LONGEST = 1 << 20  # elements of an index that is evaluated
REMEMBERED = 1 << 8  # elements of an evaluated array that is stored for further reads
FEW = 16  # numbers that are written into a loop's body, or slices that a lookup becomes
SPARSE = 8  # a few positions, fewer than one of so many, are cheaper to look up than to slice with a stride
LONG_RUN = 4  # positions in a run, on average, for a lookup to become slices
SHORTER = 4  # a dim is put on a longer grid if it lacks no more than one of so many places

# ---- Constants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constants:
    """The integers and booleans of a graph that depend on nothing, evaluated when they are first read.

    Args:
      makers: the producers of the graph's values.
      small: the constants that have been evaluated, by value id, without large ones; None for other values.
    """

    makers: Mapping[int, Op]
    small: dict[int, Array | None] = field(default_factory=dict)

    def of(self, x: Atom) -> Array | None:
        """Returns the elements of ``x``; None if they are not known, or too many.

        An index can be the end of a chain of thousands of operations that read their operand several times. So there
        is no recursion, and no value is evaluated twice.
        """
        found = ChainMap[int, Array | None]({}, self.small)
        waiting = [x]
        while waiting:
            at = waiting[-1]
            op = self._maker(at)
            missing = [y for y in op.inputs if _is_missing(y, found)] if op and _is_missing(at, found) else []
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if _is_missing(at, found):
                numbers = _evaluated(op, [_elements(y, found) for y in op.inputs]) if op else None
                (self.small if numbers is None or numbers.size <= REMEMBERED else found)[at.id] = numbers
        return _elements(x, found)

    def _maker(self, x: Atom) -> Op | None:
        op = self.makers.get(x.id) if isinstance(x, Value) else None
        return op if op is not None and op.name in _EVALUATE and prod(x.shape) <= LONGEST else None


def _is_missing(x: Atom, found: Mapping[int, Array | None]) -> bool:
    return isinstance(x, Value) and x.id not in found


def _elements(x: Atom, found: Mapping[int, Array | None]) -> Array | None:
    if isinstance(x, Value):
        return found[x.id]
    return np.asarray(x.value) if np.issubdtype(x.dtype, np.integer) else None


def _evaluated(op: Op, operands: Sequence[Array | None]) -> Array | None:
    known = [x for x in operands if x is not None]
    if len(known) < len(operands):
        return None
    with np.errstate(over="ignore"):  # integers wrap
        return _EVALUATE[op.name](op.params, *known)


def _broadcast(params: Mapping[str, Any], x: Array) -> Array:
    shape = [1] * len(params["shape"])
    for d, n in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[d] = n
    spread: Array = np.broadcast_to(x.reshape(shape), params["shape"])
    return spread


def _select(_: Any, which: Array, *cases: Array) -> Array:
    chosen = cases[0]
    for i, case in enumerate(cases[1:], 1):
        chosen = np.where(which == i, case, chosen)
    return chosen


def _iota(params: Mapping[str, Any]) -> Array:
    shape, d = params["shape"], params["dimension"]
    along = np.arange(shape[d]).astype(params["dtype"]).reshape([-1 if i == d else 1 for i in range(len(shape))])
    counted: Array = np.broadcast_to(along, shape)
    return counted


def _constant(params: Mapping[str, Any]) -> Array | None:
    value = params["value"]
    known = jnp.issubdtype(value.dtype, np.integer) or value.dtype == np.bool_
    return np.asarray(value) if known else None


_EVALUATE: dict[str, Callable[..., Array | None]] = {
    "add": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "mul": lambda _, x, y: x * y,
    "lt": lambda _, x, y: x < y,
    "select_n": _select,
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "constant": _constant,
}

# ---- Windows ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The elements of an operand that an update replaces, or combines with.

    Args:
      starts, sizes, strides: per dim of the operand.
      places: per dim of the operand, the dim of the update that has its elements; None for a single one.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    places: tuple[int | None, ...]

    @property
    def index(self) -> tuple[slice, ...]:
        """The window as an index."""
        ends = zip(self.starts, self.sizes, self.strides, strict=True)
        return tuple(slice(start, start + (n - 1) * step + 1, step) for start, n, step in ends)


def written_window(op: Op, constants: Constants) -> Window | None:
    """Returns the window that an operation writes; None if it is not known, or not inside the operand."""
    shape = op.inputs[0].shape
    if op.name == "dynamic_update_slice":
        return _updated_slice(op, constants)
    if op.name not in SCATTERS or (op.name == "scatter" and op.params["update_jaxpr"] is not None):
        return None
    numbers, dims, indices = op.params["dimension_numbers"], scatter_dims(op), constants.of(op.inputs[1])
    if indices is None or not indices.size or numbers.operand_batching_dims or 0 in op.inputs[2].shape:
        return None
    windows = iter(numbers.update_window_dims)
    places = [None if d in numbers.inserted_window_dims else next(windows) for d in range(len(shape))]
    starts, sizes, strides = [0] * len(shape), list(dims.sizes), [1] * len(shape)
    rows = indices.reshape(-1, len(dims.columns)).astype(np.int64)
    for column, d in enumerate(dims.columns):
        starts[d] = int(rows[0, column])
    if len(rows) > 1:
        found = _progression(rows, dims.queries)
        if found is None or dims.columns[0] not in numbers.inserted_window_dims:
            return None
        (d,), (query,) = dims.columns, dims.queries
        places[d], sizes[d], strides[d] = query, len(rows), found
    window = Window(tuple(starts), tuple(sizes), tuple(strides), tuple(places))
    ends = zip(window.index, shape, strict=True)
    return window if all(at.start >= 0 and at.stop <= n for at, n in ends) else None


def _updated_slice(op: Op, constants: Constants) -> Window | None:
    """The window of a dynamic update of a slice; its start is moved into the operand."""
    shape, sizes = op.inputs[0].shape, op.inputs[1].shape
    starts: list[int] = []
    for x, n, m in zip(op.inputs[2:], shape, sizes, strict=True):
        start = constants.of(x)
        if (start is None and n != m) or not m:
            return None
        starts.append(0 if start is None else min(max(int(start), 0), n - m))
    return Window(tuple(starts), sizes, (1,) * len(shape), tuple(range(len(shape))))


def _progression(rows: Array, queries: Sequence[int]) -> int | None:
    """The constant distance of positions of one column and one batch dim; None if they have none."""
    if rows.shape[1] != 1 or len(queries) != 1:
        return None
    steps = np.unique(np.diff(rows[:, 0]))
    return int(steps[0]) if steps.size == 1 and steps[0] > 0 else None


@dataclass(frozen=True)
class Ranges:
    """Positions along one dim of an operand as a few ranges, joined end to end or side by side.

        x[np.r_[0:8, 16:24]]                     0:8, 16:24            end to end
        x[4 * arange(m)[:, None] + arange(3)]    0::4, 1::4, 2::4      side by side

    Args:
      dim: of the operand.
      ranges: in order.
      queries: the dim of the slices along the ranges and, if these are side by side, the dim across them.
    """

    dim: int
    ranges: tuple[range, ...]
    queries: tuple[int, ...]

    @property
    def _joined(self) -> tuple[int, ...]:
        """The dims of the joined ranges, in the order of ``queries``."""
        return (self.dim, self.dim + 1)[: len(self.queries)]

    def read(self, x: jax.Array) -> jax.Array:
        """Returns the elements of ``x`` at the positions."""
        parts = [lax.slice_in_dim(x, at.start, at.stop, at.step, self.dim) for at in self.ranges]
        joined = jnp.stack(parts, self.dim + 1) if len(self.queries) == 2 else lax.concatenate(parts, self.dim)
        return jnp.moveaxis(joined, self._joined, self.queries)

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns ``x`` with ``y`` added at the positions, several times where they repeat."""
        d, joined = self.dim, jnp.moveaxis(y, self.queries, self._joined)
        if len(self.queries) == 2:
            parts = [lax.index_in_dim(joined, j, d + 1, keepdims=False) for j in range(len(self.ranges))]
        else:
            ends = pairwise(accumulate(map(len, self.ranges), initial=0))
            parts = [lax.slice_in_dim(joined, start, stop, axis=d) for start, stop in ends]
        for part, at in zip(parts, self.ranges, strict=True):
            x += _put(part, d, at, x.shape[d])
        return x


def _put(y: jax.Array, d: int, places: range, n: int) -> jax.Array:
    """Returns ``y`` with its elements along dim ``d`` at these places of ``n``, and zeros at the others."""
    amounts = places.start, n - places[-1] - 1, places.step - 1
    return lax.pad(y, jnp.zeros((), y.dtype), [amounts if e == d else (0, 0, 0) for e in range(y.ndim)])


def _ranges(op: Op, positions: Array, dims: Lookup) -> Ranges | None:
    """Returns the ranges at which a lookup along one dim reads or writes all elements along the others.

    None if it is no such lookup, or the ranges are many or short.
    """
    if len(dims.columns) != 1 or dims.sizes[dims.columns[0]] != 1:
        return None
    (d,), queries = dims.columns, dims.queries
    whole = all(n == m for e, (n, m) in enumerate(zip(op.inputs[0].shape, dims.sizes, strict=True)) if e != d)
    if not whole or len(dims.slices) != len(dims.operand) - 1 + len(queries):  # the slices have the dim as well
        return None
    numbers = positions[..., 0].astype(np.int64)
    if numbers.ndim == 1:
        runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        if len(runs) > FEW or LONG_RUN * len(runs) > numbers.size:
            return None
        return Ranges(d, tuple(range(int(run[0]), int(run[-1]) + 1) for run in runs), queries)
    if numbers.ndim != 2:
        return None
    if numbers.shape[0] < numbers.shape[1]:
        numbers, queries = numbers.T, queries[::-1]
    hops = np.unique(np.diff(numbers, axis=0))
    if not 1 < numbers.shape[1] <= FEW or hops.size != 1 or hops[0] < 1:
        return None
    ends = zip(numbers[0], numbers[-1], strict=True)
    return Ranges(d, tuple(range(int(first), int(last) + 1, int(hops[0])) for first, last in ends), queries)


# ---- The pass --------------------------------------------------------------------------------------------------------


Form = tuple[Callable[..., jax.Array], Sequence[Atom]]  # a function, and the values that it reads


def static_windows(graph: Graph) -> Graph:
    """Returns the graph with lookups at constant positions, and strides, in these forms."""
    return _rewritten(graph, fresh_ids(graph), {})


def _rewritten(graph: Graph, ids: Iterator[int], known: Mapping[int, Array]) -> Graph:
    """The graph in these forms.

    Args:
      known: by id, inputs that are constants; autodiff passes those of a loop's body as operands of the loop.
    """
    table: Table = {}
    makers: dict[int, Op] = {}
    constants = Constants(makers)
    ops: list[Op] = []
    for v in graph.inputs:
        if v.id in known:
            made, table[v.id] = written(partial(_again, known[v.id], v.dtype), (), ids, graph.ops[-1])
            makers.update((x.id, each) for each in made for x in each.outputs)
            ops += made

    def rewrite(op: Op) -> None:
        op = substitute(op, table)
        if op.bodies:
            inside = _constant_inputs(op, constants)
            op = replace(op, bodies=tuple(_rewritten(body, ids, inside) for body in op.bodies))
        form = _FORMS[op.name](op, constants) if op.name in _FORMS else None
        if form is None:
            ops.append(op)
            makers.update((v.id, op) for v in op.outputs)
            return
        made, result = written(*form, ids, op)
        for each in made:
            rewrite(each)
        table[op.outputs[0].id] = look_up(result, table)

    for op in graph.ops:
        rewrite(op)
    return with_ops(graph, ops)


def _constant_inputs(op: Op, constants: Constants) -> dict[int, Array]:
    """The constants among the inputs of the bodies of a loop that are positions there, by id."""
    found: dict[int, Array] = {}
    positions = {x.id for body in op.bodies for each in body.ops if _positions(each) for x in each.inputs[1:]}
    positions |= {x.id for body in op.bodies for each in body.ops if each.bodies for x in each.inputs}
    for port in loop_ports(op):
        x = op.inputs[port.operand] if port.invariant else None
        numbers = constants.of(x) if isinstance(x, Value) else None
        if numbers is not None and (numbers.size <= FEW or _is_range(numbers)):
            inner = (op.bodies[which].inputs[i].id for which, i in port.inputs)
            found.update((each, numbers) for each in inner if each in positions)
    return found


def _positions(op: Op) -> bool:
    """Whether the operation reads or writes at positions given by operands."""
    return op.name in ("gather", "dynamic_slice", *COMBINE)


def _is_range(numbers: Array) -> bool:
    return bool(np.unique(np.diff(numbers.reshape(-1))).size <= 1)


def _again(numbers: Array, dtype: Any) -> jax.Array:
    """An array of few integers, or of a range of them, computed from literals."""
    flat = [int(n) for n in numbers.reshape(-1)[:FEW]]
    if numbers.size <= FEW:
        return lax.concatenate([lax.full((1,), n, dtype) for n in flat], 0).reshape(numbers.shape)
    return (lax.iota(dtype, numbers.size) * (flat[1] - flat[0]) + flat[0]).astype(dtype).reshape(numbers.shape)


def _gathered(op: Op, constants: Constants) -> Form | None:
    """A gather at constant positions inside the operand, as slices: of one window, a stride, ranges."""
    numbers, dims, at = op.params["dimension_numbers"], gather_dims(op), constants.of(op.inputs[1])
    if at is None or not at.size or numbers.operand_batching_dims or 0 in op.outputs[0].shape:
        return None
    rows = at.reshape(-1, len(dims.columns)).astype(np.int64)
    if np.any(rows < 0) or np.any(rows > np.array(dims.limits)):
        return None
    starts = [0] * len(op.inputs[0].shape)
    for d, start in zip(dims.columns, rows[0], strict=True):
        starts[d] = int(start)
    if len(rows) > 1:
        stride, d = _progression(rows, dims.queries), dims.columns[0]
        if stride is None:
            ranges = _ranges(op, at, dims)
            return None if ranges is None else (ranges.read, op.inputs[:1])
        if d not in numbers.collapsed_slice_dims:
            return None
        n, few = op.inputs[0].shape[d], len(rows) <= FEW
        if few and SPARSE * len(rows) < n and stride * len(rows) != n:
            return None
        first, last = starts[d], int(rows[-1, 0]) + 1
        return lambda x: jnp.moveaxis(lax.slice_in_dim(x, first, last, stride, d), d, dims.queries[0]), op.inputs[:1]
    ends = [start + n for start, n in zip(starts, op.params["slice_sizes"], strict=True)]
    return lambda x: lax.slice(x, starts, ends).reshape(op.outputs[0].shape), op.inputs[:1]


def _read(op: Op, constants: Constants) -> Form | None:
    """A dynamic slice from a constant position, as a slice."""
    starts = [constants.of(x) for x in op.inputs[1:]]
    known = [int(start) for start in starts if start is not None]
    if len(known) < len(starts):
        return None
    sizes, shape = op.params["slice_sizes"], op.inputs[0].shape
    first = [min(max(start, 0), n - m) for start, n, m in zip(known, shape, sizes, strict=True)]
    return lambda x: lax.slice(x, first, [start + m for start, m in zip(first, sizes, strict=True)]), op.inputs[:1]


def _scattered(op: Op, constants: Constants) -> Form | None:
    """An update of every ``stride``-th position, as a selection; ranges that are added up, as a sum of shifts."""
    window = written_window(op, constants)
    if window is None:
        return _added(op, constants) if op.name == "scatter-add" else None
    if max(window.strides) == 1:
        return None
    d = next(d for d, stride in enumerate(window.strides) if stride > 1)
    whole = all(n == m for e, (n, m) in enumerate(zip(op.inputs[0].shape, window.sizes, strict=True)) if e != d)
    update = partial(_strided_update, window=window, d=d, combine=COMBINE[op.name])
    return (update, (op.inputs[0], op.inputs[2])) if whole else None


def _added(op: Op, constants: Constants) -> Form | None:
    """Ranges that are added up, as autodiff writes it for a gather of them: a sum of shifts."""
    dims, at = scatter_dims(op), constants.of(op.inputs[1])
    if at is None or not at.size or op.params["dimension_numbers"].operand_batching_dims:
        return None
    ranges = _ranges(op, at, dims)
    if ranges is None or np.any(at < 0) or np.any(at > dims.limits[0]):
        return None
    return ranges.added, (op.inputs[0], op.inputs[2])


def _strided_update(x: jax.Array, y: jax.Array, window: Window, d: int, combine: Combine) -> jax.Array:
    order = [place for place in window.places if place is not None]
    moved = lax.transpose(y, order).reshape(window.sizes)
    places = range(x.shape[d])[window.index[d]]
    return lax.select(within(x.shape, d, places), combine(x, _put(moved, d, places, x.shape[d])), x)


def _sliced(op: Op, constants: Constants) -> Form | None:
    """A strided slice that begins later than in the first stride, or ends earlier than in the last."""
    strides = op.params["strides"]
    if strides is None or max(strides) == 1:
        return None
    x, y = op.inputs[0], op.outputs[0]
    ends = [(0, n, 1) for n in x.shape]
    rest = list(zip(op.params["start_indices"], op.params["limit_indices"], strict=True))
    changed = False
    for d, step in enumerate(strides):
        start, n, m = op.params["start_indices"][d], x.shape[d], y.shape[d]
        if step > 1 and (n % step or m < 1 or SHORTER * (n // step - m) > n):
            return None
        if step > 1:
            ends[d] = start % step, n, step
            rest[d] = start // step, start // step + m
            changed |= m < n // step
    if not changed:
        return None
    return lambda x: lax.slice(lax.slice(x, *zip(*ends, strict=True)), *zip(*rest, strict=True)), op.inputs


def _padded(op: Op, constants: Constants) -> Form | None:
    return _put_back(op, constants.makers) or _spread(op, constants.makers) or _interleaved(op)


def _put_back(op: Op, makers: Mapping[int, Op]) -> Form | None:
    """A slice that is padded to the length of its source, at most a little further on: a shift, and a selection."""
    cut, config = _cut(op.inputs[0], makers), op.params["padding_config"]
    if cut is None or cut[0].shape != op.outputs[0].shape:
        return None
    source, starts = cut
    sizes, lows = op.inputs[0].shape, [int(low) for low, *_ in config]
    moved = [low - start for low, start in zip(lows, starts, strict=True)]
    refilled = [n != m for n, m in zip(source.shape, sizes, strict=True)]
    if any(between and n > 1 for n, (*_, between) in zip(sizes, config, strict=True)) or not any(refilled):
        return None
    if any(abs(by) > max(1, n // SHORTER) for by, n in zip(moved, source.shape, strict=True)) or min(lows) < 0:
        return None

    def put_back(x: jax.Array, fill: jax.Array) -> jax.Array:
        shifted = lax.pad(x, fill, [(by, -by, 0) for by in moved]) if any(moved) else x
        inside = [within(x.shape, d, range(lows[d], lows[d] + sizes[d])) for d, other in enumerate(refilled) if other]
        return lax.select(reduce(jnp.logical_and, inside), shifted, jnp.broadcast_to(fill, x.shape))

    return put_back, (source, op.inputs[1])


def _spread(op: Op, makers: Mapping[int, Op]) -> Form | None:
    """One element that is cut out, and padded so that it stays in its block if the blocks are as many."""
    cut = _cut(op.inputs[0], makers)
    shorter = [] if cut is None else [d for d, n in enumerate(cut[0].shape) if n != op.inputs[0].shape[d]]
    padded = [d for d, amounts in enumerate(op.params["padding_config"]) if any(amounts)]
    if cut is None or len(shorter) != 1 or padded != shorter or op.inputs[0].shape[shorter[0]] != 1:
        return None
    (d,), (source, starts) = shorter, cut
    stride, left = divmod(op.outputs[0].shape[d], source.shape[d])
    offset = int(op.params["padding_config"][d][0]) - starts[d] * stride
    if left or not 0 <= offset < stride:
        return None

    def spread(x: jax.Array, fill: jax.Array) -> jax.Array:
        kept = lax.select(within(x.shape, d, range(starts[d], starts[d] + 1)), x, jnp.broadcast_to(fill, x.shape))
        amounts = (offset, stride - 1 - offset, stride - 1)
        return lax.pad(kept, fill, [amounts if e == d else (0, 0, 0) for e in range(x.ndim)])

    return spread, (source, op.inputs[1])


def _cut(x: Atom, makers: Mapping[int, Op]) -> tuple[Value, list[int]] | None:
    """The value that ``x`` is a slice of, without strides, and where it starts."""
    op = makers.get(x.id) if isinstance(x, Value) else None
    starts = None if op is None else slice_starts(op, x)
    source = None if op is None or starts is None else op.inputs[0]
    return (source, starts) if isinstance(source, Value) and starts is not None else None


def slice_starts(op: Op, result: Atom) -> list[int] | None:
    """Returns where in the operand a result of a slice without strides, or of a split, starts; None for other ones."""
    if op.name == "slice":
        return list(map(int, op.params["start_indices"])) if max(op.params["strides"] or (1,)) == 1 else None
    if op.name != "split":
        return None
    which = next(i for i, v in enumerate(op.outputs) if v is result)
    before = int(sum(op.params["sizes"][:which]))
    return [before if d == op.params["axis"] else 0 for d in range(len(result.shape))]


def within(shape: tuple[int, ...], d: int, places: range) -> jax.Array:
    """Returns whether places along dim d are among ``places``."""
    at = lax.broadcasted_iota(jnp.int32, shape, d)
    found = [at >= places.start] if places.start > 0 else []
    found += [at < places.stop] if places.stop < shape[d] or not found else []
    found += [lax.rem(at - places.start, jnp.int32(places.step)) == 0] if places.step > 1 else []
    return reduce(jnp.logical_and, found)


def _interleaved(op: Op) -> Form | None:
    """A pad between elements that begins, or ends, with more than a stride."""
    outer, inner = [], []
    ends = zip(op.inputs[0].shape, op.outputs[0].shape, op.params["padding_config"], strict=True)
    for n, total, (low, _, between) in ends:
        step = between + 1
        if between and (total % step or n < 2):
            return None
        first, shift = (low % step, low // step) if between else (0, low)
        inner.append((shift, total // step - n - shift, 0))
        outer.append((first, between - first, between) if between else (0, 0, 0))
    if not any(between for *_, between in outer) or not any(map(any, inner)):
        return None
    return lambda x, fill: lax.pad(lax.pad(x, fill, inner), fill, outer), op.inputs


_FORMS: dict[str, Callable[[Op, Constants], Form | None]] = {
    "gather": _gathered,
    "dynamic_slice": _read,
    "slice": _sliced,
    "pad": _padded,
    **dict.fromkeys(SCATTERS, _scattered),
}

# ---- Slices and pads that no pass used apart -------------------------------------------------------------------------


def join_strides(graph: Graph) -> Graph:
    """Returns the graph with slices of slices, and pads of pads, as one each where nothing else reads the first."""
    makers, readers = producers(graph), consumers(graph)
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(join_strides, op)
        x = op.inputs[0] if op.name in _JOIN else None
        first = makers.get(x.id) if isinstance(x, Value) and len(readers[x.id]) == 1 else None
        params = _JOIN[op.name](first, op) if first is not None and first.name == op.name else None
        ops.append(op if first is None or params is None else replace(op, params=params, inputs=first.inputs))
    return with_ops(graph, ops)


def _join_slices(first: Op, then: Op) -> dict[str, Any] | None:
    strides, starts = first.params["strides"], first.params["start_indices"]
    if strides is None or max(strides) == 1 or max(then.params["strides"] or (1,)) > 1:
        return None
    ends = zip(starts, strides, then.params["start_indices"], then.outputs[0].shape, strict=True)
    found = [(a + step * b, a + step * (b + n - 1) + 1) for a, step, b, n in ends]
    return {**first.params, "start_indices": tuple(a for a, _ in found), "limit_indices": tuple(b for _, b in found)}


def _join_pads(first: Op, then: Op) -> dict[str, Any] | None:
    inner, outer = first.params["padding_config"], then.params["padding_config"]
    fills = [x for x in (first.inputs[1], then.inputs[1]) if isinstance(x, Literal)]
    alike = len(fills) == 2 and np.asarray(fills[0].value).tobytes() == np.asarray(fills[1].value).tobytes()
    if not alike or any(k for *_, k in inner) or not any(k for *_, k in outer):
        return None
    ends = zip(inner, outer, strict=True)
    return {"padding_config": tuple((lo + (k + 1) * a, hi + (k + 1) * b, k) for (a, b, _), (lo, hi, k) in ends)}


_JOIN: dict[str, Callable[[Op, Op], dict[str, Any] | None]] = {"slice": _join_slices, "pad": _join_pads}
