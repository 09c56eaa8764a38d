"""Where two plans differ: parts that one can take over from the other, each by itself."""

from collections import defaultdict

import numpy as np

from meshdsl.planner.extract import Choice
from meshdsl.planner.model import Model
from meshdsl.planner.numbering import grouped

_SMALLEST = 8  # nodes of a half of a group
_LARGEST = 0.5  # part of all nodes


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
