"""Reductions: of whole dims, and of windows."""

from collections.abc import Callable
from itertools import product
from math import prod

import numpy as np

from meshdsl.lowering.simulation.contraction import KernelWindow
from meshdsl.lowering.simulation.interpreter import Devices, Function, Value
from meshdsl.lowering.simulation.numbers import Array
from meshdsl.lowering.simulation.operation import Operation, Unreadable
from meshdsl.lowering.simulation.shaping import padded

Arrays = list[Array]
Combined = Callable[[Arrays, Arrays], Arrays]
_WHOLE: dict[str, Callable[..., Array]] = {
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def combined(devices: Devices, computation: str) -> Combined:
    """Returns the function of arrays of scalars that a computation is for scalars."""

    def both(a: Arrays, b: Arrays) -> Arrays:
        found = devices.scalars(computation, [*a, *b])
        return list(found) if isinstance(found, tuple) else [found]

    return both


def total(devices: Devices, kind: str, computation: str, x: Array, dims: tuple[int, ...]) -> Array | None:
    """Returns a reduction of whole dims by a computation that is one operation; None for other computations."""
    how, numbers = devices.combiner(computation), devices.numbers
    if how == "add" and kind == "float":
        return numbers.total(x, dims)
    if how == "add" and kind in ("int", "complex"):
        return np.asarray(x.sum(dims, dtype=x.dtype))
    if how in _WHOLE and kind in ("int", "bool"):
        return np.asarray(_WHOLE[how](x, axis=dims))
    if how in ("maximum", "minimum") and kind in ("int", "float") and all(x.shape[d] for d in dims):
        pick = np.max if how == "maximum" else np.min
        keys = pick(numbers.order(x) if kind == "float" else x, axis=dims)
        return numbers.ordered(keys) if kind == "float" else np.asarray(keys)
    return None


def folded(both: Combined, arrays: Arrays, dim: int) -> Arrays:
    """Returns arrays without a dim, neighbours combined in pairs, in order."""
    while (length := arrays[0].shape[dim]) > 1:
        even, odd = ([np.take(x, range(start, length - length % 2, 2), dim) for x in arrays] for start in (0, 1))
        pairs = both(even, odd)
        if length % 2:
            last = [np.take(x, [length - 1], dim) for x in arrays]
            pairs = [np.concatenate([x, y], dim) for x, y in zip(pairs, last, strict=True)]
        arrays = pairs
    return [x.squeeze(dim) for x in arrays]


def _reduce(devices: Devices, at: Operation, *args: Array) -> Value:
    arrays, starts = list(args[: len(args) // 2]), args[len(args) // 2 :]
    dims, computation = tuple(1 + d for d in at.integers("dimensions")), at.computation("to_apply")
    devices.charge(sum(x.size for x in arrays))
    both, single = combined(devices, computation), all(arrays[0].shape[d] == 1 for d in dims)
    if len(arrays) == 1 and (found := total(devices, at.kind, computation, arrays[0], dims)) is not None:
        arrays = [found]
    elif any(arrays[0].shape[d] == 0 for d in dims):
        raise Unreadable("empty arrays")
    else:
        count = max(map(len, arrays))
        arrays = [np.broadcast_to(x, (count, *x.shape[1:])) for x in arrays]
        for dim in sorted(dims, reverse=True):
            arrays = folded(both, arrays, dim)
    first = [start.reshape(-1, *[1] * (x.ndim - 1)) for start, x in zip(starts, arrays, strict=True)]
    made = both([np.broadcast_to(a, np.broadcast_shapes(a.shape, x.shape)) for a, x in zip(first, arrays, strict=True)],
                arrays)  # fmt: skip
    pairs = zip(made, arrays, strict=True)
    if single and any(((x != y) & ~(np.isnan(x) & np.isnan(y))).any() for x, y in pairs):
        raise Unreadable("of single elements, with a start that is not neutral: compilers may leave it out")
    return tuple(made) if at.instruction.type.startswith("(") else made[0]


def _reduce_window(devices: Devices, at: Operation, *args: Array) -> Value:
    arrays, starts = args[: len(args) // 2], args[len(args) // 2 :]
    window = KernelWindow.of(at, len(at.type.dims))
    count = max(map(len, args))
    wide = [
        padded(np.broadcast_to(x, (count, *x.shape[1:])), start, window.padding)
        for x, start in zip(arrays, starts, strict=True)
    ]
    both, made = combined(devices, at.computation("to_apply")), list[Array]()
    for place in product(*(range(n) for n in window.size)):
        devices.charge(len(wide) * wide[0].size / prod(window.stride))
        seen = [x[(slice(None), *window.taken(place, list(at.type.dims)))] for x in wide]
        made = both(made, seen) if made else seen
    first = [
        np.broadcast_to(start.reshape(-1, *[1] * (x.ndim - 1)), x.shape) for start, x in zip(starts, made, strict=True)
    ]
    made = both(first, made)
    return tuple(made) if at.instruction.type.startswith("(") else made[0]


def _select_and_scatter(devices: Devices, at: Operation, x: Array, source: Array, start: Array) -> Array:
    if devices.combiner(at.computation("scatter")) != "add" or at.kind == "bool":
        raise Unreadable("anything but a sum")
    window = KernelWindow.of(at, x.ndim - 1)
    count = max(len(x), len(source))
    x, source = (np.broadcast_to(each, (count, *each.shape[1:])) for each in (x, source))
    made = list(source.shape[1:])
    places = np.arange(x[0].size).reshape(1, *x.shape[1:])
    places = padded(places, np.array([-1]), window.padding)
    wide = padded(x, np.zeros(1, x.dtype), window.padding)
    best: Array | None = None
    chosen = np.zeros(0, np.int64)
    for place in product(*(range(n) for n in window.size)):
        taken = (slice(None), *window.taken(place, made))
        value, where = wide[taken], np.broadcast_to(places[taken], (count, *made))
        devices.charge(value.size)
        if best is None:
            best, chosen = value, where
            continue
        stays = devices.scalars(at.computation("select"), [best, value]) & (chosen >= 0) | (where < 0)
        best, chosen = np.where(stays, best, value), np.where(stays, chosen, where)
    found = np.zeros((count, x[0].size), x.dtype)
    rows = np.broadcast_to(np.arange(count).reshape(-1, *[1] * len(made)), chosen.shape)
    np.add.at(found, (rows[chosen >= 0], chosen[chosen >= 0]), source[chosen >= 0])
    found = found.reshape(x.shape)
    if at.kind == "float":
        return devices.numbers.add(found, start.reshape(-1, *[1] * (x.ndim - 1)))
    return found + start.reshape(-1, *[1] * (x.ndim - 1))


FUNCTIONS: dict[str, Function] = {
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter,
}
