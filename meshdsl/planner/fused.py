"""What is fused into its readers: compiled loops over the line of a program (``places``)."""

import numpy as np

from meshdsl.planner.compiled import compiled
from meshdsl.planner.exact import Ids
from meshdsl.planner.numbering import Flags


@compiled
def run_at(makes: Ids, first: Ids, read: Ids, kept: Flags) -> Ids:
    """Per position, the one at which its operation runs: the last reader's if nothing that it makes is kept.

    Args:
      makes, first, read: as ``Numbering`` has them. kept: the values that are written to memory.
    """
    runs, read_last = np.arange(first.size - 1), np.full(kept.size, -1)
    for at in range(runs.size - 1, -1, -1):
        made = range(makes[at], makes[at + 1])
        fused, last = len(made) > 0, -1
        for value in made:
            fused &= not kept[value]
            last = max(last, read_last[value] if read_last[value] >= 0 else at)
        if fused:
            runs[at] = last
        for reading in range(first[at], first[at + 1]):
            read_last[read[reading]] = max(read_last[read[reading]], runs[at])
    return runs


@compiled
def written_over(by_element: Flags, makes: Ids, first: Ids, read: Ids, shape: Ids, kept: Flags) -> tuple[Ids, Ids]:
    """What kept results of elementwise operations may be written over: operands as large, and those of fused ones.

    Args:
      by_element: positions of such operations. shape: per value, a number.

    Returns [results, 4], where each is made, the value, and from where to where its options lie; and these readings.
    """
    found, count = np.empty((by_element.size, 4), dtype=np.intp), 0
    options, size = np.empty(read.size, dtype=np.intp), 0
    start, stop = np.zeros(kept.size, dtype=np.intp), np.zeros(kept.size, dtype=np.intp)  # of what is fused
    taken = np.full(read.size, -1)
    for at in np.flatnonzero(by_element):
        result, begin = makes[at], size
        for reading in range(first[at], first[at + 1]):
            value = read[reading]
            if shape[value] != shape[result]:
                continue
            most = size + 1 + stop[value] - start[value]
            if most > options.size:
                options = np.append(options, np.empty(most, dtype=np.intp))
            options[size] = reading
            size += 1
            for option in options[start[value] : stop[value]]:
                if taken[option] != at:
                    taken[option], options[size] = at, option
                    size += 1
        if not kept[result]:
            start[result], stop[result] = begin, size
        elif size > begin:
            found[count] = at, result, begin, size
            count += 1
    return found[:count], options[:size]


@compiled
def made_of_nothing(cheap: Flags, makes: Ids, first: Ids, read: Ids) -> Flags:
    """The values that some operations make of no others than these."""
    found = np.zeros(makes[-1], dtype=np.bool_)
    for at in np.flatnonzero(cheap):
        nothing = True
        for value in read[first[at] : first[at + 1]]:
            nothing &= found[value]
        found[makes[at] : makes[at + 1]] = nothing
    return found
