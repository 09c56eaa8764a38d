"""What is fused into its readers: compiled loops over the line of a program (``places``).

Arrays are made before them: what makes arrays takes long to compile.
"""

import numpy as np

from meshdsl.ir.index import Flags, GraphIndex
from meshdsl.util.arrays import Ids
from meshdsl.util.jit import njit_cached


def run_at(numbers: GraphIndex, kept: Flags) -> Ids:
    """Per position, the one at which its operation runs: the last reader's if nothing that it makes is kept.

    Args:
      kept: the values that are written to memory.
    """
    runs = np.arange(len(numbers.ops))
    _run(numbers.first_result, numbers.first_use, numbers.use_value, kept, runs, np.full(kept.size, -1))
    return runs


def written_over(numbers: GraphIndex, by_element: Flags, kept: Flags) -> tuple[Ids, Ids]:
    """What kept results of elementwise operations may be written over: operands as large, and those of fused ones.

    Args:
      by_element: positions of such operations.

    Returns [results, 4], where each is made, the value, and from where to where its options lie; and these readings.
    """
    found, fused = np.empty((by_element.size, 4), dtype=np.intp), np.zeros((kept.size, 2), dtype=np.intp)
    options, taken = np.empty(numbers.use_value.size, dtype=np.intp), np.full(numbers.use_value.size, -1)
    line = by_element, numbers.first_result, numbers.first_use, numbers.use_value, numbers.shape, kept
    count, size, options = _write_over(*line, found, fused, options, taken)
    return found[:count], options[:size]


@njit_cached
def _run(makes: Ids, first: Ids, read: Ids, kept: Flags, runs: Ids, read_last: Ids) -> None:
    for at in range(runs.size - 1, -1, -1):
        fused, last = makes[at] < makes[at + 1], -1
        for value in range(makes[at], makes[at + 1]):
            fused &= not kept[value]
            last = max(last, read_last[value] if read_last[value] >= 0 else at)
        if fused:
            runs[at] = last
        for reading in range(first[at], first[at + 1]):
            read_last[read[reading]] = max(read_last[read[reading]], runs[at])


@njit_cached
def _write_over(
    by_element: Flags,
    makes: Ids,
    first: Ids,
    read: Ids,
    shape: Ids,
    kept: Flags,
    found: Ids,
    fused: Ids,
    options: Ids,
    taken: Ids,
) -> tuple[int, int, Ids]:
    """Fill ``found``, and for each value that is fused, from where to where its options lie; return how many there are.

    Args:
      taken: per reading, the position that it was the last option of.
    """
    count = size = 0
    for at in range(by_element.size):
        if not by_element[at]:
            continue
        result, begin = makes[at], size
        for reading in range(first[at], first[at + 1]):
            value = read[reading]
            if shape[value] != shape[result]:
                continue
            most = size + 1 + fused[value, 1] - fused[value, 0]
            if most > options.size:
                larger = np.empty(2 * most, dtype=np.intp)
                for i in range(size):
                    larger[i] = options[i]
                options = larger
            options[size] = reading
            size += 1
            for i in range(fused[value, 0], fused[value, 1]):
                if taken[options[i]] != at:
                    taken[options[i]] = at
                    options[size] = options[i]
                    size += 1
        if not kept[result]:
            fused[result, 0] = begin
            fused[result, 1] = size
        elif size > begin:
            found[count, 0] = at
            found[count, 1] = result
            found[count, 2] = begin
            found[count, 3] = size
            count += 1
    return count, size, options
