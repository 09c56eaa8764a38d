"""When copies live, and which of them lie in one place: compiled loops over the line of a program (``timeline``).

A copy lives from the operation that makes it, or first needs it, to the last that reads it. A smaller one that moves
make is made as soon as nobody else needs what it is made from. A view adds to the life of what it views; a result that
is written over an operand ends the life of that one before its own begins.
"""

import numpy as np

from meshdsl.ir.index import Flags
from meshdsl.planner.liveness.timeline import NOWHERE, Copies, TimelineArrays
from meshdsl.util.arrays import Ids
from meshdsl.util.jit import njit_cached


def live_ranges(line: TimelineArrays, copies: Copies, made: Ids, fixed: Flags) -> tuple[Ids, Ids]:
    """Where copies begin and end; ``NOWHERE`` for what is never needed, a view, or in memory around its body.

    Args:
      made: per value, where it is made. fixed: inputs that are never written over.
    """
    nowhere = np.full(copies.values.size - made.size, NOWHERE)
    first, last = np.append(made, nowhere + 1), np.append(made, nowhere)
    late = np.empty(first.size, dtype=np.intp)
    late = late[: _read(line, copies, first, last, late)]
    _shrink(line.enters, copies.sources, late, first, last, np.zeros(line.enters.size, dtype=np.intp))
    viewed, root = np.full(first.size, -1), np.arange(first.size)
    _view(line, copies.read, last, viewed)
    _reuse(line, copies, fixed, viewed, root, last)
    elsewhere, until = viewed >= 0, np.full(first.size, -1)
    carries = np.zeros(first.size, dtype=np.bool_)
    carries[line.carried] = True
    _carry(line, copies, first, last, viewed, root, elsewhere, until, carries)
    last[elsewhere] = NOWHERE
    return first, last


@njit_cached
def _read(line: TimelineArrays, copies: Copies, first: Ids, last: Ids, late: Ids) -> int:
    """Note where copies are first needed and last read; what makes them is read where they are first needed.

    ``late`` are the smaller ones that may be made sooner; returns how many there are.
    """
    begins, runs, read, sources, sizes = line.first, line.runs, copies.read, copies.sources, copies.bytes
    waiting = 0
    for at in range(runs.size):
        for reading in range(begins[at], begins[at + 1]):
            copy = read[reading]
            while copy >= 0:
                last[copy] = max(last[copy], runs[at])
                if first[copy] >= 0:
                    break
                first[copy], source = at, sources[copy]
                if source >= 0 and first[source] >= 0 and sizes[copy] < sizes[source]:
                    late[waiting] = copy
                    waiting, source = waiting + 1, -1
                copy = source
    return waiting


@njit_cached
def _shrink(enters: Flags, sources: Ids, smaller: Ids, first: Ids, last: Ids, taken: Ids) -> None:
    """Make smaller copies as soon as nobody else needs what they are made from, one after the other.

    Args:
      taken: how many are made so after each position: none yet.
    """
    for i in range(smaller.size):
        copy = smaller[i]
        source = sources[copy]
        after = last[source] + enters[last[source]]
        first[copy] = min(first[copy], after + taken[after])
        last[source] = max(first[copy], after)
        taken[after] += 1


@njit_cached
def _view(line: TimelineArrays, read: Ids, last: Ids, viewed: Ids) -> None:
    """Readings of views are readings of what they view, if that is in memory."""
    views, seen, kept = line.views, line.seen, line.kept
    for i in range(views.size):
        view, copy = views[i], read[seen[i]]
        if _in_memory(kept, copy):
            last[copy] = max(last[copy], last[view])
            viewed[view] = copy


@njit_cached
def _reuse(line: TimelineArrays, copies: Copies, fixed: Flags, viewed: Ids, root: Ids, last: Ids) -> None:
    """Results are written over operands that are not needed any more: the first such."""
    places, results, options, over, kept = line.at, line.made, line.options, line.over, line.kept
    read, sizes = copies.read, copies.bytes
    for i in range(results.size):
        at, made = places[i], results[i]
        for option in range(options[i], options[i + 1]):
            copy = _end(viewed, read[over[option]])
            mine = copy >= fixed.size or not fixed[copy]
            free = mine and _in_memory(kept, copy) and last[copy] == at
            if free and sizes[copy] == sizes[made] and viewed[made] < 0:
                last[copy], root[made] = at - 1, root[copy]
                break


@njit_cached
def _carry(
    line: TimelineArrays,
    copies: Copies,
    first: Ids,
    last: Ids,
    viewed: Ids,
    root: Ids,
    elsewhere: Flags,
    until: Ids,
    carries: Flags,
) -> None:
    """What is written over the start of a carry lies in its place, and its end if nobody needs that any more.

    So does what is given straight to the operation around.

    Args:
      until: when the place of each copy is needed last; not known yet. carries: copies that are carries.
    """
    for copy in range(root.size):
        until[root[copy]] = max(until[root[copy]], last[copy])
        elsewhere[copy] |= carries[root[copy]]
    for i in range(line.carried.size):
        start, back = line.carried[i], line.back[i]
        end = _end(viewed, copies.read[back]) if back >= 0 else -1
        if end >= 0 and root[end] != start and first[end] > until[start]:
            elsewhere[end] = True
    for i in range(line.given.size):
        reading = line.given[i]
        copy = _end(viewed, copies.read[reading]) if reading >= 0 else -1
        if copy >= 0 and not line.inputs[copies.values[copy]]:
            elsewhere[copy] = True


@njit_cached
def _in_memory(kept: Flags, copy: int) -> bool:
    """Whether a copy is there at all: what is fused into its readers is not."""
    return copy >= kept.size or kept[copy]


@njit_cached
def _end(viewed: Ids, copy: int) -> int:
    """What a copy views in the end."""
    while viewed[copy] >= 0:
        copy = viewed[copy]
    return copy
