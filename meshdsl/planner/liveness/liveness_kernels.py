"""Live ranges of copies, and which of them share memory: compiled loops over the positions of a program.

A copy is live from the op that produces or first needs it to its last use. A resharded copy that is smaller than its
source is made as soon as the source has no other use. A view extends the live range of the viewed copy; a result that
overwrites an operand ends the live range of that one before its own begins.
"""

import numpy as np

from meshdsl.ir.index import Flags
from meshdsl.planner.liveness.timeline import NOWHERE, Copies, TimelineArrays
from meshdsl.util.arrays import Ids
from meshdsl.util.jit import njit_cached


def live_ranges(arrays: TimelineArrays, copies: Copies, producer: Ids, never_overwritten: Flags) -> tuple[Ids, Ids]:
    """Returns the first and the last position of copies.

    The last is ``NOWHERE`` for copies that are never needed, views, and copies in the memory around their body.

    Args:
      producer: [values], the position of each.
      never_overwritten: [values], inputs that no result overwrites.
    """
    nowhere = np.full(copies.values.size - producer.size, NOWHERE)
    first, last = np.append(producer, nowhere + 1), np.append(producer, nowhere)
    smaller = np.empty(first.size, dtype=np.intp)
    smaller = smaller[: _find_uses(arrays, copies, first, last, smaller)]
    _make_early(arrays.is_entry, copies.sources, smaller, first, last, np.zeros(arrays.is_entry.size, dtype=np.intp))
    viewed, root = np.full(first.size, -1), np.arange(first.size)
    _extend_viewed(arrays, copies.used, last, viewed)
    _overwrite(arrays, copies, never_overwritten, viewed, root, last)
    elsewhere, until = viewed >= 0, np.full(first.size, -1)
    is_carry = np.zeros(first.size, dtype=np.bool_)
    is_carry[arrays.carried] = True
    _share_with_carries(arrays, copies, first, last, viewed, root, elsewhere, until, is_carry)
    last[elsewhere] = NOWHERE
    return first, last


@njit_cached
def _find_uses(arrays: TimelineArrays, copies: Copies, first: Ids, last: Ids, smaller: Ids) -> int:
    """Sets the first and last use of copies; a source is used where a copy of it is first needed.

    ``smaller`` gets the copies that are smaller than their source and may be made earlier; returns how many there are.
    """
    begins, runs_at, used, sources, sizes = arrays.first_use, arrays.runs_at, copies.used, copies.sources, copies.bytes
    count = 0
    for at in range(runs_at.size):
        for use in range(begins[at], begins[at + 1]):
            copy = used[use]
            while copy >= 0:
                last[copy] = max(last[copy], runs_at[at])
                if first[copy] >= 0:
                    break
                first[copy], source = at, sources[copy]
                if source >= 0 and first[source] >= 0 and sizes[copy] < sizes[source]:
                    smaller[count] = copy
                    count, source = count + 1, -1
                copy = source
    return count


@njit_cached
def _make_early(is_entry: Flags, sources: Ids, smaller: Ids, first: Ids, last: Ids, made: Ids) -> None:
    """Makes smaller copies as soon as their source has no other use, one after the other.

    Args:
      made: [positions], how many are made after each: zeros.
    """
    for i in range(smaller.size):
        copy = smaller[i]
        source = sources[copy]
        after = last[source] + is_entry[last[source]]
        first[copy] = min(first[copy], after + made[after])
        last[source] = max(first[copy], after)
        made[after] += 1


@njit_cached
def _extend_viewed(arrays: TimelineArrays, used: Ids, last: Ids, viewed: Ids) -> None:
    """Uses of views are uses of the viewed copies, if these have memory."""
    views, uses, materialized = arrays.views, arrays.viewed, arrays.materialized
    for i in range(views.size):
        view, copy = views[i], used[uses[i]]
        if _has_memory(materialized, copy):
            last[copy] = max(last[copy], last[view])
            viewed[view] = copy


@njit_cached
def _overwrite(arrays: TimelineArrays, copies: Copies, fixed: Flags, viewed: Ids, root: Ids, last: Ids) -> None:
    """Results overwrite the first of their options that has no later use."""
    positions, results, options = arrays.reuse_at, arrays.reuse_results, arrays.reuse_options
    uses, materialized, used, sizes = arrays.reuse_uses, arrays.materialized, copies.used, copies.bytes
    for i in range(results.size):
        at, result = positions[i], results[i]
        for option in range(options[i], options[i + 1]):
            copy = _viewed_in_the_end(viewed, used[uses[option]])
            may_change = copy >= fixed.size or not fixed[copy]
            is_free = may_change and _has_memory(materialized, copy) and last[copy] == at
            if is_free and sizes[copy] == sizes[result] and viewed[result] < 0:
                last[copy], root[result] = at - 1, root[copy]
                break


@njit_cached
def _share_with_carries(
    arrays: TimelineArrays,
    copies: Copies,
    first: Ids,
    last: Ids,
    viewed: Ids,
    root: Ids,
    elsewhere: Flags,
    until: Ids,
    is_carry: Flags,
) -> None:
    """Marks copies that lie in the memory around their body.

    These are results that overwrite the initial value of a carry, the final value of a carry if its initial value has
    no later use, and values that are returned directly to the enclosing op.

    Args:
      root: the copy whose memory each overwrites in the end.
      until: the last use of the memory of each root; filled here.
    """
    for copy in range(root.size):
        until[root[copy]] = max(until[root[copy]], last[copy])
        elsewhere[copy] |= is_carry[root[copy]]
    for i in range(arrays.carried.size):
        start, back = arrays.carried[i], arrays.carried_back[i]
        end = _viewed_in_the_end(viewed, copies.used[back]) if back >= 0 else -1
        if end >= 0 and root[end] != start and first[end] > until[start]:
            elsewhere[end] = True
    for i in range(arrays.returned.size):
        use = arrays.returned[i]
        copy = _viewed_in_the_end(viewed, copies.used[use]) if use >= 0 else -1
        if copy >= 0 and not arrays.is_input[copies.values[copy]]:
            elsewhere[copy] = True


@njit_cached
def _has_memory(materialized: Flags, copy: int) -> bool:
    """Returns whether a copy exists at all: fused values do not."""
    return copy >= materialized.size or materialized[copy]


@njit_cached
def _viewed_in_the_end(viewed: Ids, copy: int) -> int:
    while viewed[copy] >= 0:
        copy = viewed[copy]
    return copy
