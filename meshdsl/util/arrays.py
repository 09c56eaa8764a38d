"""Numbers as arrays: of things, of those that occur, of those that are equal, of stretches."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

# ---- Exact -----------------------------------------------------------------------------------------------------------
# Costs as exact integers.
#
# Costs are compared lexicographically: first seconds, then the number of collectives and moves.
# Both are packed into one integer, ``seconds / unit * TIES + ties``, held exactly in a float64, so
# the solver needs one addition and one minimum, infinity is free, and the same problem gives the
# same plan on every machine.


Costs = NDArray[np.float64]
Ids = NDArray[np.intp]
Ints = NDArray[np.int64]


# ---- Identity --------------------------------------------------------------------------------------------------------
# Which object a thing is, as a number: another one for every object that there is.
#
# ``id`` says so too, but from Python 3.12 on it first tells all audit hooks, and a library that hears them (filelock
# does, which JAX imports where it is installed) makes it ten times as slow. A plan of a large step asks a million
# times.


object_id = object.__hash__  # CPython makes it of the address alone


# ---- Arrays ----------------------------------------------------------------------------------------------------------


T = TypeVar("T")
_SPARSE = 16  # times as many numbers as there are places


def index_array(numbers: Iterable[int]) -> Ids:
    """Numbers as an array."""
    return np.fromiter(numbers, dtype=np.intp)


def intern_ids(things: Iterable[Hashable]) -> Ids:
    """A number for each thing, the same for equal ones."""
    every = list(things)
    known = {thing: i for i, thing in enumerate(dict.fromkeys(every))}
    return index_array(map(known.__getitem__, every))


def intern_rows(things: Iterable[T]) -> tuple[Ids, tuple[T, ...]]:
    """A number for each thing, the same for equal ones, most of which are one of few objects; and what there is."""
    found = list(things)
    keys, known = list(map(object_id, found)), dict[T, int]()
    number = {key: known.setdefault(thing, len(known)) for key, thing in dict(zip(keys, found, strict=True)).items()}
    return index_array(map(number.__getitem__, keys)), tuple(known)


def unique_sorted(numbers: Ids) -> Ids:
    """The numbers that occur, in rising order, as ``np.unique`` has them, which hashes them first and takes longer."""
    found = np.sort(numbers)
    return np.asarray(found[np.append(found[:-1] != found[1:], found.size > 0)[: found.size]])


def group_by(numbers: Ids) -> list[Ids]:
    """The places of equal numbers."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if numbers.size else []


def ranges(starts: Ids, sizes: Ids) -> Ids:
    """The numbers from each start on, so many of them, one stretch after the other."""
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(starts - ends + sizes, sizes)


def row_ids(columns: Sequence[Ids]) -> Ids:
    """A number per row of some columns of numbers, the same for equal ones."""
    found, *others = columns
    for column in others:
        found = found * (column.max(initial=0) + 1) + column
        if found.max(initial=0) > found.size * _SPARSE:
            found = np.unique(found, return_inverse=True)[1]
    return found


def first_of(numbers: Ids) -> Ids:
    """Per place, the first that has the same number; these are not much larger than there are places."""
    first = np.empty(numbers.max(initial=-1) + 1, dtype=np.intp)
    first[numbers[::-1]] = np.arange(numbers.size)[::-1]
    return first[numbers]
