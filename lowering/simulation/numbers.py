"""The numbers that simulated devices compute with: floats as elements of a prime field, or as float64.

In a field, sums and products are exact, and every other function (exp, tanh, a square root) is some fixed function of
its arguments, the same wherever it is called. Two programs whose results agree for random inputs are then the same
expression of them, up to the laws of a field: if they are not, they agree with a probability of about the degree of the
expression over 2**31 (Schwartz 1980, Zippel 1979; with such functions: random interpretation, Gulwani and Necula 2003).
Nothing saturates, cancels or rounds, so that a faulty sum shows wherever it is read. Elements are ordered by their
multiples of 2**20, nearest to 0: maxima, comparisons and sorts are those of an order, infinities are its ends, and
short fixed-point numbers lie as they should.

float64 is for programs that a compiler has optimized: it uses laws of the reals, and rounds constants.
"""

import hashlib
from typing import Any, Protocol

import numpy as np
from scipy import special

Array = Any  # of numpy, whose arithmetic on arrays of an unknown dtype is untyped
PRIME = 2**31 - 19
_HALF = PRIME // 2
_POINT = 20  # bits behind the point of numbers that are in their usual order
_UNIT = 2**_POINT
_UNIT_INVERSE = pow(_UNIT, -1, PRIME)
_LIMB = 16  # bits; products of limbs are summed exactly in float64
_LONGEST = 2 ** (53 - 2 * _LIMB)  # sum of products that float64 holds exactly
_NAN = 123456789


class Numbers(Protocol):
    """How floats are computed with; arrays of any shape, elementwise unless said otherwise."""

    dtype: Any

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Returns random numbers."""
        ...

    def of(self, values: Array) -> Array:
        """Returns the numbers of floats, integers or truth values."""
        ...

    def integers(self, x: Array) -> Array:
        """Returns the numbers as int64; those of integers are themselves."""
        ...

    def add(self, a: Array, b: Array) -> Array:
        """Returns ``a + b``."""
        ...

    def subtract(self, a: Array, b: Array) -> Array:
        """Returns ``a - b``."""
        ...

    def multiply(self, a: Array, b: Array) -> Array:
        """Returns ``a * b``."""
        ...

    def divide(self, a: Array, b: Array) -> Array:
        """Returns ``a / b``."""
        ...

    def total(self, x: Array, dims: tuple[int, ...]) -> Array:
        """Returns the sum over some dims."""
        ...

    def matmul(self, a: Array, b: Array) -> Array:
        """Returns the products of stacked matrices."""
        ...

    def order(self, x: Array) -> Array:
        """Returns keys that are ordered as the numbers are."""
        ...

    def ordered(self, keys: Array) -> Array:
        """Returns the numbers of keys."""
        ...

    def function(self, name: str, *args: Array) -> Array:
        """Returns the function of that name in HLO."""
        ...

    def differ(self, a: Array, b: Array) -> Array:
        """Returns where two arrays of numbers are not the same."""
        ...


# ---- A prime field ---------------------------------------------------------------------------------------------------


class PrimeField:
    """Integers modulo ``PRIME``."""

    dtype = np.int64

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Returns random elements, all equally likely."""
        return rng.integers(0, PRIME, shape)

    def of(self, values: Array) -> Array:
        """Returns the elements of numbers; a float is a whole number times a power of two."""
        if values.dtype.kind in "biu":
            return values.astype(np.int64) % PRIME if values.dtype != np.uint64 else (values % PRIME).astype(np.int64)
        finite = np.isfinite(values)
        mantissa, exponent = np.frexp(np.where(finite, values, 0.0))
        powers, which = np.unique(exponent - 53, return_inverse=True)
        two = np.array([pow(2, int(e) % (PRIME - 1), PRIME) for e in powers], np.int64)
        found = np.ldexp(mantissa, 53).astype(np.int64) % PRIME * two[which].reshape(values.shape) % PRIME
        ends = np.where(np.isnan(values), _NAN, self.ordered(np.where(values > 0, _HALF, -_HALF)))
        return np.where(finite, found, ends)

    def integers(self, x: Array) -> Array:
        """Returns the numbers that are small integers, and some integers for others."""
        near = _nearest(x)
        return np.where(np.abs(near) < 2**24, near, self.order(x) >> _POINT)

    def order(self, x: Array) -> Array:
        """Returns keys that are ordered as the elements are."""
        return _nearest(x * _UNIT % PRIME)

    def ordered(self, keys: Array) -> Array:
        """Returns the elements of keys."""
        return keys % PRIME * _UNIT_INVERSE % PRIME

    def add(self, a: Array, b: Array) -> Array:
        """Returns the sum."""
        return (a + b) % PRIME

    def subtract(self, a: Array, b: Array) -> Array:
        """Returns the difference."""
        return (a - b) % PRIME

    def multiply(self, a: Array, b: Array) -> Array:
        """Returns the product."""
        return a * b % PRIME

    def divide(self, a: Array, b: Array) -> Array:
        """Returns the product with the inverse (Fermat); that of 0 is 0."""
        inverse, power, left = np.ones_like(b), b, PRIME - 2
        while left:
            if left & 1:
                inverse = inverse * power % PRIME
            power, left = power * power % PRIME, left >> 1
        return a * inverse % PRIME

    def total(self, x: Array, dims: tuple[int, ...]) -> Array:
        """Returns the sum over some dims."""
        return x.sum(dims) % PRIME

    def matmul(self, a: Array, b: Array) -> Array:
        """Returns the products of stacked matrices, by limbs in float64."""
        if (length := a.shape[-1]) > _LONGEST:
            parts = [slice(i, i + _LONGEST) for i in range(0, length, _LONGEST)]
            return np.asarray(sum(self.matmul(a[..., part], b[..., part, :]) for part in parts)) % PRIME
        (high, low), (top, bottom) = (
            ((x >> _LIMB).astype(np.float64), (x & (2**_LIMB - 1)).astype(np.float64)) for x in (a, b)
        )
        ends, cross, last = (x.astype(np.int64) % PRIME for x in (high @ top, high @ bottom + low @ top, low @ bottom))
        return (ends * (2 ** (2 * _LIMB) % PRIME) + cross * 2**_LIMB + last) % PRIME

    def function(self, name: str, *args: Array) -> Array:
        """Returns a fixed, random-looking element for each name and arguments."""
        if name == "is-finite":
            return np.ones(args[0].shape, bool)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        found = np.broadcast_to(np.uint64(seed), np.broadcast_shapes(*(x.shape for x in args)))
        for x in args:
            found = _mixed(found ^ x.astype(np.uint64))
        return (found % np.uint64(PRIME)).astype(np.int64)

    def differ(self, a: Array, b: Array) -> Array:
        """Returns where two arrays differ."""
        return a != b


def _nearest(x: Array) -> Array:
    """The representative nearest to 0."""
    return np.where(x > _HALF, x - PRIME, x)


def _mixed(x: Array) -> Array:
    """SplitMix64 (Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


# ---- The reals -------------------------------------------------------------------------------------------------------


_TOLERANCE = 1e-5  # of the largest number of an array: compilers round constants, and sum in other orders
_SMALL = 1e-7  # of an array whose numbers are smaller, rounding errors of larger ones may be left
_FUNCTIONS: dict[str, Any] = {
    "exponential": np.exp,
    "exponential-minus-one": np.expm1,
    "log": np.log,
    "log-plus-one": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt,
    "tanh": np.tanh,
    "tan": np.tan,
    "sine": np.sin,
    "cosine": np.cos,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": special.erf,
    "logistic": special.expit,
    "floor": np.floor,
    "ceil": np.ceil,
    "round-nearest-afz": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "round-nearest-even": np.rint,
    "power": np.power,
    "atan2": np.arctan2,
    "remainder": np.fmod,
    "is-finite": np.isfinite,
}


class Reals:
    """float64, whatever the width of a float in the program."""

    dtype = np.float64

    def random(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Returns normal numbers."""
        return rng.standard_normal(shape)

    def of(self, values: Array) -> Array:
        """Returns the values as float64."""
        return values.astype(np.float64)

    def integers(self, x: Array) -> Array:
        """Returns the numbers, cut to integers."""
        return np.nan_to_num(x).clip(-(2.0**62), 2.0**62).astype(np.int64)

    def order(self, x: Array) -> Array:
        """Returns the numbers."""
        return x

    def ordered(self, keys: Array) -> Array:
        """Returns the numbers."""
        return keys

    def add(self, a: Array, b: Array) -> Array:
        """Returns the sum."""
        return a + b

    def subtract(self, a: Array, b: Array) -> Array:
        """Returns the difference."""
        return a - b

    def multiply(self, a: Array, b: Array) -> Array:
        """Returns the product."""
        return a * b

    def divide(self, a: Array, b: Array) -> Array:
        """Returns the quotient."""
        return a / b

    def total(self, x: Array, dims: tuple[int, ...]) -> Array:
        """Returns the sum over some dims."""
        return x.sum(dims)

    def matmul(self, a: Array, b: Array) -> Array:
        """Returns the products of stacked matrices."""
        return np.asarray(a @ b)

    def function(self, name: str, *args: Array) -> Array:
        """Returns the function of that name in HLO."""
        return np.asarray(_FUNCTIONS[name](*args))

    def differ(self, a: Array, b: Array) -> Array:
        """Returns where a finite number of ``b`` differs from that of ``a`` by more than rounding does."""
        finite = np.isfinite(b)
        scale = np.abs(np.where(finite, b, 0.0)).max(initial=0.0)
        with np.errstate(all="ignore"):
            near = np.abs(a - np.where(finite, b, 0.0)) <= _TOLERANCE * max(scale, _SMALL)
        return finite & ~near


class RoundedConstants(Reals):
    """float64 with constants as a compiler may round them: off by about half a unit in the last place of float32."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def of(self, values: Array) -> Array:
        """Returns the values as float64, a little off."""
        exact = super().of(values)
        return np.asarray(exact * (1 + 2.0**-24 * self._rng.standard_normal(exact.shape)))
