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
            partial, sent = self._partial.get(value, _NONE), value not in problem.unsent
            more = partial, sent, problem.apart.get(value, ()), hidden.get(value)
            key = (problem.nodes[n].kind, p, *more)
            found[value] = asked.get(key) or asked.setdefault(
                key, self._of(known, *problem.nodes[n].kind.shapes[p], *more)
            )
        return found

    def _of(
        self,
        known: Known,
        shape: tuple[int, ...],
        itemsize: int,
        partial: frozenset[str],
        sent: bool,
        apart: tuple[str, ...],
        hidden: Hidden | None,
    ) -> Distances:
        kinds = tuple(kind for kind in REDUCTIONS if kind in partial)
        key = (shape, itemsize, kinds, self._scale, sent, apart, hidden)
        return known.get(key) or known.setdefault(key, Distances(self._problem.mesh, *key))


def _partial(problem: Problem, tables: Iterable[Table]) -> dict[int, frozenset[str]]:
    """By value id, the reductions in which some node makes or reads it, if there are any."""
    found: dict[int, frozenset[str]] = {}
    for node, table in zip(problem.nodes, tables, strict=True):
        for port, kinds in zip(node.ports, table.kinds, strict=True):
            if kinds:
                value = port.value.id
                found[value] = found.get(value, _NONE) | kinds
    return found
