"""Everything that a search reads: what each node and value costs in each state, under pins, as arrays.

A state of a node is one row per mesh axis. Nodes of equal operations share their arrays, and so do values of equal
shape: a model of a hundred equal layers has the tables of one.

With three mesh axes or more, the joint states are too many to consider together. A *restricted* view has only the
states and layouts near a plan, so that a search moves from neighbourhood to neighbourhood. Views share all tables;
other views have other prices of memory, other axes, or collectives that overlap with compute.

In reading order: pin masks; prices of memory; reshard costs by value; ``Model``.
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
from meshdsl.planner.costs.fixed_point import FixedPoint, scale_costs, weight_of
from meshdsl.planner.costs.op_cost import SignatureTable, first_state, known_table
from meshdsl.planner.costs.reshard_cost import (
    Axes,
    Groups,
    LayoutDomain,
    LayoutDomains,
    OverlapWindow,
    ReshardCosts,
    SharedLatency,
    Surcharge,
    known_costs,
    neighbourhood,
)
from meshdsl.planner.limits import DEFAULT_LIMITS, SearchLimits
from meshdsl.planner.problem.build import Problem
from meshdsl.planner.problem.layers import RepeatedLayers, layers_of
from meshdsl.planner.problem.ports import End, Ports
from meshdsl.planner.problem.variables import Node, NodeClasses, OpClass, map_classes
from meshdsl.util.arrays import Costs, Ids, group_by, index_array, intern_ids, object_id, row_ids, unique_sorted
from meshdsl.util.runtime import Deadline

# ---- Pin masks -------------------------------------------------------------------------------------------------------
# The domain of a node: its joint states that meet its pin, required splits, and requested rows.


def first_allowed(table: SignatureTable, allowed: "NDArray[np.bool_] | None") -> tuple[int, ...]:
    """Returns a state in the node's domain: the replicated one if it is in it."""
    return table.first_feasible if allowed is None else first_state(np.isfinite(table.seconds) & allowed)


def has_states(table: SignatureTable, allowed: "NDArray[np.bool_] | None") -> bool:
    """Whether the domain has a state whose dims divide."""
    return allowed is None or bool((allowed & np.isfinite(table.seconds)).any())


def require_states(nodes: Sequence[Node], has_state: Sequence[bool]) -> None:
    """Raises PinError, listing all faults, unless every node has a state."""
    bad = [node for node, has in zip(nodes, has_state, strict=True) if not has]
    rows = [f"{node.label}: pinned to {node.pin}, shape {list(node.ports[0].value.shape)}" for node in bad]
    if rows:
        remedy = "a split must divide its dim, and a value is partial in one way only: pin another layout"
        raise PinError(faults("no signature meets these pins:", rows, remedy))


def pin_mask(node: Node, mesh: Mesh) -> "NDArray[np.bool_] | None":
    """Returns the mask of the joint states that meet the node's restrictions; None if it has none."""
    split = (name for _, axes in node.split for name in axes)
    if (
        not node.requested
        and not node.manual
        and not any(name in mesh.names and mesh.axis(name) > 1 for name in (*node.pin.axes, *split))
    ):
        return None
    masks = [_axis_mask(node, name, mesh) for name in mesh.names]
    found = masks[0]
    for mask in masks[1:]:
        found = np.logical_and.outer(found, mask)
    return found


def _axis_mask(node: Node, axis: str, mesh: Mesh) -> NDArray[np.bool_]:
    free = axis not in node.pin.axes or mesh.axis(axis) == 1
    pinned = np.array([free or row.outputs[0] is node.pin.on(axis) for row in node.rows])
    ports = [p for p, axes in node.split if axis in axes]
    split = np.array([all(isinstance(row.outputs[p], Split) for p in ports) for row in node.rows])
    permitted = np.array([node.allows(row, axis) for row in node.rows])
    return np.asarray(pinned & split & permitted)


def node_order(node: Node, mesh: Mesh) -> tuple[str, ...]:
    """Returns the order in which axes split one dim of a node's tensors: manual axes first, as their spec says."""
    first = [axis for axis, row in node.manual if any(isinstance(placed, Split) for placed in row.outputs)]
    return (*first, *(axis for axis in axis_order(node.pin, mesh) if axis not in first))


def axis_order(pin: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Returns the order in which axes split one dim: mesh order, except for axes that the pin has in another one."""
    pinned = [name for name in pin.axes if name in mesh.names and isinstance(pin.on(name), Split)]
    at = iter(pinned)
    return tuple(next(at) if name in pinned else name for name in mesh.names)


def is_refinement(pins: Pins, others: Pins, mesh: Mesh) -> bool:
    """Whether every plan that meets ``pins`` meets ``others``."""
    mine, theirs = (*pins.inputs, *pins.outputs), (*others.inputs, *others.outputs)
    same_structure = (pins.follows, pins.donated) == (others.follows, others.donated)
    return same_structure and all(_refines(pin, other, mesh) for pin, other in zip(mine, theirs, strict=True))


def _refines(pin: Layout, other: Layout, mesh: Mesh) -> bool:
    if pin.placements == other.placements:
        return True
    agrees = set(other.axes) <= set(pin.axes) and all(pin.on(axis) is placed for axis, placed in other.placements)
    return agrees and axis_order(pin, mesh) == axis_order(other, mesh)


# ---- Prices of memory ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prices:
    """Shadow prices of memory, in seconds per byte; ends are (node, port).

    Args:
      own_layout: by value id, for the value in the layout of its producer.
      copy: by end, for the copy that this consumer uses.
      waiting: by end, for a value that waits for this consumer, in its own layout or another.
      path_copy: by end, for some copy on the reshard path to this consumer that earlier consumers left behind.
      path_copy_unless: by end, the price of such a copy unless another consumer uses it meanwhile; and that end.
      resident: by end, the price of bytes that every plan holds, and their number in every joint state.
    """

    own_layout: dict[int, float] = field(default_factory=dict)
    copy: dict[tuple[int, int], float] = field(default_factory=dict)
    waiting: dict[tuple[int, int], float] = field(default_factory=dict)
    path_copy: dict[tuple[int, int], float] = field(default_factory=dict)
    path_copy_unless: dict[tuple[int, int], tuple[float, tuple[int, int]]] = field(default_factory=dict)
    resident: dict[tuple[int, int], tuple[float, Costs]] = field(default_factory=dict)


# ---- Reshard costs by value ------------------------------------------------------------------------------------------


Known = dict[Hashable, ReshardCosts]  # by everything that they depend on
Relief = OverlapWindow | SharedLatency
_NO_RELIEF: Mapping[int, Relief] = MappingProxyType({})


class ReshardCostsByValue:
    """Reshard costs of values, by their ids.

    Args:
      distinct: the objects, each once.
      index_of: [largest value id + 1], the position of each value's among these.
    """

    def __init__(self, distinct: Sequence[ReshardCosts], index_of: Ids) -> None:
        self.distinct, self.index_of = tuple(distinct), index_of
        self._each: list[int] = index_of.tolist()

    def __getitem__(self, value: int) -> ReshardCosts:
        return self.distinct[self._each[value]]


class ReshardCostTable:
    """Builds reshard costs; values of equal type that can be partial in the same ways share them.

    Args:
      problem: whose values.
      classes: of its nodes.
      tables: per node.
      scale: of costs.
    """

    def __init__(
        self, problem: Problem, classes: NodeClasses, tables: Sequence[SignatureTable], scale: FixedPoint
    ) -> None:
        self._problem, self._scale = problem, scale
        self._partial = _partial_ways(problem, classes, tables)

    def by_value(self, known: Known, relief: Mapping[int, Relief] = _NO_RELIEF) -> ReshardCostsByValue:
        """Returns the reshard costs of every value.

        Args:
          known: from earlier calls; new ones are added.
          relief: by value id, what makes its collectives cheaper.
        """
        index, wiring = self._problem.index, self._problem.wiring
        values = np.flatnonzero(wiring.producer >= 0)
        ids = wiring.value_ids[wiring.producer[values]]
        split, relieved, manual, rounded = (np.zeros(wiring.producer.size, dtype=np.intp) for _ in range(4))
        restricted = (
            (split, self._problem.always_split),
            (relieved, relief),
            (manual, self._problem.manual),
            (rounded, self._problem.formats),
        )
        for column, by_value in restricted:
            column[index.numbers_of(by_value)] = 1 + intern_ids(by_value.values())
        unsent = self._problem.unsent.astype(np.intp)
        columns = index.shape, index.dtype, self._partial, unsent, split, relieved, manual, rounded
        key = row_ids([column[values] for column in columns])
        _, once, equal = np.unique(key, return_index=True, return_inverse=True)
        found = [self._costs_of(number, known, relief) for number in values[once].tolist()]
        every = list(dict.fromkeys(found))
        of = np.full(int(ids.max(initial=-1)) + 1, -1)
        of[ids] = index_array(map(every.index, found))[equal]
        return ReshardCostsByValue(every, of)

    def _costs_of(self, number: int, known: Known, relief: Mapping[int, Relief]) -> ReshardCosts:
        problem, value = self._problem, self._problem.index.values[number]
        ways = tuple(way for i, way in enumerate(REDUCTIONS) if self._partial[number] >> i & 1)
        communicates, split = not problem.unsent[number], problem.always_split.get(value.id, ())
        alone = relief.get(value.id), problem.manual.get(value.id, ()), problem.formats.get(value.id, ())
        full = (value.shape, value.itemsize, ways, self._scale, communicates, split, *alone)
        if full not in known:
            known[full] = known_costs(problem.mesh, *full)
        return known[full]


def _partial_ways(problem: Problem, classes: NodeClasses, tables: Sequence[SignatureTable]) -> Ids:
    """Returns, per value, the reductions in which some node produces or consumes it partial, a bit each."""
    wiring, found = problem.wiring, np.zeros(problem.wiring.producer.size, dtype=np.intp)
    for nodes in group_by(classes.intern(lambda n: object_id(tables[n]))):
        for p, ways in tables[nodes[0]].partial_ports:
            bits = sum(1 << i for i, reduction in enumerate(REDUCTIONS) if reduction in ways)
            np.bitwise_or.at(found, wiring.value_of[wiring.first_port[nodes] + p], bits)
    return found


# ---- Model -----------------------------------------------------------------------------------------------------------


Assignment = NDArray[np.intp]  # [nodes, mesh axes] -> row
State = tuple[int, ...]  # a row per mesh axis
Shares = Mapping[End, float]
NO_SHARES: Shares = MappingProxyType({})


@dataclass
class SearchHints:
    """What one search learned for later ones, at other prices or pins; all views of a model share it.

    Attributes:
      weigh_layers: whether messages gave the better plan where the layers of a reduced step cost as much as all layers
        that they represent together (``NetworkBuilder.reduced_plans``).
    """

    weigh_layers: bool = False


class Model:
    """A problem as arrays, or a view of it.

    Args:
      problem: the nodes and their wiring.
      deadline: of searches; None for none.
      limits: of everything that works on the model.

    Attributes:
      axes, width: the mesh axes, and their number.
      tables: per node, costs and placement codes of its rows.
      scale: of costs, set from the cost of a fully replicated plan whatever the pins.
      allowed: per node, the mask of its domain; None for all states.
      orders: per node, the order of axes that split one dim.
      unary: per node, exact costs in every joint state; infinite outside of its domain.
      first_states: [nodes, mesh axes], a feasible plan, replicated as far as pins allow.
      reshard_costs: by value.
      prices: of memory.
      unrestricted: whether all states are considered, and reshard paths may pass all layouts.
      states: per node, [states, mesh axes], the states that are considered.
      representative: per node, the first with equal table, pins and states.
      hints: shared by all views.
      unshared: by consumer's end, the part of a latency that reshards to it pay, whatever relief their values have.
      exact: by the end of a consumer to which a value that may be rounded is sent in full, the part of what this costs.
    """

    def __init__(
        self, problem: Problem, deadline: Deadline | None = None, limits: SearchLimits = DEFAULT_LIMITS
    ) -> None:
        self.mesh, self.axes, self.deadline = problem.mesh, problem.mesh.names, deadline or Deadline()
        self.limits = limits
        self.width = len(self.axes)
        self._set_problem(problem)
        self._tables: dict[Hashable, SignatureTable] = {}
        self._known_costs: Known = {}
        self.tables = self._classes.map(lambda n: self._table(self.nodes[n].op_class))
        seconds = self._classes.map(lambda n: self.tables[n].replicated_seconds * self.nodes[n].weight)
        self.scale = FixedPoint.of(sum(seconds))
        self._reshards = ReshardCostTable(problem, self._classes, self.tables, self.scale)
        self.reshard_costs = self._reshards.by_value(self._known_costs)
        self._known_unary: dict[Hashable, Costs] = {}
        self._finite: dict[int, Assignment] = {}  # by the identity of unary costs, which the line above keeps alive
        self._domains = LayoutDomains()
        self.hints, self.unshared, self.exact = SearchHints(), NO_SHARES, self._exact_ends()
        self._set_pins()

    def repinned(self, problem: Problem) -> "Model":
        """Returns a model of the same problem under other pins (see ``repin``), which shares the tables."""
        other = copy(self)
        other.deadline, other.hints = Deadline(), copy(self.hints)
        other._set_problem(problem, self._classes)
        other._set_pins()
        return other

    def for_thread(self) -> "Model":
        """Returns an unrestricted copy with memo tables of its own, so that another thread may use it."""
        other = copy(self)
        other._known_unary, other._finite, other._domains = (
            dict(self._known_unary),
            dict(self._finite),
            LayoutDomains(),
        )
        other.hints = copy(self.hints)
        other._unrestrict()
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
        other._known_costs = {old: costs[old] for old in self.reshard_costs.distinct}
        other.reshard_costs = ReshardCostsByValue(list(other._known_costs.values()), self.reshard_costs.index_of)
        other._finite, other._domains, other.hints = {}, LayoutDomains(), SearchHints()
        other.unshared = other.exact = NO_SHARES
        other._unrestrict()
        return other

    def representatives_in(self, rows: Assignment) -> Ids:
        """Returns, per node, the first with equal table and pins that is in the same state of a plan."""
        return self._classes.representatives_in(rows)

    def class_ids(self, property_of: Callable[[int], Hashable]) -> Ids:
        """Returns, per node, a number for a property, equal for equal ones; it is computed once per class."""
        return self._classes.intern(property_of)

    def with_prices(self, prices: Prices) -> "Model":
        """Returns a view at other prices of memory."""
        other = copy(self)
        other.prices = prices
        return other

    def with_relief(self, relief: Mapping[int, Relief]) -> "Model":
        """Returns an unrestricted view in which collectives of some values, given by their ids, are cheaper."""
        other = copy(self)
        other._known_costs, other.hints = dict(self._known_costs), copy(self.hints)
        other.reshard_costs = self._reshards.by_value(other._known_costs, relief)
        other.__dict__.pop("spaces", None)
        other._unrestrict()
        return other

    def with_unshared(self, unshared: Shares) -> "Model":
        """Returns a view in which the reshards to some consumers pay a part of their latencies all the same."""
        other = copy(self)
        other.unshared = unshared
        return other

    @property
    def surcharges(self) -> tuple[tuple[Surcharge, Shares], ...]:
        """What reshards to some consumers cost beyond their prices, and which part of it each of these pays."""
        both: tuple[tuple[Surcharge, Shares], ...] = ("unshared", self.unshared), ("exact", self.exact)
        return tuple((what, ends) for what, ends in both if ends)

    def _exact_ends(self) -> Shares:
        uses, wiring = self.problem.exact, self.wiring
        ports = wiring.port_of_use[self.problem.index.use_numbers((x.op.id, x.operand) for x in uses)]
        each = zip(wiring.ends_at(ports), ports.tolist(), uses, strict=True)
        return {end: use.share for end, port, use in each if port >= 0}

    def _set_problem(self, problem: Problem, like: NodeClasses | None = None) -> None:
        self.problem, self.nodes, self._classes = problem, problem.nodes, NodeClasses(problem.nodes, like)
        self.wiring = problem.wiring

    def _set_pins(self) -> None:
        each = self._classes.map
        self.allowed = each(lambda n: pin_mask(self.nodes[n], self.mesh))
        self.orders = each(lambda n: node_order(self.nodes[n], self.mesh))
        require_states(self.nodes, each(lambda n: has_states(self.tables[n], self.allowed[n])))
        self.unary = each(self._unary_costs)
        first = each(lambda n: first_allowed(self.tables[n], self.allowed[n]))
        self.first_states: Assignment = np.array(first, dtype=np.intp).reshape(-1, self.width)
        self._unrestrict()

    def _unrestrict(self) -> None:
        self.prices = Prices()
        self._states: dict[Hashable, Assignment] = {}
        self._ports: Ports | None = None
        self.unrestricted = True
        self.states, self.representative = self._classes.map(self._all_states), self._classes.representative
        self.__dict__.pop("domains", None)

    @cached_property
    def domains(self) -> dict[ReshardCosts, LayoutDomain]:
        """By reshard costs, the layouts of values: all of them, or fewer in a restricted view."""
        return self._domains.full(self._known_costs.values(), len(self.parallel_axes) <= 2)

    def restricted(self, groups: Groups, around: Assignment) -> "Model":
        """Returns a view of the model with only the states and layouts near a plan.

        Args:
          groups: mesh axes that take a row together; the others stay as they are.
          around: the plan, which is among the states.
        """
        other = self._view()
        other.representative = self._classes.representatives_in(around)
        other.states = map_classes(
            other.representative, lambda n: self._states_near(n, groups, tuple(around[n].tolist()))
        )
        other.domains = self._domains.neighbourhood(other._considered_layouts(), groups)
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
        other.states, other.representative, other.domains = [], index_array(()), self._domains.of_plan(used)
        return other

    def _view(self) -> "Model":
        assert self.ports is not None  # built once for all views
        other = copy(self)
        other.unrestricted = False
        return other

    def release_domains(self) -> None:
        """Drops the domains of layouts, which are large on many axes, until they are read again."""
        self.__dict__.pop("domains", None)
        self._domains.release()

    def domain(self, value: int) -> LayoutDomain:
        """Returns the layouts of a value that are considered, with the reshard costs between them."""
        return self.domains[self.reshard_costs[value]]

    def _all_states(self, n: int) -> Assignment:
        """Returns the states of node ``n`` with finite cost; one object for equal costs."""
        unit = self.unary[n]
        if object_id(unit) not in self._finite:
            self._finite[object_id(unit)] = np.argwhere(np.isfinite(unit))
        return self._finite[object_id(unit)]

    def _states_near(self, n: int, groups: Groups, around: State) -> Assignment:
        """Returns the states of node ``n`` near one; one object for equal arguments."""
        every = self._all_states(n)
        key = (object_id(every), groups, around)
        if key not in self._states:
            self._states[key] = every[neighbourhood(every, groups, np.array(around))]
        return self._states[key]

    def _considered_layouts(self) -> dict[ReshardCosts, Ids]:
        """Returns the layouts that values have in the states considered, at producers and consumers."""
        wiring, spaces, found = self.wiring, self.spaces, defaultdict[ReshardCosts, list[Ids]](list)
        places = np.arange(wiring.node_of.size) - wiring.first_port[wiring.node_of]
        key = (self.representative[wiring.node_of] * (places.max() + 1) + places) * (spaces.max() + 1) + spaces
        for port in np.unique(key, return_index=True)[1].tolist():
            n = int(wiring.node_of[port])
            layouts = self.layout_numbers(n, int(places[port]), self.states[n].T)
            found[self.reshard_costs.distinct[spaces[port]]].append(layouts)
        return {d: unique_sorted(np.concatenate(layouts)) for d, layouts in found.items()}

    @cached_property
    def spaces(self) -> Ids:
        """[ports], which of ``reshard_costs.distinct`` is that of the value."""
        return self.reshard_costs.index_of[self.wiring.value_ids]

    def _unary_costs(self, n: int) -> Costs:
        """Returns exact costs in every joint state, infinite outside of the domain; one object for equal nodes."""
        node, table, allowed = self.nodes[n], self.tables[n], self.allowed[n]
        restrictions = (node.pin, node.split, node.requested, node.manual) if allowed is not None else ()
        key = (object_id(table), node.weight, restrictions)
        if key not in self._known_unary:
            cost = self.scale.pack(scale_costs(table.seconds, node.weight))
            self._known_unary[key] = cost if allowed is None else np.where(allowed, cost, np.inf)
        return self._known_unary[key]

    def layout_ids(self, n: int, port: int, rows: NDArray[np.intp]) -> Ids:
        """Returns a port's layout in joint states, [mesh axes, states] or one, by index in the value's domain."""
        codes = self.tables[n].codes[port]
        ids = self.domains[self.port_costs((n, port))].ids(self.orders[n])
        return np.asarray(ids[tuple(codes[r] for r in rows)])

    def layout_numbers(self, n: int, port: int, rows: NDArray[np.intp]) -> Ids:
        """Returns the same by number among all layouts."""
        codes = self.tables[n].codes[port]
        ids = self.port_costs((n, port)).ids(self.orders[n])
        return np.asarray(ids[tuple(codes[r] for r in rows)])

    def port_costs(self, end: End) -> ReshardCosts:
        """Returns the reshard costs of the value at an end."""
        return self.reshard_costs[self.wiring.value_at(end)]

    @property
    def ports(self) -> Ports:
        """The ports of all nodes, with lookup tables of their layouts."""
        if self._ports is None:
            self._ports = Ports(
                self.wiring, self._classes, self.tables, self.orders, self.reshard_costs.distinct, self.spaces
            )
        return self._ports

    @cached_property
    def layers(self) -> RepeatedLayers:
        """The repeated layers, whatever the pins."""
        wiring = self.wiring
        ends = wiring.node_of[wiring.use_producers], wiring.node_of[wiring.uses]
        found = layers_of(self._classes.structure, *ends, self.limits)
        return RepeatedLayers(found, len(self.nodes), wiring)

    def widely_used(self, least: int) -> list[int]:
        """Returns the ids of the values with ``least`` consumers or more."""
        consumers = np.bincount(self.wiring.use_producers, minlength=self.wiring.node_of.size)
        found: list[int] = self.wiring.value_ids[consumers >= least].tolist()
        return found

    @cached_property
    def value_weights(self) -> Costs:
        """[values], by what the resharding of each counts: how often per step it happens."""
        trips = self.problem.index.trips
        return np.where(trips, trips, weight_of(0))

    @cached_property
    def port_weights(self) -> Costs:
        """[ports], the weight of the value of each."""
        return self.value_weights[self.wiring.value_of]

    def weight(self, value: int) -> float:
        """Returns the weight of a value, given by its id."""
        return float(self.value_weights[self.problem.index.number_of(value)])

    def _table(self, op_class: OpClass) -> SignatureTable:
        key = (object_id(op_class.rows), op_class.shapes, op_class.work)
        if key not in self._tables:
            self._tables[key] = known_table(op_class.rows, op_class.shapes, op_class.work, self.mesh)
        return self._tables[key]

    @cached_property
    def parallel_axes(self) -> Axes:
        """The mesh axes with more than one device."""
        return tuple(axis for axis, size in enumerate(self.mesh.sizes) if size > 1)
