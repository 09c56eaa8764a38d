"""Where two plans differ: parts that one can take over from the other, each by itself."""

from collections import defaultdict
from collections.abc import Callable
from itertools import chain

import numpy as np

from meshdsl.planner.extract import Choice
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.numbering import grouped

_SMALLEST = 8  # nodes of a half of a group
_IN_A_ROW = 3  # parts of one size that do not fit
_LARGEST = 0.5  # part of all nodes


def mixed(
    model: Model,
    best: Choice,
    over: Choice,
    made: Callable[[Assignment], Choice],
    fits: Callable[[Choice], bool],
    tries: int,
) -> Choice:
    """The cheapest plan found that does some things as ``over`` does them, which does not fit: as many as fit.

    Where some in a row are too much, so are the others of that size, or nearly all: they are halved untried.

    Args:
      made: the plan of some rows. tries: plans that are made.
    """
    parts = [apart(model, best, over)]
    while parts:
        left, failed = list[list[list[int]]](), 0
        for some in parts:
            found = None
            if failed < _IN_A_ROW and tries and not model.clock.is_up():
                rows = best.rows.copy()
                nodes = list(chain.from_iterable(some))
                rows[nodes] = over.rows[nodes]
                tries, found = tries - 1, made(rows)
            if found and found.cost < best.cost and fits(found):
                best, failed = found, 0
            else:
                failed += 1
                left += halves(some)
        parts = left if tries and not model.clock.is_up() else []
    return best


def apart(model: Model, one: Choice, other: Choice) -> list[list[int]]:
    """Groups of nodes that two plans treat differently, joined by the values whose layouts differ at both ends.

    Where that is most of them, the nodes of each of several equal layers are a group of their own. The nodes of a group
    come as they are met from its first in program order on, so that its first half is near: of equal layers in a row,
    each with its part of the backward pass, the first ones.
    """
    ports, wiring = model.ports, model.wiring
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    readers, values = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for n, value in zip(wiring.nodes[moved].tolist(), wiring.values[moved].tolist(), strict=True):
        readers[value].append(n)
        values[n].append(value)
    left = dict.fromkeys(np.flatnonzero((one.rows != other.rows).any(axis=1)).tolist())
    found: list[list[int]] = []
    while left:
        first = next(iter(left))
        group = [first]
        del left[first]
        for n in group:  # which grows
            near = [m for value in values[n] for m in readers.pop(value, ()) if m in left]
            for m in dict.fromkeys(near):
                del left[m]
                group.append(m)
        found += _by_layer(model, group) if len(group) > _LARGEST * len(model.nodes) else [group]
    return found


def _by_layer(model: Model, group: list[int]) -> list[list[int]]:
    """The nodes of each layer, and those of none."""
    nodes = np.array(group)
    return [nodes[some].tolist() for some in grouped(model.layers.layer[nodes])]


def halves(some: list[list[int]]) -> list[list[list[int]]]:
    """Of groups of nodes, or of one that is large enough; none of plans that differ in moves alone."""
    if len(some) > 1:
        return [some[: len(some) // 2], some[len(some) // 2 :]]
    nodes = some[0] if some else []
    half = len(nodes) // 2
    return [[nodes[:half]], [nodes[half:]]] if half >= _SMALLEST else []
