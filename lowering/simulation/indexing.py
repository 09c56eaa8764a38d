"""Operations that look where to read or write: slices at computed places, gather, scatter, sorting."""

from collections.abc import Sequence

import numpy as np

from meshdsl.lowering.simulation.interpreter import Devices, Function, Value
from meshdsl.lowering.simulation.numbers import Array
from meshdsl.lowering.simulation.operation import Operation, Unreadable
from meshdsl.lowering.simulation.windows import combined

_LONGEST = 4096  # sorted by an arbitrary comparison
_UPDATES = 4096  # scattered by an arbitrary computation


# ---- Slices ----------------------------------------------------------------------------------------------------------


def _starts(x: Array, sizes: Sequence[int], indices: Sequence[Array]) -> Array:
    """The places of slices, per device and dim, moved inside the array."""
    count = max(map(len, indices), default=1)
    columns = [
        np.broadcast_to(i.astype(np.int64), (count,)).clip(0, n - size)
        for i, n, size in zip(indices, x.shape[1:], sizes, strict=True)
    ]
    return np.stack(columns, 1) if columns else np.zeros((count, 0), np.int64)


def _dynamic_slice(devices: Devices, at: Operation, x: Array, *indices: Array) -> Array:
    sizes = at.integers("dynamic_slice_sizes")
    starts = _starts(x, sizes, indices)
    rows = [tuple(slice(s, s + n) for s, n in zip(row, sizes, strict=True)) for row in starts.tolist()]
    if len(rows) == 1:
        return x[(slice(None), *rows[0])]
    x = np.broadcast_to(x, (len(rows), *x.shape[1:]))
    return np.stack([part[row] for part, row in zip(x, rows, strict=True)])


def _dynamic_update_slice(devices: Devices, at: Operation, x: Array, update: Array, *indices: Array) -> Array:
    sizes = update.shape[1:]
    starts = _starts(x, sizes, indices)
    count = max(len(x), len(update), len(starts))
    made = np.broadcast_to(x, (count, *x.shape[1:])).copy()
    update = np.broadcast_to(update, (count, *sizes))
    for i, row in enumerate(np.broadcast_to(starts, (count, starts.shape[1])).tolist()):
        made[i, ...][tuple(slice(s, s + n) for s, n in zip(row, sizes, strict=True))] = update[i]
    return made


# ---- Gather and scatter ----------------------------------------------------------------------------------------------
# An index of the operand is the sum of a start, which the array of indices states for some dims, an offset within the
# window, and the place of the batch. All are arrays over the elements that are moved.


def _index(
    x: Array,
    indices: Array,
    vector: int,
    shape: Sequence[int],
    window: Sequence[int],
    stated: Sequence[int],
    batched: Sequence[int],
    batches: Sequence[int],
    dropped: Sequence[int],
) -> tuple[list[Array], list[Array]]:
    """Per dim of the operand, the start and the offset of every element that is moved.

    Args:
      x: the operand. indices: starts. vector: their dim that has one for each of the ``stated`` dims of the operand.
      shape: of what is moved. window: those of its dims that are of the window; the others are of the indices.
      batched, batches: dims of the operand, and the dims of the indices that walk along with them.
      dropped: dims of the operand, of length 1 in the window, that it lacks.
    """
    if vector == indices.ndim - 1:
        indices = indices[..., None]
    indices = np.moveaxis(indices, 1 + vector, -1).astype(np.int64)
    outer = [d for d in range(len(shape)) if d not in window]
    inner = [d for d in range(x.ndim - 1) if d not in dropped and d not in batched]

    def along(dim: int) -> Array:
        return np.arange(shape[dim]).reshape(1, *(-1 if d == dim else 1 for d in range(len(shape))))

    starts, offsets = list[Array](), list[Array]()
    one = np.zeros((1, *[1] * len(shape)), np.int64)
    for d in range(x.ndim - 1):
        start = one
        if d in stated:
            column = indices[..., list(stated).index(d)]
            start = column.reshape(len(column), *(shape[o] if o in outer else 1 for o in range(len(shape))))
        elif d in batched:
            dim = batches[list(batched).index(d)]
            start = along(outer[dim if dim < vector else dim - 1])
        starts.append(start)
        offsets.append(along(sorted(window)[inner.index(d)]) if d in inner else one)
    return starts, offsets


def _gather(devices: Devices, at: Operation, x: Array, indices: Array) -> Array:
    sizes, batched = at.integers("slice_sizes"), at.integers("operand_batching_dims")
    starts, offsets = _index(
        x,
        indices,
        at.integer("index_vector_dim"),
        at.type.dims,
        at.integers("offset_dims"),
        at.integers("start_index_map"),
        batched,
        at.integers("start_indices_batching_dims"),
        at.integers("collapsed_slice_dims"),
    )
    places = [
        start.clip(0, n - size) + offset
        for start, offset, n, size in zip(starts, offsets, x.shape[1:], sizes, strict=True)
    ]
    count = max(len(x), len(indices))
    x = np.broadcast_to(x, (count, *x.shape[1:]))
    device = np.arange(count).reshape(-1, *[1] * len(at.type.dims))
    found = x[(device, *places)]
    return np.broadcast_to(found, (count, *at.type.dims))


def _scatter(devices: Devices, at: Operation, *args: Array) -> Array:
    if len(args) != 3:
        raise Unreadable("several arrays at once")
    x, indices, updates = args
    window, batched = at.integers("update_window_dims"), at.integers("input_batching_dims")
    dropped = at.integers("inserted_window_dims")
    shape = updates.shape[1:]
    starts, offsets = _index(
        x,
        indices,
        at.integer("index_vector_dim"),
        shape,
        window,
        at.integers("scatter_dims_to_operand_dims"),
        batched,
        at.integers("scatter_indices_batching_dims"),
        dropped,
    )
    count = max(map(len, args))
    inner = [d for d in range(x.ndim - 1) if d not in dropped and d not in batched]
    sizes = {d: shape[w] for d, w in zip(inner, sorted(window), strict=True)}
    inside = np.ones((1, *[1] * len(shape)), bool)
    for d, start in enumerate(starts):
        inside = inside & (start >= 0) & (start <= x.shape[1 + d] - sizes.get(d, 1))
    full = (count, *shape)
    inside = np.broadcast_to(inside, full)
    device = np.broadcast_to(np.arange(count).reshape(-1, *[1] * len(shape)), full)
    places = tuple(np.broadcast_to(s + o, full)[inside] for s, o in zip(starts, offsets, strict=True))
    made = np.broadcast_to(x, (count, *x.shape[1:])).copy()
    return _written(devices, at, made, (device[inside], *places), np.broadcast_to(updates, full)[inside])


def _written(devices: Devices, at: Operation, made: Array, places: tuple[Array, ...], values: Array) -> Array:
    """An array with values combined into it at some places."""
    computation, numbers = at.computation("to_apply"), devices.numbers
    how = devices.combiner(computation)
    if how == "second":
        made[places] = values
    elif how == "add" and at.kind != "bool":
        np.add.at(made, places, values)
        if at.kind == "float":
            made = numbers.add(made, np.zeros(1, made.dtype))
    elif how in ("maximum", "minimum") and at.kind in ("int", "float"):
        keys = numbers.order(made) if at.kind == "float" else made
        pick = np.maximum if how == "maximum" else np.minimum
        pick.at(keys, places, numbers.order(values) if at.kind == "float" else values)
        made = numbers.ordered(keys) if at.kind == "float" else keys
    elif len(values) > _UPDATES:
        raise Unreadable("many updates, each by a computation")
    else:
        both = combined(devices, computation)
        for place, value in zip(zip(*places, strict=True), values, strict=True):
            (new,) = both([made[place][None]], [value[None]])
            made[place] = new[0]
    return made


# ---- Sorting ---------------------------------------------------------------------------------------------------------


def _sort(devices: Devices, at: Operation, *args: Array) -> Value:
    dim = 1 + at.integers("dimensions")[0]
    count = max(map(len, args))
    arrays = [np.moveaxis(np.broadcast_to(x, (count, *x.shape[1:])), dim, -1).copy() for x in args]
    length = arrays[0].shape[-1]
    if length > _LONGEST:
        raise Unreadable(f"more than {_LONGEST} elements in a row")
    devices.charge(sum(x.size for x in arrays) * length)
    for turn in range(length):  # odd-even transposition, which is stable
        left, right = slice(turn % 2, length - 1, 2), slice(turn % 2 + 1, length, 2)
        pairs = [end for x in arrays for end in (x[..., right], x[..., left])]
        swap = devices.scalars(at.computation("to_apply"), pairs)
        for x in arrays:
            low, high = x[..., left].copy(), x[..., right].copy()
            x[..., left], x[..., right] = np.where(swap, high, low), np.where(swap, low, high)
    made = [np.moveaxis(x, -1, dim) for x in arrays]
    return tuple(made) if at.instruction.type.startswith("(") else made[0]


def top_k(devices: Devices, at: Operation, x: Array) -> Value:
    """Returns the largest elements of the last dim, and their places."""
    devices.charge(x.size * max(1, x.shape[-1]).bit_length())
    keys = devices.numbers.order(x) if at.kind == "float" else x.astype(np.int64)
    largest = at.attributes.get("largest", "true") == "true"
    order = np.argsort(-keys if largest else keys, axis=-1, kind="stable")[..., : at.types[0].dims[-1]]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)


FUNCTIONS: dict[str, Function] = {
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "scatter": _scatter,
    "sort": _sort,
    "topk": top_k,
}
