"""What moving every value costs: values of equal shape, partial in the same ways, share the prices."""

from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from meshdsl.layouts.placement import REDUCTIONS
from meshdsl.planner.arrays import array, equal, grouped, numbered
from meshdsl.planner.distances import Distances, Hidden
from meshdsl.planner.exact import Ids, Scale
from meshdsl.planner.identity import identity
from meshdsl.planner.node import Problem
from meshdsl.planner.tables import Table
from meshdsl.planner.twins import Twins

Known = dict[Hashable, Distances]  # by all that they depend on
_HIDDEN: Mapping[int, Hidden] = MappingProxyType({})


class ByValue:
    """The distances of values, given by their ids.

    Args:
      every: that there are, each once. of: per value id, the number of its own.
    """

    def __init__(self, every: Sequence[Distances], of: Ids) -> None:
        self.every, self.of = tuple(every), of
        self._each: list[int] = of.tolist()

    def __getitem__(self, value: int) -> Distances:
        return self.every[self._each[value]]


class Reshards:
    """The distances between the layouts of a problem's values.

    Args:
      twins: the nodes. tables: by node.
    """

    def __init__(self, problem: Problem, twins: Twins, tables: Sequence[Table], scale: Scale) -> None:
        self._problem, self._scale = problem, scale
        self._partial = _partial(problem, twins, tables)

    def by_value(self, known: Known, hidden: Mapping[int, Hidden] = _HIDDEN) -> ByValue:
        """The distances of every value; new ones are added to those that are known.

        Args:
          hidden: by value id, what of its moves costs less.
        """
        numbers, wiring = self._problem.numbers, self._problem.wiring
        values = np.flatnonzero(wiring.made >= 0)
        ids = wiring.values[wiring.made[values]]
        apart, less = np.zeros(wiring.made.size, dtype=np.intp), np.zeros(wiring.made.size, dtype=np.intp)
        for column, stated in ((apart, self._problem.apart), (less, hidden)):
            column[numbers.of(stated)] = 1 + numbered(stated.values())
        unsent = self._problem.unsent.astype(np.intp)
        said = equal([column[values] for column in (numbers.shape, numbers.dtype, self._partial, unsent, apart, less)])
        _, once, alike = np.unique(said, return_index=True, return_inverse=True)
        found = [self._distances(number, known, hidden) for number in values[once].tolist()]
        every = list(dict.fromkeys(found))
        of = np.full(int(ids.max(initial=-1)) + 1, -1)
        of[ids] = array(map(every.index, found))[alike]
        return ByValue(every, of)

    def _distances(self, number: int, known: Known, hidden: Mapping[int, Hidden]) -> Distances:
        """Those of one value."""
        problem, value = self._problem, self._problem.numbers.values[number]
        ways = tuple(way for i, way in enumerate(REDUCTIONS) if self._partial[number] >> i & 1)
        sent, apart, less = not problem.unsent[number], problem.apart.get(value.id, ()), hidden.get(value.id)
        full = (value.shape, value.itemsize, ways, self._scale, sent, apart, less)
        if full not in known:
            known[full] = Distances(problem.mesh, *full)
        return known[full]


def _partial(problem: Problem, twins: Twins, tables: Sequence[Table]) -> Ids:
    """Per value, by number, the reductions in which some node makes or reads it, a bit each."""
    wiring, found = problem.wiring, np.zeros(problem.wiring.made.size, dtype=np.intp)
    for nodes in grouped(twins.numbered(lambda n: identity(tables[n]))):
        for p, ways in tables[nodes[0]].partial:
            bits = sum(1 << i for i, reduction in enumerate(REDUCTIONS) if reduction in ways)
            np.bitwise_or.at(found, wiring.of[wiring.first[nodes] + p], bits)
    return found
