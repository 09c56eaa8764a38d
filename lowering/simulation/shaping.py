"""Operations that move elements of an array, wherever they go without looking at them."""

import re
from collections.abc import Sequence

import numpy as np

from meshdsl.lowering.simulation.interpreter import Devices, Function
from meshdsl.lowering.simulation.numbers import Array
from meshdsl.lowering.simulation.operation import Operation, Unreadable, dtype_of
from meshdsl.lowering.simulation.pointwise import bitcast_convert

_SLICE = re.compile(r"\[(\d+):(\d+)(?::(\d+))?\]")


def _broadcast(devices: Devices, at: Operation, x: Array) -> Array:
    into, shape = at.integers("dimensions"), [1] * len(at.type.dims)
    order = sorted(range(len(into)), key=into.__getitem__)
    for dim, length in zip(into, x.shape[1:], strict=True):
        shape[dim] = length
    moved = x.transpose(0, *(1 + d for d in order)).reshape(len(x), *shape)
    return np.broadcast_to(moved, (len(x), *at.type.dims))


def _reshape(devices: Devices, at: Operation, x: Array) -> Array:
    return x.reshape(len(x), *at.type.dims)


def _bitcast(devices: Devices, at: Operation, x: Array) -> Array:
    """The same memory under another layout, or as another type."""
    if at.read[0].type.split("[")[0] != at.type.dtype:
        return bitcast_convert(devices, at, x)
    before, after = Operation(at.read[0]).order, at.order
    memory = x.transpose(0, *(1 + d for d in before))
    found = memory.reshape(len(x), *(at.type.dims[d] for d in after))
    return found.transpose(0, *(1 + int(d) for d in np.argsort(after)))


def _transpose(devices: Devices, at: Operation, x: Array) -> Array:
    return x.transpose(0, *(1 + d for d in at.integers("dimensions")))


def _reverse(devices: Devices, at: Operation, x: Array) -> Array:
    return np.flip(x, tuple(1 + d for d in at.integers("dimensions")))


def _slice(devices: Devices, at: Operation, x: Array) -> Array:
    found = _SLICE.findall(at.attributes.get("slice", ""))
    return x[(slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in found))]


def _pad(devices: Devices, at: Operation, x: Array, by: Array) -> Array:
    dims = [tuple(map(int, part.split("_"))) for part in at.attributes.get("padding", "").split("x") if part]
    return padded(x, by, [(*dim, 0)[:3] for dim in dims])


def padded(x: Array, by: Array, dims: Sequence[tuple[int, ...]]) -> Array:
    """Returns arrays padded by a scalar, per dim with elements before, after and between; negative ones cut."""
    inner = [n + max(0, n - 1) * between for n, (_, _, between) in zip(x.shape[1:], dims, strict=True)]
    shape = [max(0, n + low + high) for n, (low, high, _) in zip(inner, dims, strict=True)]
    count = max(len(x), len(by))
    made = np.broadcast_to(by.reshape(-1, *[1] * len(shape)), (count, *shape)).astype(x.dtype)
    into, taken = [slice(None)], [slice(None)]
    for n, size, (low, _, between) in zip(x.shape[1:], shape, dims, strict=True):
        step = between + 1
        first = max(0, -(low // step)) if low < 0 else 0
        last = min(n, -(-(size - low) // step)) if size > low else 0
        into.append(
            slice(low + first * step, low + max(first, last - 1) * step + 1, step) if last > first else slice(0)
        )
        taken.append(slice(first, max(first, last)))
    made[tuple(into)] = x[tuple(taken)]
    return made


def _concatenate(devices: Devices, at: Operation, *args: Array) -> Array:
    (dim,) = at.integers("dimensions")
    count = max(map(len, args))
    return np.concatenate([np.broadcast_to(x, (count, *x.shape[1:])) for x in args], 1 + dim)


def _iota(devices: Devices, at: Operation) -> Array:
    dims, (dim,) = at.type.dims, at.integers("iota_dimension")
    if at.kind == "complex":
        raise Unreadable("complex numbers")
    along = np.arange(dims[dim]).reshape([-1 if d == dim else 1 for d in range(len(dims))])
    values = np.broadcast_to(along, dims)[None]
    return devices.numbers.of(values) if at.kind == "float" else values.astype(dtype_of(at.type.dtype))


FUNCTIONS: dict[str, Function] = {
    "broadcast": _broadcast,
    "reshape": _reshape,
    "bitcast": _bitcast,
    "transpose": _transpose,
    "reverse": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "iota": _iota,
}
