"""The planning problem as arrays: what every node and every value costs in every state.

A state of a node is one row per mesh axis. Nodes with equal rows, shapes and work share their
arrays, and so do values of equal shape: a model of a hundred equal layers has the tables of one.

With three mesh axes or more the joint states are too many to look at together. A restricted
view has those near a plan: the search then moves from neighbourhood to neighbourhood.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from meshdsl.errors import PinError, faults
from meshdsl.ir.solution import Pins
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, Split
from meshdsl.planner.costs.fixed_point import FixedPoint, scale_costs
from meshdsl.planner.costs.op_cost import SignatureTable, first_state, make_table
from meshdsl.planner.costs.reshard_cost import (
    Axes,
    Groups,
    LayoutDomain,
    LayoutDomains,
    OverlapWindow,
    ReshardCosts,
    neighbourhood,
)
from meshdsl.planner.limits import DEFAULT_LIMITS, SearchLimits
from meshdsl.planner.problem.build import Problem
from meshdsl.planner.problem.layers import RepeatedLayers, layers_of
from meshdsl.planner.problem.ports import End, Ports
from meshdsl.planner.problem.variables import Node, NodeClasses, OpClass, map_classes
from meshdsl.util.arrays import Costs, Ids, group_by, index_array, intern_ids, object_id, row_ids, unique_sorted
from meshdsl.util.runtime import Deadline

# ---- Allowed ---------------------------------------------------------------------------------------------------------
# In which states a node may be by what is stated for it: pins, dims that stay split, and rows to be asked for.


def first_allowed(table: SignatureTable, allowed: "NDArray[np.bool_] | None") -> tuple[int, ...]:
    """A state that the node is allowed to be in, all-``B`` if it is."""
    return table.first_feasible if allowed is None else first_state(np.isfinite(table.seconds) & allowed)


def has_states(table: SignatureTable, allowed: "NDArray[np.bool_] | None") -> bool:
    """Whether there is a state that the node is allowed to be in, and whose dims divide."""
    return allowed is None or bool((allowed & np.isfinite(table.seconds)).any())


def require_states(nodes: Sequence[Node], fine: Sequence[bool]) -> None:
    """Every node has a joint state that its pin allows, or the pins are at fault."""
    bad = [node for node, has in zip(nodes, fine, strict=True) if not has]
    rows = [f"{node.label}: pinned to {node.pin}, shape {list(node.ports[0].value.shape)}" for node in bad]
    if rows:
        remedy = "a split divides its dim, and a value is partial in one way only: state another layout"
        raise PinError(faults("pins that no signature can meet:", rows, remedy))


def pin_mask(node: Node, mesh: Mesh) -> "NDArray[np.bool_] | None":
    """Joint states that agree with what is stated for the node; None if nothing is."""
    split = (name for _, axes in node.split for name in axes)
    if not node.requested and not any(name in mesh.names and mesh.axis(name) > 1 for name in (*node.pin.axes, *split)):
        return None
    masks = [_axis_mask(node, name, mesh) for name in mesh.names]
    found = masks[0]
    for mask in masks[1:]:
        found = np.logical_and.outer(found, mask)
    return found


def _axis_mask(node: Node, axis: str, mesh: Mesh) -> NDArray[np.bool_]:
    free = axis not in node.pin.axes or mesh.axis(axis) == 1
    stated = np.array([free or row.outputs[0] is node.pin.on(axis) for row in node.rows])
    ports = [p for p, axes in node.split if axis in axes]
    split = np.array([all(isinstance(row.outputs[p], Split) for p in ports) for row in node.rows])
    asked = np.array([node.allows(row, axis) for row in node.rows])
    return np.asarray(stated & split & asked)


def axis_order(pin: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Mesh order, but for axes that the pin states in another order."""
    stated = [name for name in pin.axes if name in mesh.names and isinstance(pin.on(name), Split)]
    at = iter(stated)
    return tuple(next(at) if name in stated else name for name in mesh.names)


def is_refinement(pins: Pins, others: Pins, mesh: Mesh) -> bool:
    """Whether whatever ``pins`` allow is allowed by others as well."""
    mine, theirs = (*pins.inputs, *pins.outputs), (*others.inputs, *others.outputs)
    alike = (pins.follows, pins.donated) == (others.follows, others.donated)
    return alike and all(_stays(pin, other, mesh) for pin, other in zip(mine, theirs, strict=True))


def _stays(pin: Layout, other: Layout, mesh: Mesh) -> bool:
    if pin.placements == other.placements:
        return True
    stated = set(other.axes) <= set(pin.axes) and all(pin.on(axis) is placed for axis, placed in other.placements)
    return stated and axis_order(pin, mesh) == axis_order(other, mesh)


# ---- Prices ----------------------------------------------------------------------------------------------------------
# What memory costs while a plan that fits is looked for.


@dataclass(frozen=True)
class Prices:
    """Seconds per byte that memory costs: by value for its own layout, by (node, port) for copies.

    Args:
      waiting: by (node, port), for a value that waits to be read, in the layout in which it is made or another.
      path_copy: by (node, port), for some copy of a value on the way there.
      path_copy_unless: by (node, port), the price of such a copy that another end does not take meanwhile.
      resident: by (node, port), the price of bytes that are there whatever the plan, and how many in every joint state.
    """

    own_layout: dict[int, float] = field(default_factory=dict)
    copy: dict[tuple[int, int], float] = field(default_factory=dict)
    waiting: dict[tuple[int, int], float] = field(default_factory=dict)
    path_copy: dict[tuple[int, int], float] = field(default_factory=dict)
    path_copy_unless: dict[tuple[int, int], tuple[float, tuple[int, int]]] = field(default_factory=dict)
    resident: dict[tuple[int, int], tuple[float, Costs]] = field(default_factory=dict)


# ---- Reshards --------------------------------------------------------------------------------------------------------
# What moving every value costs: values of equal shape, partial in the same ways, share the prices.


Known = dict[Hashable, ReshardCosts]  # by all that they depend on
_HIDDEN: Mapping[int, OverlapWindow] = MappingProxyType({})


class ReshardCostsByValue:
    """The distances of values, given by their ids.

    Args:
      distinct: that there are, each once. index_of: per value id, the number of its own.
    """

    def __init__(self, every: Sequence[ReshardCosts], of: Ids) -> None:
        self.distinct, self.index_of = tuple(every), of
        self._each: list[int] = of.tolist()

    def __getitem__(self, value: int) -> ReshardCosts:
        return self.distinct[self._each[value]]


class ReshardCostTable:
    """The distances between the layouts of a problem's values.

    Args:
      twins: the nodes. tables: by node.
    """

    def __init__(
        self, problem: Problem, twins: NodeClasses, tables: Sequence[SignatureTable], scale: FixedPoint
    ) -> None:
        self._problem, self._scale = problem, scale
        self._partial = _partial(problem, twins, tables)

    def by_value(self, known: Known, hidden: Mapping[int, OverlapWindow] = _HIDDEN) -> ReshardCostsByValue:
        """The distances of every value; new ones are added to those that are known.

        Args:
          hidden: by value id, what of its moves costs less.
        """
        numbers, wiring = self._problem.index, self._problem.wiring
        values = np.flatnonzero(wiring.producer >= 0)
        ids = wiring.value_ids[wiring.producer[values]]
        apart, less = np.zeros(wiring.producer.size, dtype=np.intp), np.zeros(wiring.producer.size, dtype=np.intp)
        for column, stated in ((apart, self._problem.always_split), (less, hidden)):
            column[numbers.numbers_of(stated)] = 1 + intern_ids(stated.values())
        unsent = self._problem.unsent.astype(np.intp)
        said = row_ids(
            [column[values] for column in (numbers.shape, numbers.dtype, self._partial, unsent, apart, less)]
        )
        _, once, alike = np.unique(said, return_index=True, return_inverse=True)
        found = [self._distances(number, known, hidden) for number in values[once].tolist()]
        every = list(dict.fromkeys(found))
        of = np.full(int(ids.max(initial=-1)) + 1, -1)
        of[ids] = index_array(map(every.index, found))[alike]
        return ReshardCostsByValue(every, of)

    def _distances(self, number: int, known: Known, hidden: Mapping[int, OverlapWindow]) -> ReshardCosts:
        """Those of one value."""
        problem, value = self._problem, self._problem.index.values[number]
        ways = tuple(way for i, way in enumerate(REDUCTIONS) if self._partial[number] >> i & 1)
        sent, apart, less = not problem.unsent[number], problem.always_split.get(value.id, ()), hidden.get(value.id)
        full = (value.shape, value.itemsize, ways, self._scale, sent, apart, less)
        if full not in known:
            known[full] = ReshardCosts(problem.mesh, *full)
        return known[full]


def _partial(problem: Problem, twins: NodeClasses, tables: Sequence[SignatureTable]) -> Ids:
    """Per value, by number, the reductions in which some node makes or reads it, a bit each."""
    wiring, found = problem.wiring, np.zeros(problem.wiring.producer.size, dtype=np.intp)
    for nodes in group_by(twins.intern(lambda n: object_id(tables[n]))):
        for p, ways in tables[nodes[0]].partial_ports:
            bits = sum(1 << i for i, reduction in enumerate(REDUCTIONS) if reduction in ways)
            np.bitwise_or.at(found, wiring.value_of[wiring.first_port[nodes] + p], bits)
    return found


# ---- Model -----------------------------------------------------------------------------------------------------------


Assignment = NDArray[np.intp]  # [nodes, mesh axes] -> row
State = tuple[int, ...]  # a row per mesh axis


@dataclass
class SearchHints:
    """Notes of one search that later ones start from; all views of a model share them.

    Attributes:
      weigh_layers: whether the layers of a reduced step cost as much as all layers that they represent together.
    """

    weigh_layers: bool = False


class Model:
    """Arrays of a problem; ``scale`` is set from the cost of doing everything everywhere, whatever the pins.

    ``units``: exact costs of each node in every joint state, pins included. ``width``: number of mesh axes.
    """

    def __init__(self, problem: Problem, clock: Deadline | None = None, limits: SearchLimits = DEFAULT_LIMITS) -> None:
        self.mesh, self.axes, self.deadline = problem.mesh, problem.mesh.names, clock or Deadline()
        self.limits = limits
        self.width = len(self.axes)
        self._take(problem)
        self._tables: dict[Hashable, SignatureTable] = {}
        self._distances: Known = {}
        self.tables = self._twins.map(lambda n: self._table(self.nodes[n].op_class))
        seconds = self._twins.map(lambda n: self.tables[n].replicated_seconds * self.nodes[n].trips)
        self.scale = FixedPoint.of(sum(seconds))
        self._reshards = ReshardCostTable(problem, self._twins, self.tables, self.scale)
        self.reshard_costs = self._reshards.by_value(self._distances)
        self._known_units: dict[Hashable, Costs] = {}
        self._finite: dict[int, Assignment] = {}  # by the identity of what the line above keeps
        self._closures = LayoutDomains()
        self.hints = SearchHints()
        self._pin()

    def repinned(self, problem: Problem) -> "Model":
        """The model of the same problem under other pins (see ``repin``), which shares its tables."""
        other = copy(self)
        other.deadline, other.hints = Deadline(), copy(self.hints)
        other._take(problem, self._twins)
        other._pin()
        return other

    def for_thread(self) -> "Model":
        """The same model with prices and states in question of its own, so that another thread may ask it."""
        other = copy(self)
        other._known_units, other._finite, other._closures = (
            dict(self._known_units),
            dict(self._finite),
            LayoutDomains(),
        )
        other.hints = copy(self.hints)
        other._begin()
        return other

    def on_axes(self, axes: Axes, unary: Sequence[Costs], costs: Mapping[ReshardCosts, ReshardCosts]) -> "Model":
        """Returns a view on some of the mesh axes, at other costs and without memory prices.

        Args:
          axes: by number.
          unary: costs of each node in every joint state on these axes, one object for equal nodes.
          costs: by the present reshard costs, those in their place.
        """
        other = copy(self)
        other.axes, other.width = tuple(self.axes[axis] for axis in axes), len(axes)
        other.orders, other.unary = [other.axes] * len(self.nodes), list(unary)
        other.first_states = self.first_states[:, axes]
        other._distances = {old: costs[old] for old in self.reshard_costs.distinct}
        other.reshard_costs = ReshardCostsByValue(list(other._distances.values()), self.reshard_costs.index_of)
        other._finite, other._closures, other.hints = {}, LayoutDomains(), SearchHints()
        other._begin()
        return other

    def representatives_in(self, rows: Assignment) -> Ids:
        """Per node, the first with equal tables and pins that is in the same state of a plan."""
        return self._twins.representatives_in(rows)

    def class_ids(self, said: Callable[[int], Hashable]) -> Ids:
        """Per node, a number for what is said of it, the same for what is equal; twins are asked about once."""
        return self._twins.intern(said)

    def with_prices(self, prices: Prices) -> "Model":
        """The same model at other prices, with the same states in question."""
        other = copy(self)
        other.prices = prices
        return other

    def with_overlap(self, hidden: Mapping[int, OverlapWindow]) -> "Model":
        """The model of the same problem in which moves of some values, given by their ids, cost less."""
        other = copy(self)
        other._distances, other.hints = dict(self._distances), copy(self.hints)
        other.reshard_costs = self._reshards.by_value(other._distances, hidden)
        other.__dict__.pop("spaces", None)
        other._begin()
        return other

    def _take(self, problem: Problem, like: NodeClasses | None = None) -> None:
        self.problem, self.nodes, self._twins = problem, problem.nodes, NodeClasses(problem.nodes, like)
        self.wiring = problem.wiring

    def _pin(self) -> None:
        each = self._twins.map
        self.allowed = each(lambda n: pin_mask(self.nodes[n], self.mesh))
        self.orders = each(lambda n: axis_order(self.nodes[n].pin, self.mesh))
        require_states(self.nodes, each(lambda n: has_states(self.tables[n], self.allowed[n])))
        self.unary = each(self._unit)
        first = each(lambda n: first_allowed(self.tables[n], self.allowed[n]))
        self.first_states: Assignment = np.array(first, dtype=np.intp).reshape(-1, self.width)
        self._begin()

    def _begin(self) -> None:
        self.prices = Prices()
        self._states: dict[Hashable, Assignment] = {}
        self._ports: Ports | None = None
        self.unrestricted = True
        self.states, self.representative = self._twins.map(self._every), self._twins.representative
        self.__dict__.pop("domains", None)

    @cached_property
    def domains(self) -> dict[ReshardCosts, LayoutDomain]:
        """By reshard costs, the layouts of values: all of them, or fewer in a restricted view."""
        return self._closures.full(self._distances.values(), len(self.parallel_axes) <= 2)

    def restricted(self, groups: Groups, around: Assignment) -> "Model":
        """Returns a view of the model with only the states and layouts near a plan.

        Args:
          groups: mesh axes that take a row together; the others stay as they are.
          around: the plan, which is among the states.
        """
        other = self._view()
        other.representative = self._twins.representatives_in(around)
        other.states = map_classes(other.representative, lambda n: self._left(n, groups, tuple(around[n].tolist())))
        other.domains = self._closures.neighbourhood(other._read_layouts(), groups)
        return other

    def restricted_to_plan(self, plan: Assignment) -> "Model":
        """Returns a view with the layouts of a plan, reshard paths through those near them, and no states."""
        layouts = self.ports.layouts(plan)
        most = int(layouts.max(initial=0)) + 1
        is_used = np.zeros(len(self.reshard_costs.distinct) * most, dtype=np.bool_)
        is_used[self.spaces * most + layouts] = True
        spaces, layouts = np.divmod(np.flatnonzero(is_used), most)
        used = ((self.reshard_costs.distinct[spaces[some[0]]], layouts[some]) for some in group_by(spaces))
        other = self._view()
        other.states, other.representative, other.domains = [], index_array(()), self._closures.of_plan(used)
        return other

    def _view(self) -> "Model":
        assert self.ports is not None  # built once for all views
        other = copy(self)
        other.unrestricted = False
        return other

    def release_domains(self) -> None:
        """Drops the domains of layouts, which are large on many axes, until they are read again."""
        self.__dict__.pop("domains", None)
        self._closures.release()

    def domain(self, value: int) -> LayoutDomain:
        """The layouts of a value that are in question, and what moves between them cost."""
        return self.domains[self.reshard_costs[value]]

    def _every(self, n: int) -> Assignment:
        """The states that node ``n`` can be in; equal questions get the same array."""
        unit = self.unary[n]
        if object_id(unit) not in self._finite:
            self._finite[object_id(unit)] = np.argwhere(np.isfinite(unit))
        return self._finite[object_id(unit)]

    def _left(self, n: int, groups: Groups, around: State) -> Assignment:
        """Those of them near a state."""
        every = self._every(n)
        key = (object_id(every), groups, around)
        if key not in self._states:
            self._states[key] = every[neighbourhood(every, groups, np.array(around))]
        return self._states[key]

    def _read_layouts(self) -> dict[ReshardCosts, Ids]:
        """The layouts that the states in question make or read."""
        wiring, spaces, found = self.wiring, self.spaces, defaultdict[ReshardCosts, list[Ids]](list)
        places = np.arange(wiring.node_of.size) - wiring.first_port[wiring.node_of]
        asked = (self.representative[wiring.node_of] * (places.max() + 1) + places) * (spaces.max() + 1) + spaces
        for port in np.unique(asked, return_index=True)[1].tolist():
            n = int(wiring.node_of[port])
            layouts = self.layout_numbers(n, int(places[port]), self.states[n].T)
            found[self.reshard_costs.distinct[spaces[port]]].append(layouts)
        return {d: unique_sorted(np.concatenate(layouts)) for d, layouts in found.items()}

    @cached_property
    def spaces(self) -> Ids:
        """Per port, a number for the layouts of its value and what moving between them costs."""
        return self.reshard_costs.index_of[self.wiring.value_ids]

    def _unit(self, n: int) -> Costs:
        """Exact cost of a node in every joint state, pins included; equal questions get the same array."""
        node, table, allowed = self.nodes[n], self.tables[n], self.allowed[n]
        stated = (node.pin, node.split, node.requested) if allowed is not None else ()
        key = (object_id(table), node.trips, stated)
        if key not in self._known_units:
            cost = self.scale.pack(scale_costs(table.seconds, node.trips))
            self._known_units[key] = cost if allowed is None else np.where(allowed, cost, np.inf)
        return self._known_units[key]

    def layout_ids(self, n: int, port: int, rows: NDArray[np.intp]) -> Ids:
        """Place in its closure of a port's layout in a joint state, or in several ([mesh axes, states])."""
        codes = self.tables[n].codes[port]
        ids = self.domains[self.port_costs((n, port))].ids(self.orders[n])
        return np.asarray(ids[tuple(codes[r] for r in rows)])

    def layout_numbers(self, n: int, port: int, rows: NDArray[np.intp]) -> Ids:
        """As ``layout_ids``, as numbers among all layouts."""
        codes = self.tables[n].codes[port]
        ids = self.port_costs((n, port)).ids(self.orders[n])
        return np.asarray(ids[tuple(codes[r] for r in rows)])

    def port_costs(self, end: End) -> ReshardCosts:
        """Of the layouts of a port."""
        return self.reshard_costs[self.wiring.value_at(end)]

    @property
    def ports(self) -> Ports:
        """The tensors of all nodes, laid out when they are first asked for."""
        if self._ports is None:
            self._ports = Ports(
                self.wiring, self._twins, self.tables, self.orders, self.reshard_costs.distinct, self.spaces
            )
        return self._ports

    @cached_property
    def layers(self) -> RepeatedLayers:
        """Equal layers, whatever the pins."""
        wiring = self.wiring
        found = layers_of(self._twins.structure, wiring.node_of[wiring.use_producers], wiring.node_of[wiring.uses])
        return RepeatedLayers(found, len(self.nodes), wiring)

    def widely_used(self, least: int) -> list[int]:
        """The ids of the values that so many read at least."""
        readers = np.bincount(self.wiring.use_producers, minlength=self.wiring.node_of.size)
        found: list[int] = self.wiring.value_ids[readers >= least].tolist()
        return found

    @cached_property
    def port_trips(self) -> Ids:
        """Per port, how often the moves of its value run."""
        return self.problem.index.trips[self.wiring.value_of]

    def trips(self, value: int) -> int:
        """How often the moves of a value run, given by its id."""
        numbers = self.problem.index
        return int(numbers.trips[numbers.number_of(value)])

    def _table(self, kind: OpClass) -> SignatureTable:
        key = (object_id(kind.rows), kind.shapes, kind.work)
        if key not in self._tables:
            self._tables[key] = make_table(kind.rows, kind.shapes, kind.work, self.mesh)
        return self._tables[key]

    @cached_property
    def parallel_axes(self) -> Axes:
        """The mesh axes that have more than one device."""
        return tuple(axis for axis, size in enumerate(self.mesh.sizes) if size > 1)
