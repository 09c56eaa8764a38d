"""When copies live, and which of them lie in one place: compiled loops over the line of a program (``timeline``).

A copy lives from the operation that makes it, or first needs it, to the last that reads it. A smaller one that moves
make is made as soon as nobody else needs what it is made from. A view adds to the life of what it views; a result that
is written over an operand ends the life of that one before its own begins.

"""

import numpy as np

from meshdsl.planner.compiled import compiled
from meshdsl.planner.exact import Ids
from meshdsl.planner.numbering import Flags
from meshdsl.planner.placed import NOWHERE, Copies
from meshdsl.planner.timeline import Line


@compiled
def lives(line: Line, copies: Copies, made: Ids, fixed: Flags) -> tuple[Ids, Ids]:
    """Where copies begin and end; ``NOWHERE`` for what is never needed, a view, or in memory around its body.

    Args:
      made: per value, where it is made. fixed: inputs that are never written over.
    """
    count = copies.values.size
    first, last = np.full(count, NOWHERE + 1), np.full(count, NOWHERE)
    first[: made.size] = made
    last[: made.size] = made
    _read(line, copies, first, last)
    viewed, root = np.full(count, -1), np.arange(count)
    _view(line, copies.read, last, viewed)
    _reuse(line, copies, fixed, viewed, root, last)
    elsewhere = viewed >= 0
    _carry(line, copies.read, first, last, viewed, root, elsewhere)
    for reading in line.given:
        copy = _end(viewed, copies.read[reading]) if reading >= 0 else -1
        if copy >= 0 and not line.inputs[copies.values[copy]]:
            elsewhere[copy] = True
    last[elsewhere] = NOWHERE
    return first, last


@compiled
def _read(line: Line, copies: Copies, first: Ids, last: Ids) -> None:
    """Note where copies are first needed and last read; what makes them is read where they are first needed."""
    begins, runs, read, sources, sizes = line.first, line.runs, copies.read, copies.sources, copies.bytes
    late, waiting = np.empty(sizes.size, dtype=np.intp), 0
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
    _shrink(line.enters, sources, late[:waiting], first, last)


@compiled
def _shrink(enters: Flags, sources: Ids, smaller: Ids, first: Ids, last: Ids) -> None:
    """Make smaller copies as soon as nobody else needs what they are made from, one after the other."""
    taken = np.zeros(enters.size, dtype=np.intp)
    for copy in smaller:
        source = sources[copy]
        after = last[source] + enters[last[source]]
        first[copy] = min(first[copy], after + taken[after])
        last[source] = max(first[copy], after)
        taken[after] += 1


@compiled
def _view(line: Line, read: Ids, last: Ids, viewed: Ids) -> None:
    """Readings of views are readings of what they view, if that is in memory."""
    views, seen, kept = line.views, line.seen, line.kept
    for i in range(views.size):
        view, copy = views[i], read[seen[i]]
        if _in_memory(kept, copy):
            last[copy] = max(last[copy], last[view])
            viewed[view] = copy


@compiled
def _reuse(line: Line, copies: Copies, fixed: Flags, viewed: Ids, root: Ids, last: Ids) -> None:
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


@compiled
def _carry(line: Line, read: Ids, first: Ids, last: Ids, viewed: Ids, root: Ids, elsewhere: Flags) -> None:
    """What is written over the start of a carry lies in its place, and its end if nobody needs that any more."""
    until, carries = np.full(root.size, -1), np.zeros(root.size, dtype=np.bool_)
    carried, ends = line.carried, line.back
    carries[carried] = True
    for copy in range(root.size):
        until[root[copy]] = max(until[root[copy]], last[copy])
        elsewhere[copy] |= carries[root[copy]]
    for i in range(carried.size):
        start, back = carried[i], ends[i]
        end = _end(viewed, read[back]) if back >= 0 else -1
        if end >= 0 and root[end] != start and first[end] > until[start]:
            elsewhere[end] = True


@compiled
def _in_memory(kept: Flags, copy: int) -> bool:
    """Whether a copy is there at all: what is fused into its readers is not."""
    return copy >= kept.size or kept[copy]


@compiled
def _end(viewed: Ids, copy: int) -> int:
    """What a copy views in the end."""
    while viewed[copy] >= 0:
        copy = viewed[copy]
    return copy
