"""Integer arrays: numbers for equal things, groups of equal numbers, ranges; and the aliases of array types.

Large programs are handled as arrays of small integers. To *intern* is to give equal things equal numbers, counted up
from 0 in order of first occurrence, so that comparing, grouping and sorting need no Python objects.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Ids = NDArray[np.intp]
Ints = NDArray[np.int64]
T = TypeVar("T")

_SPARSE = 16  # ratio of the largest number to the number of rows from which on row numbers are made dense again

# The identity of an object as a number. ``id`` gives one as well, but from Python 3.12 on it raises an audit event, and
# a hook for these (filelock installs one, which JAX imports where it is present) makes it ten times as slow; planning a
# large step asks a million times. CPython computes this hash from the address alone.
object_id = object.__hash__


def is_hashable(x: object) -> bool:
    """Returns whether ``x`` can be the key of a dictionary: a tuple is one only if all of its items are."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def index_array(numbers: Iterable[int]) -> Ids:
    """Returns the numbers as an array."""
    return np.fromiter(numbers, dtype=np.intp)


def intern_ids(things: Iterable[Hashable]) -> Ids:
    """Returns a number for each thing, equal for equal ones, in order of first occurrence."""
    every = list(things)
    known = {thing: i for i, thing in enumerate(dict.fromkeys(every))}
    return index_array(map(known.__getitem__, every))


def intern_rows(things: Iterable[T]) -> tuple[Ids, tuple[T, ...]]:
    """Returns a number for each thing, equal for equal ones, and the distinct things by number.

    It hashes each object once, and so is faster than ``intern_ids`` where most things are one of few objects.
    """
    found = list(things)
    keys, known = list(map(object_id, found)), dict[T, int]()
    number = {key: known.setdefault(thing, len(known)) for key, thing in dict(zip(keys, found, strict=True)).items()}
    return index_array(map(number.__getitem__, keys)), tuple(known)


def unique_sorted(numbers: Ids) -> Ids:
    """Returns the distinct numbers in rising order, as ``np.unique`` does, which hashes them first and takes longer."""
    found = np.sort(numbers)
    return np.asarray(found[np.append(found[:-1] != found[1:], found.size > 0)[: found.size]])


def group_by(numbers: Ids) -> list[Ids]:
    """Returns the positions of each number, in rising order of the numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if numbers.size else []


def ranges(starts: Ids, sizes: Ids) -> Ids:
    """Returns the ranges ``starts[i], ..., starts[i] + sizes[i] - 1``, concatenated."""
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(starts - ends + sizes, sizes)


def row_ids(columns: Sequence[Ids]) -> Ids:
    """Returns a number for each row of some columns, equal for equal rows."""
    found, *others = columns
    for column in others:
        found = found * (column.max(initial=0) + 1) + column
        if found.max(initial=0) > found.size * _SPARSE:
            found = np.unique(found, return_inverse=True)[1]
    return found


def first_of(numbers: Ids) -> Ids:
    """Returns, for each position, the first position with the same number; numbers must be about as small as these."""
    first = np.empty(numbers.max(initial=-1) + 1, dtype=np.intp)
    first[numbers[::-1]] = np.arange(numbers.size)[::-1]
    return first[numbers]


@cache
def conv_pairs(
    size: int, kernel: int, out: int, stride: int, pad_low: int, input_dilation: int, kernel_dilation: int
) -> int:
    """Returns how many (output, kernel) positions of one dim of a convolution meet an element of the input.

    The others meet padding or a gap of a dilated input, and cost no multiplication.

    Args:
      size, kernel, out: elements of the input, kernel and result.
      pad_low: elements of padding before the input.
    """
    at = np.arange(out)[:, None] * stride - pad_low + np.arange(kernel) * kernel_dilation
    return int(((at >= 0) & (at <= (size - 1) * input_dilation) & (at % input_dilation == 0)).sum())
