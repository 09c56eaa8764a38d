"""What is in memory while an operation of a graph runs, whatever the plan.

``Lives`` says of one plan what lives when. This says it of all: which operands and results an operation certainly
holds, and which values are needed after it that were made before. Left out is what may lie elsewhere: views, values
that are fused away; and in the body of a loop what may lie in memory of the graph around it. Of operands and a result
that may be written over one of them, which is then as large, the operands count, if they are among the rest.
"""

from dataclasses import dataclass

import numpy as np

from meshdsl.planner.exact import Ids
from meshdsl.planner.numbering import Flags, Numbering
from meshdsl.planner.places import Places

_AFTER, _TIMES = 2, 3  # before an operation runs, meanwhile, and afterwards


@dataclass(frozen=True)
class Certain:
    """What one graph holds while its operation at a position runs; values and readings go by their numbers.

    Args:
      read: per value, a reading by the operation, or by one before that is fused into this one or a later one.
      written: its results.
      later: of values made before and needed afterwards, the last reading.
      once: those of these values that are read but once afterwards.
      again: [values, 2], of those in ``read`` that are read once before, once while the operation runs, and once
        afterwards, the last two readings.
    """

    read: Ids
    written: Ids
    later: Ids
    once: Flags
    again: Ids


def certain(places: Places, at: int, counted: Flags) -> Certain:
    """What the graph that a position is in holds while the operation there runs.

    Args:
      counted: the inputs that are the graph's own to hold.
    """
    numbers, part = places.numbers, int(places.numbers.part[at])
    start, stop = numbers.parts[part].start, numbers.parts[part].stop
    own = places.kept & (numbers.made >= start)
    inside = (own | counted) & ~numbers.are(_views(places)[0]) & ~_elsewhere(places, part)
    there = np.arange(numbers.first[start], numbers.first[stop])
    before = there[(numbers.at[there] <= at) & (places.runs[numbers.at[there]] >= at)]
    waiting = inside & (counted | (numbers.made < at))
    waiting[numbers.read[before]] = False
    after = there[(numbers.at[there] > at) & waiting[numbers.read[there]]]
    later = _last(numbers, after)
    results, options = _reuses(places, at)
    over = _viewed(places, numbers.read[options])
    # what a result may be written over is there, or that result, unless it lies elsewhere
    under = inside[results] & inside[numbers.read[options]] & ~numbers.are(numbers.read[later])[numbers.read[options]]
    read = _last(numbers, np.append(before[inside[numbers.read[before]] & ~over[numbers.read[before]]], options[under]))
    written = inside & (numbers.made == at)
    written[results[under]] = False
    once = np.bincount(numbers.read[after], minlength=inside.size) == 1
    again = _again(numbers, there, np.where(numbers.at[there] > at, _AFTER, places.runs[numbers.at[there]] >= at))
    kept = numbers.are(numbers.read[read])[numbers.read[again[:, 0]]]
    return Certain(read, np.flatnonzero(written), later, once, again[kept])


def _again(numbers: Numbering, readings: Ids, when: Ids) -> Ids:
    """Of values that are read once before an operation runs, once meanwhile and once afterwards, the last two readings.

    Args:
      when: of each reading, 0, 1 or 2.
    """
    values = numbers.read[readings]
    times = np.bincount(values * _TIMES + when, minlength=len(numbers.values) * _TIMES).reshape(-1, _TIMES)
    found = np.full((len(numbers.values), _TIMES), -1)
    found[values, when] = readings
    again: Ids = found[(times == 1).all(axis=1), 1:]
    return again


def _last(numbers: Numbering, readings: Ids) -> Ids:
    """Of the readings of each value, one by the last operation that reads it: of its first such operand."""
    order = np.lexsort((numbers.operand[readings], -numbers.at[readings], numbers.read[readings]))
    return readings[order[np.flatnonzero(np.diff(numbers.read[readings[order]], prepend=-1))]]


def _reuses(places: Places, at: int) -> tuple[Ids, Ids]:
    """Results of an operation and the readings that each may be written over."""
    reuses = places.reuses
    first, last = np.searchsorted(reuses.at, (at, at + 1))
    options = reuses.options[first : last + 1]
    return np.repeat(reuses.made[first:last], np.diff(options)), reuses.over[options[0] : options[-1]]


def _views(places: Places) -> tuple[Ids, Ids]:
    """Values that may be views, and what each views."""
    numbers = places.numbers
    seen = numbers.reading_at(places.views, np.zeros_like(places.views))
    return numbers.makes[places.views[seen >= 0]], numbers.read[seen[seen >= 0]]


def _viewed(places: Places, values: Ids) -> Flags:
    """Values, and what they view."""
    views, seen = _views(places)
    return _reached(places.numbers.are(values), views, seen)


def _elsewhere(places: Places, part: int) -> Flags:
    """The values of a body that may lie in memory around it: in a carry's place, or where it returns them."""
    numbers, (start, stop, *_, around) = places.numbers, places.numbers.parts[part]
    if around is None:
        return numbers.are(np.empty(0, dtype=np.intp))
    carried = numbers.are(np.array([numbers.makes[start - 1] + i for i, _ in places.lies[part].carried], dtype=np.intp))
    views, seen = _views(places)
    over, made = numbers.read[places.reuses.over], np.repeat(places.reuses.made, np.diff(places.reuses.options))
    found = _reached(carried, np.append(seen, over), np.append(views, made))
    returned = numbers.read[numbers.first[stop - 1] : numbers.first[stop]]
    return found | _viewed(places, returned)


def _reached(found: Flags, sources: Ids, targets: Ids) -> Flags:
    """Values, and those that arcs lead to from them."""
    while True:
        further = targets[found[sources] & ~found[targets]]
        if not further.size:
            return found
        found[further] = True
