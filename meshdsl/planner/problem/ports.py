"""The ports of all nodes in one sequence: which values they define and use, and their layouts in a plan.

A node's row on a mesh axis gives a placement code for each of its ports; the codes on all axes are looked up in a table
of the layouts of the port's value. Where the codes of a port begin, and which table is its own, does not depend on the
plan, so it is computed once here, and the layouts of all ports of a plan are one compiled loop.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshdsl.ir.index import GraphIndex
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.reshard import LayoutGraph
from meshdsl.planner.costs.op_cost import SignatureTable
from meshdsl.planner.costs.reshard_cost import ReshardCosts
from meshdsl.planner.problem.variables import Node, NodeClasses
from meshdsl.util.arrays import Ids, first_of, group_by, index_array, object_id, ranges, row_ids, unique_sorted

# ---- Wiring ----------------------------------------------------------------------------------------------------------


End = tuple[int, int]  # a node, and the position of one of its ports; a plain tuple, since millions are made


class Wiring:
    """The incidence of ports and values. Ports are numbered node after node, and values as in ``GraphIndex``.

    Attributes:
      node_of: [ports], the node.
      first_port, port_counts: [nodes], the first port and the number of ports.
      value_of, value_ids: [ports], the value by number and by id.
      producer: [values], the port that defines the value; -1 if no node does.
      port_producer: [ports], the port that defines the value.
      port_of_use: [uses of ``GraphIndex``], the port that stands for the use; -1 if none does.
      uses: the ports that use a value, sorted by value.
      use_producers: for each of these, the port that defines the value.
    """

    def __init__(self, nodes: Sequence[Node], numbers: GraphIndex) -> None:
        links = [n for n, node in enumerate(nodes) if node.op is None]
        ops = index_array(n for n, node in enumerate(nodes) if node.op is not None)
        at = numbers.position[index_array(node.op.id for node in nodes if node.op is not None)]
        reads, makes = (
            numbers.first_use[at + 1] - numbers.first_use[at],
            numbers.first_result[at + 1] - numbers.first_result[at],
        )
        self.port_counts = sizes = np.empty(len(nodes), dtype=np.intp)
        sizes[ops], sizes[links] = reads + makes, index_array(len(nodes[n].ports) for n in links)
        self.node_of, self.first_port = np.repeat(np.arange(len(nodes)), sizes), np.cumsum(sizes) - sizes
        self.value_of, defines = np.empty(self.node_of.size, dtype=np.intp), np.zeros(self.node_of.size, dtype=np.bool_)
        self.port_of_use = np.full(numbers.use_value.size, -1)
        ports, readings = ranges(self.first_port[ops], reads), ranges(numbers.first_use[at], reads)
        self.value_of[ports], self.port_of_use[readings] = numbers.use_value[readings], ports
        ports = ranges(self.first_port[ops] + reads, makes)
        self.value_of[ports], defines[ports] = ranges(numbers.first_result[at], makes), True
        linked = [port for n in links for port in nodes[n].ports]
        ports = ranges(self.first_port[links], sizes[links])
        self.value_of[ports], defines[ports] = (
            numbers.numbers_of(port.value.id for port in linked),
            [p.defines for p in linked],
        )
        self.port_of_use[numbers.use_numbers(p.use for p in linked if p.use)] = ports[[bool(p.use) for p in linked]]
        self.value_ids = index_array(v.id for v in numbers.values)[self.value_of]
        self.producer = np.full(len(numbers.values), -1)
        self.producer[self.value_of[defines]] = np.flatnonzero(defines)
        self.port_producer = self.producer[self.value_of]
        uses = np.flatnonzero(~defines)
        self.uses = uses[np.argsort(self.port_producer[uses], kind="stable")]
        self.use_producers = self.port_producer[self.uses]
        self._numbers, self._ends = numbers, dict[int, list[End]]()
        self._begins: list[int] = self.first_port.tolist()
        self._each: list[int] = self.value_ids.tolist()
        self._makes: list[bool] = defines.tolist()

    def port(self, end: End) -> int:
        """Returns the number of the port at an end."""
        return self._begins[end[0]] + end[1]

    def ports(self, n: int) -> range:
        """Returns the ports of a node."""
        return range(self._begins[n], self._begins[n] + int(self.port_counts[n]))

    def defined_values(self, n: int) -> list[tuple[int, int]]:
        """Returns the positions of the ports at which a node defines values, and the ids of these."""
        return [(p, self._each[port]) for p, port in enumerate(self.ports(n)) if self._makes[port]]

    def value_at(self, end: End) -> int:
        """Returns the id of the value at an end."""
        return self._each[self._begins[end[0]] + end[1]]

    def end_at(self, port: int) -> End:
        """Returns the end of a port."""
        node = int(self.node_of[port])
        return node, port - int(self.first_port[node])

    def ends_of(self, value: int) -> list[End]:
        """Returns the end that defines a value, given by id, then those that use it; none if no node defines it."""
        if value not in self._ends:
            made = int(self.producer[self._numbers.number_of(value)])
            consumers = self.uses[slice(*np.searchsorted(self.use_producers, (made, made + 1)))].tolist()
            self._ends[value] = [self.end_at(port) for port in (made, *consumers)] if made >= 0 else []
        return self._ends[value]

    def ends_at(self, ports: Ids) -> list[End]:
        """Returns the ends of ports."""
        nodes = self.node_of[ports]
        return list(zip(nodes.tolist(), (ports - self.first_port[nodes]).tolist(), strict=True))


# ---- Layouts of a plan -----------------------------------------------------------------------------------------------


Order = tuple[str, ...]  # of mesh axes


class ReshardGroup(NamedTuple):
    """Values of one space that are resharded alike.

    Args:
      values: their ids.
      producers: the ports that define them.
      own: the layout at the producer.
      others: the other layouts that consumers need.
    """

    values: list[int]
    producers: Ids
    own: int
    others: tuple[int, ...]


class Ports:
    """The layouts of all ports, as a function of the states of all nodes.

    Args:
      wiring: of the nodes.
      classes: of the nodes.
      tables: per node.
      orders: per node, the order of mesh axes that split one dim.
      costs: reshard costs, one object per space of layouts and tensor type.
      spaces: [ports], which of these is that of the value.
    """

    def __init__(
        self,
        wiring: Wiring,
        classes: NodeClasses,
        tables: Sequence[SignatureTable],
        orders: Sequence[Order],
        costs: Sequence[ReshardCosts],
        spaces: Ids,
    ) -> None:
        self._wiring, self._spaces = wiring, spaces
        self._codes, self._begins = _coded(tables, classes.intern(lambda n: object_id(tables[n])), wiring)
        self._look_up(orders, classes.intern(orders.__getitem__), costs)

    def layouts(self, rows: Ids) -> Ids:
        """Returns, per port, the number of its layout in the space of its value.

        Args:
          rows: [nodes, mesh axes], the states.
        """
        from meshdsl.planner.costs.kernels import lookup_port_layouts

        states, nodes = np.ascontiguousarray(rows), self._wiring.node_of
        return lookup_port_layouts(states, nodes, self._codes, self._begins, self._tables, self._looked_up, self._bases)

    def resharded(self, layouts: Ids) -> Iterator[ReshardGroup]:
        """Yields the values that consumers need in other layouts than their own, grouped by space and layouts."""
        producers, most = self._wiring.use_producers, int(layouts.max(initial=0)) + 1
        used = layouts[self._wiring.uses]
        differ = used != layouts[producers]
        made, other = np.divmod(unique_sorted(producers[differ] * most + used[differ]), most)
        begins = np.flatnonzero(np.diff(made, prepend=-1))
        counts = np.diff(begins, append=made.size)
        for count in unique_sorted(counts).tolist():
            at = begins[counts == count]
            ports, others = made[at], other[at[:, None] + np.arange(count)]
            for equal in group_by(row_ids([self._spaces[ports], layouts[ports], *others.T])):
                first = equal[0]
                mine = ports[equal]
                values = self._wiring.value_ids[mine].tolist()
                yield ReshardGroup(values, mine, int(layouts[ports[first]]), tuple(others[first].tolist()))

    def layout_numbers(self, layouts: Ids) -> Ids:
        """Returns the layouts of ports, by their numbers in ``all_layouts``."""
        return np.asarray(self._names[self._named + layouts])

    @cached_property
    def all_layouts(self) -> dict[Layout, int]:
        """The layouts of all spaces, with a number each."""
        return {layout: i for i, layout in enumerate(dict.fromkeys(self._all))}

    @cached_property
    def _names(self) -> Ids:
        """The numbers in ``all_layouts`` of the layouts of each space, one space after the other."""
        return index_array(map(self.all_layouts.__getitem__, self._all))

    def _look_up(self, orders: Sequence[Order], order_ids: Ids, costs: Sequence[ReshardCosts]) -> None:
        """Concatenates the tables of layouts by placement codes, and notes where those of each port and space begin."""
        wiring = self._wiring
        tables: dict[int, tuple[Ids, int]] = {}
        spaces: dict[LayoutGraph, int] = {}
        self._looked_up, self._bases, self._named = (np.empty(wiring.node_of.size, dtype=np.intp) for _ in range(3))
        self._all: list[Layout] = []
        size = 0
        for ports in group_by(self._spaces * (order_ids.max(initial=0) + 1) + order_ids[wiring.node_of]):
            found = costs[self._spaces[ports[0]]]
            table = found.ids(orders[wiring.node_of[ports[0]]])
            if object_id(table) not in tables:
                tables[object_id(table)] = table, size
                size += table.size
            if found.space not in spaces:
                spaces[found.space] = len(self._all)
                self._all += found.space.layouts
            self._looked_up[ports], self._bases[ports] = tables[object_id(table)][1], max(table.shape, default=1)
            self._named[ports] = spaces[found.space]
        self._tables = np.concatenate([index_array(()), *(table.ravel() for table, _ in tables.values())])


def _coded(tables: Sequence[SignatureTable], numbers: Ids, wiring: Wiring) -> tuple[Ids, Ids]:
    """Returns the placement codes of all tables, concatenated, and where those of each port begin."""
    distinct = [tables[n] for n in unique_sorted(first_of(numbers)).tolist()]
    lists = [codes for table in distinct for codes in table.codes]
    begins = np.cumsum([0, *(codes.size for codes in lists)])
    first = np.cumsum([0, *(len(table.codes) for table in distinct)])[numbers]
    return np.concatenate(lists or [index_array(())]), begins[ranges(first, wiring.port_counts)]
