"""The ports of all nodes in one sequence, and their layouts under a state of every node, all at once.

A node's row on a mesh axis has a placement code for each of its ports; the codes on all axes are looked up in a table
of the layouts of the port's value. Where the codes of a port lie, and which table is its own, is the same for all
states: it is laid out here once.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import NamedTuple

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.space import Space
from meshdsl.planner.distances import Distances
from meshdsl.planner.exact import Ids
from meshdsl.planner.numbering import array, grouped, numbered
from meshdsl.planner.tables import Table
from meshdsl.planner.wiring import Wiring

Order = tuple[str, ...]  # of mesh axes
Elsewhere = dict[int, tuple[int, set[int]]]  # by value id: its own layout, and the others in which it is read


class Alike(NamedTuple):
    """Ports whose layouts are looked up in one table, by placement codes, and the space of these layouts."""

    ports: Ids
    table: Ids
    space: Space


class Ports:
    """The ports of nodes, node after node.

    Args:
      wiring: of the nodes. tables: of their rows. orders: of axes that split one dim.
      distances: per value id, its layouts. spaces: per port, a number for those of its value.
    """

    def __init__(
        self,
        wiring: Wiring,
        tables: Sequence[Table],
        orders: Sequence[Order],
        distances: Mapping[int, Distances],
        spaces: Ids,
    ) -> None:
        self._wiring = wiring
        self._codes, self._begins = _coded(tables)
        self._alike = list(self._looked_up(orders, distances, spaces))

    def layouts(self, rows: Ids) -> Ids:
        """Per port, the number of its layout in the space of its value.

        Args:
          rows: per node and mesh axis.
        """
        codes = self._codes[self._begins + rows[self._wiring.nodes].T]
        found = np.empty(self._wiring.nodes.size, dtype=np.intp)
        for ports, table, _ in self._alike:
            found[ports] = table[tuple(codes[:, ports])]
        return found

    def elsewhere(self, layouts: Ids) -> Elsewhere:
        """The values that are read in other layouts than their own, in program order."""
        differ = np.flatnonzero(layouts[self._wiring.read] != layouts[self._wiring.makers])
        makers, found = self._wiring.makers[differ], Elsewhere()
        ends = (
            self._wiring.values[makers].tolist(),
            layouts[makers].tolist(),
            layouts[self._wiring.read[differ]].tolist(),
        )
        for value, own, other in zip(*ends, strict=True):
            found.setdefault(value, (own, set()))[1].add(other)
        return found

    def named(self, layouts: Ids) -> Ids:
        """The layouts of ports, by their numbers in ``every`` one."""
        found = np.empty_like(layouts)
        for ports, _, space in self._alike:
            found[ports] = self._names[space][layouts[ports]]
        return found

    @cached_property
    def every(self) -> dict[Layout, int]:
        """The layouts of all spaces, numbered."""
        spaces = dict.fromkeys(space for _, _, space in self._alike)
        return {layout: i for i, layout in enumerate(dict.fromkeys(chain(*(space.layouts for space in spaces))))}

    @cached_property
    def _names(self) -> dict[Space, Ids]:
        """Per space, the numbers of its layouts in every one."""
        spaces = dict.fromkeys(space for _, _, space in self._alike)
        return {space: array(map(self.every.__getitem__, space.layouts)) for space in spaces}

    def _looked_up(self, orders: Sequence[Order], distances: Mapping[int, Distances], spaces: Ids) -> Iterator[Alike]:
        """Which ports are looked up in which tables."""
        wiring, ways = self._wiring, numbered(orders)
        for ports in grouped(spaces * (ways.max(initial=0) + 1) + ways[wiring.nodes]):
            layouts = distances[int(wiring.values[ports[0]])]
            yield Alike(ports, layouts.ids(orders[wiring.nodes[ports[0]]]), layouts.space)


def _coded(tables: Sequence[Table]) -> tuple[Ids, Ids]:
    """The placement codes of all tables, and where those of each port begin."""
    distinct = {id(table): table for table in tables}
    lists = [codes for table in distinct.values() for codes in table.codes]
    begins = accumulate((codes.size for codes in lists), initial=0)
    first = {key: list(islice(begins, len(table.codes))) for key, table in distinct.items()}
    return np.concatenate(lists or [array(())]), array(chain.from_iterable(first[id(table)] for table in tables))
