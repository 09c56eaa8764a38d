"""What moving every value costs: values of equal shape, partial in the same ways, share the prices."""

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType

from meshdsl.layouts.placement import REDUCTIONS
from meshdsl.planner.distances import Distances, Hidden
from meshdsl.planner.exact import Scale
from meshdsl.planner.node import Problem
from meshdsl.planner.tables import Table

Known = dict[Hashable, Distances]  # by all that they depend on
_NONE = frozenset[str]()
_HIDDEN: Mapping[int, Hidden] = MappingProxyType({})


class Reshards:
    """The distances between the layouts of a problem's values.

    Args:
      tables: by node.
    """

    def __init__(self, problem: Problem, tables: Iterable[Table], scale: Scale) -> None:
        self._problem, self._scale = problem, scale
        self._partial = _partial(problem, tables)

    def by_value(self, known: Known, hidden: Mapping[int, Hidden] = _HIDDEN) -> dict[int, Distances]:
        """The distances of every value; new ones are added to those that are known.

        Args:
          hidden: by value id, what of its moves costs less.
        """
        problem = self._problem
        found: dict[int, Distances] = {}
        asked: Known = {}
        for value, (n, p) in problem.defined.items():
            kind, partial = problem.nodes[n].kind, self._partial.get(value, _NONE)
            sent, apart, less = value not in problem.unsent, problem.apart.get(value, ()), hidden.get(value)
            key = (kind, p, partial, sent, apart, less)
            if key not in asked:
                ways = tuple(reduction for reduction in REDUCTIONS if reduction in partial)
                full = (*kind.shapes[p], ways, self._scale, sent, apart, less)
                if full not in known:
                    known[full] = Distances(problem.mesh, *full)
                asked[key] = known[full]
            found[value] = asked[key]
        return found


def _partial(problem: Problem, tables: Iterable[Table]) -> dict[int, frozenset[str]]:
    """By value id, the reductions in which some node makes or reads it, if there are any."""
    found: dict[int, frozenset[str]] = {}
    for node, table in zip(problem.nodes, tables, strict=True):
        for p, kinds in table.partial:
            value = node.ports[p].value.id
            found[value] = found.get(value, _NONE) | kinds
    return found
