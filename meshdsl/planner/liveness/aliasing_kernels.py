"""Fusion and in-place reuse: compiled loops over the positions of a program (see ``aliasing``).

Arrays are allocated outside of them: code that allocates arrays takes long to compile.
"""

import numpy as np

from meshdsl.ir.index import Flags, GraphIndex
from meshdsl.util.arrays import Ids
from meshdsl.util.jit import njit_cached


def run_positions(index: GraphIndex, materialized: Flags) -> Ids:
    """Returns [positions], where each op runs: at its last consumer if no result is materialized."""
    runs_at = np.arange(len(index.ops))
    last_use = np.full(materialized.size, -1)
    _run_positions(index.first_result, index.first_use, index.use_value, materialized, runs_at, last_use)
    return runs_at


def overwritable(index: GraphIndex, is_elementwise: Flags, materialized: Flags) -> tuple[Ids, Ids]:
    """Returns what materialized results of elementwise ops may overwrite: operands as large, and those of fused ones.

    Args:
      is_elementwise: [positions].

    Returns:
      [results, 4]: position, value, and the range of its options; and the options, which are uses.
    """
    found, fused = np.empty((is_elementwise.size, 4), dtype=np.intp), np.zeros((materialized.size, 2), dtype=np.intp)
    options = np.empty(index.use_value.size, dtype=np.intp)
    last_option_of = np.full(index.use_value.size, -1)
    arrays = is_elementwise, index.first_result, index.first_use, index.use_value, index.shape, materialized
    count, size, options = _overwritable(*arrays, found, fused, options, last_option_of)
    return found[:count], options[:size]


@njit_cached
def _run_positions(
    first_result: Ids, first_use: Ids, use_value: Ids, materialized: Flags, runs_at: Ids, last_use: Ids
) -> None:
    for at in range(runs_at.size - 1, -1, -1):
        fused, last = first_result[at] < first_result[at + 1], -1
        for value in range(first_result[at], first_result[at + 1]):
            fused &= not materialized[value]
            last = max(last, last_use[value] if last_use[value] >= 0 else at)
        if fused:
            runs_at[at] = last
        for use in range(first_use[at], first_use[at + 1]):
            last_use[use_value[use]] = max(last_use[use_value[use]], runs_at[at])


@njit_cached
def _overwritable(
    is_elementwise: Flags,
    first_result: Ids,
    first_use: Ids,
    use_value: Ids,
    shape: Ids,
    materialized: Flags,
    found: Ids,
    fused: Ids,
    options: Ids,
    last_option_of: Ids,
) -> tuple[int, int, Ids]:
    """Fills ``found``, and per fused value the range of its options; returns how many results and options there are.

    Args:
      last_option_of: [uses], the latest position that each was an option of.
    """
    count = size = 0
    for at in range(is_elementwise.size):
        if not is_elementwise[at]:
            continue
        result, begin = first_result[at], size
        for use in range(first_use[at], first_use[at + 1]):
            value = use_value[use]
            if shape[value] != shape[result]:
                continue
            most = size + 1 + fused[value, 1] - fused[value, 0]
            if most > options.size:
                larger = np.empty(2 * most, dtype=np.intp)
                for i in range(size):
                    larger[i] = options[i]
                options = larger
            options[size] = use
            size += 1
            for i in range(fused[value, 0], fused[value, 1]):
                if last_option_of[options[i]] != at:
                    last_option_of[options[i]] = at
                    options[size] = options[i]
                    size += 1
        if not materialized[result]:
            fused[result, 0] = begin
            fused[result, 1] = size
        elif size > begin:
            found[count, 0] = at
            found[count, 1] = result
            found[count, 2] = begin
            found[count, 3] = size
            count += 1
    return count, size, options
