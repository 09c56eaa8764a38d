"""Where two plans differ: parts that one can take over from the other, and what each of them saves and needs."""

from collections import defaultdict

import numpy as np

from meshdsl.planner.arrays import grouped
from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.extract import Choice, Evaluator
from meshdsl.planner.memory import Liveness
from meshdsl.planner.model import Model

_LARGEST = 0.5  # part of all nodes that one part may have

Groups = list[list[int]]  # of nodes


class Parts:
    """Groups of nodes that two plans treat otherwise; what each adds to cost and memory, the others do not change.

    Args:
      groups: of ``apart``. one, other: the plans, with their memory.
      values: per value of the program, by its number, the port that makes it.

    ``saved``: per group, what taking it over from the other plan costs less.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        groups: Groups,
        plans: tuple[Choice, Choice],
        lives: tuple[Liveness, Liveness],
        values: Ids,
    ) -> None:
        self._lives, self._count = lives, len(groups)
        self._node, port = _labels(evaluator.model, groups, *plans)
        self._value = port[values]
        (nodes, moves), (others, their) = (evaluator.shares(plan.rows) for plan in plans)
        self.saved: Costs = self._sums(self._node, nodes - others) + self._sums(port, moves - their)

    def held(self, places: tuple[int, ...]) -> int:
        """Bytes of the first plan at a point."""
        return int(self._lives[0].by_value(places).sum())

    def needs(self, places: tuple[int, ...]) -> Costs:
        """Bytes per group that taking it over needs more at a point, or less."""
        one, other = (lives.by_value(places) for lives in self._lives)
        return self._sums(self._value, (other - one).astype(np.float64))

    def _sums(self, labels: Ids, what: Costs) -> Costs:
        """Per group; what belongs to none has the last label."""
        return np.asarray(np.bincount(labels, what, self._count + 1)[: self._count])


def _labels(model: Model, groups: Groups, one: Choice, other: Choice) -> tuple[Ids, Ids]:
    """The group of each node and, by the ports that make them, of each value; one past the last where there is none."""
    wiring, ports = model.wiring, model.ports
    node, port = (np.full(count, len(groups)) for count in (len(model.nodes), wiring.nodes.size))
    for i, group in enumerate(groups):
        node[group] = i
    moved = np.flatnonzero(ports.layouts(one.rows) != ports.layouts(other.rows))
    port[wiring.every[moved]] = node[wiring.nodes[moved]]
    return node, port


def apart(model: Model, one: Choice, other: Choice) -> Groups:
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
