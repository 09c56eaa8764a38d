"""Operations on single elements."""

from collections.abc import Callable
from math import prod

import numpy as np

from meshdsl.lowering.hlo.parse import arrays
from meshdsl.lowering.simulation.interpreter import Devices, Function
from meshdsl.lowering.simulation.numbers import Array, PrimeField, Reals
from meshdsl.lowering.simulation.operation import Operation, Unreadable, dtype_of, float_type, kind_of

_COMPARED = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


# ---- Arithmetic ------------------------------------------------------------------------------------------------------


def _add(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    return devices.numbers.add(a, b) if at.kind == "float" else a | b if at.kind == "bool" else a + b


def _subtract(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    return devices.numbers.subtract(a, b) if at.kind == "float" else a - b


def _multiply(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    return devices.numbers.multiply(a, b) if at.kind == "float" else a & b if at.kind == "bool" else a * b


def _high_product(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if bits > 32:
        raise Unreadable("of 64 bits")
    wide = np.int64 if a.dtype.kind == "i" else np.uint64
    return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)


def _divide(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    if at.kind == "float":
        return devices.numbers.divide(a, b)
    if at.kind == "complex":
        return np.asarray(a / b)
    by = np.where(b == 0, 1, b).astype(b.dtype)
    found = _quotient(a, by)
    return np.where(b == 0, np.array(-1).astype(a.dtype), found)


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards 0."""
    if a.dtype.kind == "u":
        return a // b
    found = a // b
    return (found + ((found < 0) & (found * b != a))).astype(a.dtype)


def _remainder(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    if at.kind == "float":
        return devices.numbers.function("remainder", a, b)
    by = np.where(b == 0, 1, b).astype(b.dtype)
    return np.where(b == 0, a, a - _quotient(a, by) * by).astype(a.dtype)


def _negate(devices: Devices, at: Operation, x: Array) -> Array:
    return devices.numbers.subtract(np.zeros_like(x), x) if at.kind == "float" else -x


def _maximum(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    if at.kind != "float":
        return np.maximum(a, b)
    order = devices.numbers.order
    return np.where((order(a) >= order(b)) | (order(a) != order(a)), a, b)


def _minimum(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    if at.kind != "float":
        return np.minimum(a, b)
    order = devices.numbers.order
    return np.where((order(a) <= order(b)) | (order(a) != order(a)), a, b)


def _absolute(devices: Devices, at: Operation, x: Array) -> Array:
    if at.kinds[0] != "float":
        return np.abs(x)
    return np.where(devices.numbers.order(x) < 0, devices.numbers.subtract(np.zeros_like(x), x), x)


def _sign(devices: Devices, at: Operation, x: Array) -> Array:
    if at.kind != "float":
        return np.sign(x)
    return devices.numbers.of(np.sign(devices.numbers.order(x)))


def _clamp(devices: Devices, at: Operation, low: Array, x: Array, high: Array) -> Array:
    low, high = (_spread(end, x) for end in (low, high))
    return _minimum(devices, at, _maximum(devices, at, low, x), high)


def _spread(scalar: Array, like: Array) -> Array:
    """A scalar per device, to be combined with an array."""
    return scalar.reshape(-1, *[1] * (like.ndim - 1)) if scalar.ndim == 1 else scalar


# ---- Truth and bits --------------------------------------------------------------------------------------------------


def _compare(devices: Devices, at: Operation, a: Array, b: Array) -> Array:
    is_total = at.attributes.get("type") == "TOTALORDER" or at.attributes.get("order") == "TOTAL"  # by version
    if is_total and isinstance(devices.numbers, Reals):
        a, b = _total_order(a), _total_order(b)
    elif at.kinds[0] == "float":
        a, b = devices.numbers.order(a), devices.numbers.order(b)
    return np.asarray(_COMPARED[at.attributes["direction"]](a, b))


def _total_order(x: Array) -> Array:
    """Keys in the order of IEEE 754: below all numbers NaN with a sign, above them NaN without one."""
    bits = np.ascontiguousarray(x).view(np.int64)
    return bits ^ (bits >> 63 & np.iinfo(np.int64).max)


def _select(devices: Devices, at: Operation, which: Array, a: Array, b: Array) -> Array:
    return np.where(_spread(which, a), a, b)


def _not(devices: Devices, at: Operation, x: Array) -> Array:
    return ~x


def _shift(devices: Devices, at: Operation, x: Array, by: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    amount = by.astype(np.uint64)
    inside = np.where(amount < bits, amount, 0).astype(x.dtype)
    if at.opcode == "shift-left":
        return np.where(amount < bits, x << inside, np.zeros_like(x))
    if at.opcode == "shift-right-logical":
        plain = x.view(f"u{x.dtype.itemsize}")
        return np.where(amount < bits, plain >> inside.astype(plain.dtype), np.zeros_like(plain)).view(x.dtype)
    last = np.full_like(inside, bits - 1)
    return x >> np.where(amount < bits, inside, last)


def _bits_counted(devices: Devices, at: Operation, x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    unsigned = x.view(f"u{x.dtype.itemsize}").astype(np.uint64)
    ones = [(unsigned >> np.uint64(i)) & np.uint64(1) for i in range(bits)]
    if at.opcode == "popcnt":
        return np.sum(ones, axis=0).astype(x.dtype)
    top = np.max([np.where(one > 0, i + 1, 0) for i, one in enumerate(ones)], axis=0)
    return (bits - top).astype(x.dtype)


# ---- Between types ---------------------------------------------------------------------------------------------------


def _convert(devices: Devices, at: Operation, x: Array) -> Array:
    made, numbers, floats = at.kind, devices.numbers, at.kinds[0] == "float"
    if "complex" in (made, at.kinds[0]):
        if isinstance(numbers, PrimeField):
            raise Unreadable("complex numbers")
        return x.astype(np.complex128) if made == "complex" else np.asarray(x.real)
    if made == "float":
        return x if floats else numbers.of(x)
    if made == "bool":
        return x != 0
    return (numbers.integers(x) if floats else x).astype(dtype_of(at.type.dtype))


def bitcast_convert(devices: Devices, at: Operation, x: Array) -> Array:
    """Returns the bits of numbers as those of another type; of another width only integers have any."""
    made, numbers = at.type.dtype, devices.numbers
    read = arrays(at.read[0].type)[0]
    floats = at.kinds[0] == "float"
    if read.dims != at.type.dims:
        if floats or kind_of(made) != "int" or x[0].nbytes != prod(at.type.dims) * dtype_of(made).itemsize:
            raise Unreadable("another width")
        bits = np.ascontiguousarray(x).reshape(len(x), -1).view(dtype_of(made))
        return bits.reshape(len(x), *at.type.dims)
    if kind_of(made) == "float":
        if floats:
            return x
        return numbers.of(x.view(float_type(made)).astype(np.float64))
    if not floats:
        return x.view(dtype_of(made))
    if isinstance(numbers, PrimeField):
        return numbers.function("bitcast-convert", x).astype(dtype_of(made))
    return x.astype(float_type(read.dtype)).view(dtype_of(made))


def _identity(devices: Devices, at: Operation, x: Array) -> Array:
    return x


def _function(devices: Devices, at: Operation, *args: Array) -> Array:
    if at.kind == "complex" or any(x.dtype.kind == "c" for x in args):
        if isinstance(devices.numbers, Reals):
            return devices.numbers.function(at.opcode, *args)
        raise Unreadable("complex numbers")
    if at.opcode == "power" and at.kind == "int":
        return np.power(args[0], np.maximum(args[1], 0)).astype(args[0].dtype)
    return devices.numbers.function(at.opcode, *args)


def _part(devices: Devices, at: Operation, x: Array) -> Array:
    if x.dtype.kind != "c":
        return x if at.opcode == "real" else np.zeros_like(x)
    return np.asarray(x.real if at.opcode == "real" else x.imag)


def _complex(devices: Devices, at: Operation, real: Array, imaginary: Array) -> Array:
    if isinstance(devices.numbers, Reals):
        return real + 1j * imaginary
    raise Unreadable("complex numbers")


_NAMED = (
    "exponential exponential-minus-one log log-plus-one sqrt rsqrt cbrt tanh tan sine cosine sinh cosh asin acos atan "
    "asinh acosh atanh erf logistic floor ceil round-nearest-afz round-nearest-even power atan2 is-finite"
).split()


def _ufunc(function: Callable[..., Array]) -> Function:
    return lambda devices, at, *args: function(*args)


FUNCTIONS: dict[str, Function] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "mulhi": _high_product,
    "remainder": _remainder,
    "negate": _negate,
    "maximum": _maximum,
    "minimum": _minimum,
    "abs": _absolute,
    "sign": _sign,
    "clamp": _clamp,
    "compare": _compare,
    "select": _select,
    "and": _ufunc(np.bitwise_and),
    "or": _ufunc(np.bitwise_or),
    "xor": _ufunc(np.bitwise_xor),
    "not": _not,
    **dict.fromkeys(("shift-left", "shift-right-logical", "shift-right-arithmetic"), _shift),
    **dict.fromkeys(("popcnt", "count-leading-zeros"), _bits_counted),
    "convert": _convert,
    "bitcast-convert": bitcast_convert,
    "reduce-precision": _identity,
    "real": _part,
    "imag": _part,
    "complex": _complex,
    **dict.fromkeys(_NAMED, _function),
}
