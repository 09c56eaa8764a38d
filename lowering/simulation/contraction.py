"""Matrix products and convolutions, as sums of products of matrices, and Fourier transforms."""

import re
from collections.abc import Callable
from itertools import product
from math import prod

import numpy as np

from meshdsl.lowering.simulation.interpreter import Devices, Function
from meshdsl.lowering.simulation.numbers import Array, PrimeField
from meshdsl.lowering.simulation.operation import Operation, Unreadable, dtype_of
from meshdsl.lowering.simulation.shaping import padded

_LABELS = re.compile(r"(\w+)_(\w+)->(\w+)")
PRODUCT_COST = 0.01  # of a multiply-add, in elements


def matmul(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    """Returns the products of stacked matrices, in the numbers of the result."""
    count = max(len(a), len(b))
    devices.charge(PRODUCT_COST * count * prod(a.shape[1:]) * b.shape[-1])
    if at.kind == "float":
        a, b = (x if kind == "float" else devices.numbers.of(x) for x, kind in zip((a, b), at.kinds, strict=True))
        return devices.numbers.matmul(a, b)
    if at.kind == "bool":
        return (a.astype(np.int64) @ b.astype(np.int64)) != 0
    if at.kind == "complex":
        return np.asarray(a @ b)
    wide = np.matmul(a.astype(np.int64), b.astype(np.int64))
    return wide.astype(dtype_of(at.type.dtype))


def _dot(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    sides = []
    for x, side in ((a, "lhs"), (b, "rhs")):
        batch, summed = (at.integers(f"{side}_{name}_dims") for name in ("batch", "contracting"))
        free = [d for d in range(x.ndim - 1) if d not in batch and d not in summed]
        order = [*batch, *free, *summed] if side == "lhs" else [*batch, *summed, *free]
        shape = [x.shape[1 + d] for d in order]
        both, one = prod(shape[: len(batch)]), prod(x.shape[1 + d] for d in free)
        ends = (one, -1) if side == "lhs" else (-1, one)
        if x.size == 0:
            raise Unreadable("empty arrays")
        sides.append(x.transpose(0, *(1 + d for d in order)).reshape(len(x), both, *ends))
    found = matmul(devices, at, *sides)
    return found.reshape(len(found), *at.type.dims)


def _convolution(devices: Devices, at: Operation, x: Array, kernel: Array) -> Array:
    match = _LABELS.fullmatch(at.attributes["dim_labels"])
    if match is None:
        raise Unreadable("its dim_labels")
    ins, taps, outs = match.groups()
    spatial = sorted(filter(str.isdigit, ins))
    window = KernelWindow.of(at, len(spatial))
    x = x.transpose(0, *(1 + ins.index(d) for d in ("b", "f", *spatial)))
    kernel = kernel.transpose(0, *(1 + taps.index(d) for d in ("o", "i", *spatial)))
    kernel = np.flip(kernel, tuple(3 + i for i, flipped in enumerate(window.reversed) if flipped))
    x = padded(x, np.zeros(1, x.dtype), [(0, 0, 0), (0, 0, 0), *window.padding])
    shape = [at.type.dims[outs.index(d)] for d in ("b", "f", *spatial)]
    groups, batches = at.integer("feature_group_count", 1), at.integer("batch_group_count", 1)
    # groups of features share no batch, groups of batches no features: both are the stacks of one product
    stacks, made = groups * batches, None
    parts = kernel.reshape(len(kernel), stacks, -1, *kernel.shape[2:])
    for place in product(*(range(n) for n in kernel.shape[3:])):
        seen = x[(slice(None), slice(None), slice(None), *window.taken(place, shape[2:]))]
        count, b, f = len(seen), seen.shape[1], seen.shape[2]
        if batches > 1:
            rows = np.moveaxis(seen.reshape(count, batches, b // batches, f, *shape[2:]), 3, -1)
        else:
            rows = np.moveaxis(seen.reshape(count, b, groups, f // groups, *shape[2:]), (2, 3), (1, -1))
        rows = rows.reshape(count, stacks, -1, rows.shape[-1])
        columns = parts[(slice(None), slice(None), slice(None), slice(None), *place)].swapaxes(2, 3)
        one = matmul(devices, at, rows, columns)
        both = devices.numbers.add if at.kind == "float" else np.add
        made = one if made is None else both(made, one)
    if made is None:
        raise Unreadable("an empty kernel")
    made = made.reshape(len(made), stacks, shape[0], *shape[2:], -1)
    made = np.moveaxis(made, (1, -1), (2, 3)).reshape(len(made), *shape)
    return made.transpose(0, *(1 + ("b", "f", *spatial).index(d) for d in outs))


class KernelWindow:
    """Where a kernel, or a reduction, looks.

    Args:
      size, stride: per dim. padding: elements before, after and between. dilation: of the window itself.
      reversed: whether the kernel is read backwards.
    """

    def __init__(
        self,
        size: list[int],
        stride: list[int],
        padding: list[tuple[int, int, int]],
        dilation: list[int],
        reversed: list[int],
    ) -> None:
        self.size, self.stride, self.padding, self.dilation, self.reversed = size, stride, padding, dilation, reversed

    @classmethod
    def of(cls, at: Operation, dims: int) -> "KernelWindow":
        """Returns the window in the attributes of an operation on so many dims."""
        stated = dict(part.split("=") for part in at.attributes.get("window", "{}").strip("{}").split() if part)

        def column(name: str, default: int) -> list[int]:
            return [int(n) for n in stated[name].split("x")] if name in stated else [default] * dims

        pads = [part.split("_") for part in stated["pad"].split("x")] if "pad" in stated else [["0", "0"]] * dims
        padding = [
            (int(low), int(high), between - 1)
            for (low, high), between in zip(pads, column("lhs_dilate", 1), strict=True)
        ]
        return cls(column("size", 1), column("stride", 1), padding, column("rhs_dilate", 1), column("rhs_reversal", 0))

    def taken(self, place: tuple[int, ...], made: list[int]) -> tuple[slice, ...]:
        """Returns the padded elements that one place of the window sees, in an output of lengths ``made``."""
        starts = [p * d for p, d in zip(place, self.dilation, strict=True)]
        return tuple(
            slice(start, start + (n - 1) * stride + 1 if n else start, stride)
            for start, n, stride in zip(starts, made, self.stride, strict=True)
        )


# ---- Fourier transforms ----------------------------------------------------------------------------------------------


_TRANSFORMS: dict[str, Callable[..., Array]] = {
    "FFT": np.fft.fftn,
    "IFFT": np.fft.ifftn,
    "RFFT": np.fft.rfftn,
    "IRFFT": np.fft.irfftn,
}


def _fft(devices: Devices, at: Operation, x: Array) -> Array:
    if isinstance(devices.numbers, PrimeField):
        raise Unreadable("complex numbers")
    lengths = at.integers("fft_length")
    devices.charge(x.size * len(lengths))
    return _TRANSFORMS[at.attributes["fft_type"]](x, lengths, range(x.ndim - len(lengths), x.ndim))


FUNCTIONS: dict[str, Function] = {"dot": _dot, "convolution": _convolution, "fft": _fft}
