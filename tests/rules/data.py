"""Operands for samples: dims are multiples of 12 and differ, values are exact in small sums."""

import sys
from zlib import crc32

import numpy as np

_streams = {}


def _random():
    """A stream for every test module, so that proofs do not depend on which others are run."""
    module = sys._getframe(2).f_globals["__name__"]
    return _streams.setdefault(module, np.random.default_rng(crc32(module.encode())))


def floats(*shape, dtype="float32", low=-12, high=13):
    """Quarters, negative and zero among them."""
    return (_random().integers(low, high, shape) / 4).astype(dtype)


def unit(*shape):
    """Inside (-1, 1)."""
    return _random().uniform(-0.95, 0.95, shape).astype("float32")


def strange(size):
    """Infinities and one NaN among numbers: more of these would make results NaN whatever a device adds to them."""
    values = _random().choice(np.array([-np.inf, np.inf, -1, 0, 2], "float32"), size)
    values[_random().integers(size)] = np.nan
    return values


def ints(*shape, dtype="int32", low=-9, high=10):
    """Small whole numbers."""
    return _random().integers(low, high, shape).astype(dtype)


def least(size):
    """Small whole numbers, and the one whose negative wraps."""
    return np.append(ints(size - 1), np.iinfo("int32").min).astype("int32")


def bits(*shape, dtype="int32"):
    """Any bit pattern."""
    limits = np.iinfo(dtype)
    return _random().integers(limits.min, limits.max, shape, dtype, endpoint=True)


def bools(*shape, share=0.5):
    """True in this share."""
    return _random().random(shape) < share


def complexes(*shape):
    """Gaussian quarters."""
    return floats(*shape) + 1j * floats(*shape)
