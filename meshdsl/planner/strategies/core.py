"""The core of an instance: its costs as a network, and its usages, in numbers that floats hold exactly."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshdsl.planner.arrays import array
from meshdsl.planner.exact import Costs, Ints
from meshdsl.planner.network import Network
from meshdsl.planner.strategies.instance import Instance
from meshdsl.planner.strategies.usage import Usage
from meshdsl.planner.trail import Labels

_EXACT = 53  # bits of a float64


@dataclass(frozen=True)
class Core:
    """A network whose variables use memory.

    Args:
      cost_unit: what 1 stands for in the network's tables; more than 1 only where sums pass 2^53, costs
        are then rounded down. usage_unit: likewise for usages.
    """

    network: Network
    usage: Usage
    cost_unit: int
    usage_unit: int

    def copy(self) -> "Core":
        """A core of its own, with the same arrays."""
        return Core(self.network.copy(), self.usage.copy(), self.cost_unit, self.usage_unit)

    @property
    def feasible(self) -> bool:
        """False if it is certain that no choice is valid."""
        return not (self.usage.limit < 0).any() and all(np.isfinite(u).any() for u in self.network.unary.values())

    def restrict(self, v: int, keep: Labels) -> None:
        """Leave these states of a variable."""
        self.network.restrict(v, keep)
        self.usage.restrict(v, keep)

    def merge(self, v: int, w: int, image: Labels) -> None:
        """Make ``v``, which takes state ``image[j]`` where w takes j, a part of w."""
        self.network.merge(v, w, image)
        self.usage.merge(v, w, image)

    @property
    def most(self) -> float:
        """More than any choice of finite cost costs."""
        network = self.network
        tables = (table for v, near in network.near.items() for w, table in near.items() if v < w)
        return 1.0 + sum([float(a.max(initial=0.0, where=np.isfinite(a))) for a in (*network.unary.values(), *tables)])

    def states(self, choice: Sequence[int]) -> dict[int, int] | None:
        """The states of the core's variables in a choice; None if contraction has dropped one of them."""
        labels, found = self.network.labels, {}
        for v in self.network.unary:
            at = int(np.searchsorted(labels[v], choice[v])) if v in labels else choice[v]
            if v in labels and (at == labels[v].size or labels[v][at] != choice[v]):
                return None
            found[v] = at
        return found

    def choice(self, states: dict[int, int]) -> list[int]:
        """The strategies of all nodes, given the states of the core's variables by position."""
        chosen: list[int] = self.network.named(list(states), array(states.values())).tolist()
        return chosen


def core_of(instance: Instance, whole: bool = False) -> Core:
    """An instance as a core, not contracted yet.

    Args:
      whole: also with costs that no choice needs, unless only such choices are valid.
    """
    forbidden = np.inf if whole else unneeded(instance)
    cost_unit = _unit((*instance.costs, *instance.tables), forbidden)
    usage_unit = _unit(instance.usages, np.inf)
    network, scaled = Network(), _Scaled(cost_unit, forbidden)
    for costs in instance.costs:
        network.new(scaled(costs))
    for (a, b), table in zip(instance.ends, instance.tables, strict=True):
        network.add(a, b, scaled(table))
    used = map(_Scaled(usage_unit, np.inf), instance.usages)
    limit = np.inf if instance.limit is None else float(instance.limit // usage_unit)
    usage = Usage.of(instance.intervals, used, limit, network.derived)
    return Core(network, usage, cost_unit, usage_unit)


class _Scaled:
    """Arrays in floats that are exact integers, rounded down; what is forbidden is infinite. Equal ones stay one."""

    def __init__(self, unit: int, forbidden: float) -> None:
        self.unit, self.forbidden = unit, forbidden
        self._known: dict[int, Costs] = {}

    def __call__(self, array: Ints) -> Costs:
        found = self._known.get(id(array))
        if found is None:
            whole = (array // self.unit).astype(np.float64)
            found = self._known[id(array)] = np.where(array >= self.forbidden, np.inf, whole)
        return found


def unneeded(instance: Instance) -> float:
    """The least cost that alone passes any total of smaller costs: a choice with it is never needed."""
    arrays = _counted((*instance.costs, *instance.tables))
    least = np.inf
    while True:
        top = max(int(a[a < least].max()) for a, _ in arrays)
        below = [(a[a < top], n) for a, n in arrays]
        if any(not a.size for a, _ in below) or sum([int(a.max()) * n for a, n in below]) >= top:
            return least
        least = top


def _unit(arrays: Iterable[Ints], forbidden: float) -> int:
    """A power of two in which no sum of one number of each array passes what floats hold exactly."""
    total = sum([int(a[a < forbidden].max(initial=0)) * n for a, n in _counted(arrays)])
    return 1 << max(0, total.bit_length() - _EXACT)


def _counted(arrays: Iterable[Ints]) -> list[tuple[Ints, int]]:
    """Each array once, with how often it occurs."""
    arrays = list(arrays)
    counts = Counter(map(id, arrays))
    return [(a, counts[id(a)]) for a in {id(a): a for a in arrays}.values()]
