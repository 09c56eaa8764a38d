"""The objective: the exact cost of an assignment, the price of its memory, and its decoding to a ``Solution``.

An assignment takes a state of every node; its cost is

    sum over nodes of  unary cost   +   sum over values of  weight * (cheapest tree of reshard steps to all consumers)

where the tree is a minimum Steiner arborescence in the graph of layouts (``costs.steiner``). Where memory is short,
bytes have prices (``problem.model.Prices``), and an assignment also pays for what it holds.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.ir.index import Use
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B
from meshdsl.layouts.reshard import ReshardStep
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.costs.fixed_point import TIES
from meshdsl.planner.costs.op_cost import local_share
from meshdsl.planner.costs.reshard_cost import ReshardCosts, Surcharge
from meshdsl.planner.costs.steiner import Edges, steiner_tree, tree_steps
from meshdsl.planner.problem.model import Assignment, Model, Prices, Shares
from meshdsl.planner.problem.ports import End, ReshardGroup
from meshdsl.planner.problem.variables import map_classes
from meshdsl.util.arrays import Costs, Ids, group_by, index_array, intern_ids, object_id, row_ids

# ---- Copies that wait for a later consumer ---------------------------------------------------------------------------
# Of a value with a later consumer, memory holds some copy on the resharding path to it, at least the smallest one after
# the path to the other consumers has branched off:
#
#     producer [64, 64] --all-gather--> [128, 64] --slice--> [32, 64]  later consumer
#                                           |
#                                           +--> earlier consumer           held: at least [32, 64]


class ResidentCopies:
    """Sizes of the smallest copies that wait, for plans of one model; equal values are computed once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._ports: dict[tuple[End, End | None], tuple[Value, int, int | None, list[int]]] = {}
        self._elements: dict[tuple[int, Edges, int, int | None, frozenset[int]], int] = {}

    def cost(self, prices: Mapping[End, float], rows: Assignment, edges: Mapping[int, Edges]) -> float:
        """Returns the cost of the smallest copies in a plan, at a price per byte for each consumer's port."""
        if not prices:
            return 0.0
        held = np.array(self.smallest(prices.keys(), self.model.ports.layouts(rows), edges))
        return float(self.model.scale.pack(held * np.array(list(prices.values()))).sum())

    def smallest(self, ends: Iterable[End], layouts: Ids, edges: Mapping[int, Edges]) -> list[float]:
        """Returns the bytes of the smallest copy on the path to each consumer, from where it leaves the other paths.

        Args:
          layouts: of the ports in a plan.
          edges: of the plan, by value.
        """
        numbers = layouts.tolist()
        return [self._smallest(end, None, numbers, edges) for end in ends]

    def smallest_unless(self, ends: Iterable[tuple[End, End]], layouts: Ids, edges: Mapping[int, Edges]) -> list[float]:
        """Returns as ``smallest``, but 0 where another consumer can use that copy.

        Args:
          ends: each with the end of that other consumer.
        """
        numbers = layouts.tolist()
        return [self._smallest(end, other, numbers, edges) for end, other in ends]

    def _smallest(self, end: End, other: End | None, layouts: Sequence[int], edges: Mapping[int, Edges]) -> float:
        value, port, its, others = self._ports.get((end, other)) or self._ports_of(end, other)
        costs, tree = self.model.reshard_costs[value.id], edges.get(value.id, ())
        used = None if its is None else layouts[its]
        key = object_id(costs), tree, layouts[port], used, frozenset([layouts[at] for at in others])
        if key not in self._elements:
            space, sizes = costs.space, self.model.mesh.sizes_by_name
            steps = tree_steps(space, value.shape, value.itemsize, tree, costs.manual, costs.formats)
            sources = {step.after: step.before for step in steps}
            elsewhere = {layout for at in key[-1] for layout in _path_back(space.layouts[at], sources)}
            path = list(_until(elsewhere, _path_back(space.layouts[key[2]], sources)))
            is_shared = used is not None and space.layouts[used] in path
            least = min(prod(layout.local_shape(value.shape, sizes)) for layout in path)
            self._elements[key] = 0 if is_shared else least
        return float(self._elements[key] * value.itemsize)

    def _ports_of(self, end: End, other: End | None) -> tuple[Value, int, int | None, list[int]]:
        """Returns the value at an end, the ports of its consumer and of the other one, and of the remaining ones."""
        wiring = self.model.wiring
        value, its = wiring.value_at(end), other and wiring.port(other)
        port, *others = map(wiring.port, (end, *wiring.ends_of(value)[1:]))
        found = self.model.problem.index.value(value), port, its, [at for at in others if at not in (port, its)]
        self._ports[end, other] = found
        return found


def _path_back(layout: Layout, sources: Mapping[Layout, Layout]) -> Iterator[Layout]:
    """Yields a layout, the one it is made from, and so on."""
    yield layout
    while layout in sources:
        layout = sources[layout]
        yield layout


def _until(stops: set[Layout], layouts: Iterator[Layout]) -> Iterator[Layout]:
    """Yields layouts up to the first of ``stops``, with it."""
    for layout in layouts:
        yield layout
        if layout in stops:
            return


# ---- Price of memory -------------------------------------------------------------------------------------------------


def priced_nodes(model: Model) -> list[int]:
    """Returns the nodes whose states cost more at the model's prices, copies aside."""
    wiring = model.wiring
    producers = wiring.node_of[wiring.producer[model.problem.index.numbers_of(model.prices.own_layout)]].tolist()
    return sorted({*producers, *(n for n, _ in model.prices.resident)})


def memory_cost_key(model: Model, n: int) -> Hashable:
    """Returns a key of ``node_memory_cost``: it is equal for nodes with equal tables and equal keys."""
    own, resident, wiring = model.prices.own_layout, model.prices.resident, model.wiring
    produced = tuple([(p, own[value]) for p, value in wiring.defined_values(n) if value in own])
    held = [(p, *resident[n, p]) for p in range(len(wiring.ports(n))) if (n, p) in resident]
    return produced, tuple([(p, price, object_id(share)) for p, price, share in held])


def node_memory_cost(model: Model, n: int) -> Costs:
    """Returns [joint states], the cost of memory of a node; of bytes that are certainly held it is rounded down."""
    total = np.zeros_like(model.unary[n])
    for p, value in model.wiring.defined_values(n):
        if price := model.prices.own_layout.get(value, 0.0):
            tensor = model.problem.index.value(value)
            split = model.tables[n].codes[p] < len(tensor.shape)
            total += model.scale.pack(price * (local_share(model.mesh, split) * tensor.bytes))
    for p in range(len(model.wiring.ports(n))):
        if (n, p) in model.prices.resident:
            price, share = model.prices.resident[n, p]
            total += np.floor(price * share / model.scale.unit) * TIES
    return total


def _memory_cost(model: Model, prices: Prices, rows: Assignment) -> float:
    """Returns the cost of the values that an assignment produces and of the copies that it uses."""
    wiring, layouts = model.wiring, model.ports.layouts(rows)
    produced = wiring.producer[model.problem.index.numbers_of(prices.own_layout)]
    ports = np.append(produced, index_array(map(wiring.port, prices.copy)))
    price, total = np.array([*prices.own_layout.values(), *prices.copy.values()]), 0.0
    is_copy = np.arange(ports.size) >= produced.size
    held = ~is_copy | (layouts[ports] != layouts[wiring.port_producer[ports]])
    ports, price = ports[held], price[held]
    spaces, layouts = model.spaces[ports], layouts[ports]
    for same in group_by(spaces):
        costs = model.reshard_costs.distinct[spaces[same[0]]]
        size = costs.bytes * costs.shares[layouts[same]]
        total += float(model.scale.pack(price[same] * size).sum())
    return total


# ---- Cost of an assignment -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CostedPlan:
    """An assignment with its cost.

    Args:
      rows: [nodes, mesh axes], the row of each node's rule table.
      cost: exact (see ``FixedPoint``).
      edges: per value id, the edges of its resharding tree, between numbered layouts.
    """

    rows: Assignment
    cost: float
    edges: dict[int, Edges]


class Evaluator:
    """Evaluates assignments of one model; resharding trees are computed once for equal values."""

    def __init__(self, model: Model) -> None:
        self.model = model
        classes = model.class_ids(lambda n: object_id(model.unary[n]))
        same = group_by(classes)
        self._nodes = np.concatenate([index_array(()), *same])  # nodes with equal costs next to each other
        self._unary = [(model.unary[int(nodes[0])].ravel(), nodes.size) for nodes in same]
        shapes = np.array([model.unary[int(nodes[0])].shape for nodes in same], dtype=np.intp)
        shapes = shapes.reshape(-1, model.width)[classes]
        self._strides = np.ones_like(shapes)  # [nodes, mesh axes], of the flattened costs
        self._strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
        self._trees: dict[tuple[int, int, tuple[int, ...]], tuple[float, Edges]] = {}
        self._path_costs: dict[ReshardCosts, dict[tuple[int, int], float]] = defaultdict(dict)
        self._resident = ResidentCopies(model)

    def at(self, view: Model) -> "Evaluator":
        """Returns the evaluator for a view of its model, with other prices or other states; they share their tables."""
        other = copy(self)
        other.model = view
        return other

    def evaluate(self, rows: Assignment) -> CostedPlan:
        """Returns an assignment with its cost and its trees, over the layouts that the model leaves."""
        ports, weights, total = self.model.ports, self.model.port_weights, float(self._unary_costs(rows).sum())
        edges: dict[int, Edges] = {}
        layouts = ports.layouts(rows)
        total += self.surcharge(layouts)
        for group in ports.resharded(layouts):
            cost, tree = self._tree(group)
            if tree:
                total += cost * float(weights[group.producers].sum())
                edges.update(dict.fromkeys(group.values, tree))
        return CostedPlan(rows, total, edges)

    def breakdown(self, rows: Assignment) -> tuple[Costs, Costs]:
        """Returns [nodes], the cost of each, and [ports], by producing port the cost of resharding its value."""
        here = self.at(view_of_plan(self.model, rows))
        ports, weights = self.model.ports, self.model.port_weights
        nodes, reshards = np.empty(len(rows)), np.zeros(weights.size)
        nodes[self._nodes] = self._unary_costs(rows)
        for group in ports.resharded(ports.layouts(rows)):
            reshards[group.producers] = here._tree(group)[0] * weights[group.producers]
        return nodes, reshards

    def allowed(self, rows: Assignment) -> NDArray[np.bool_]:
        """Returns [nodes], whether the pins allow its state."""
        found = np.empty(len(rows), dtype=np.bool_)
        found[self._nodes] = np.isfinite(self._unary_costs(rows))
        return found

    def local_cost(self, n: int, values: Iterable[int], rows: Assignment, groups: Mapping[int, ReshardGroup]) -> float:
        """Returns the cost of a node and of resharding some values.

        Args:
          groups: the reshards of all values.
        """
        reshards = (self._tree(groups[v])[0] * self.model.weight(v) for v in values if v in groups)
        return float(self.model.unary[n][tuple(rows[n])]) + sum(reshards)

    def priced_cost(self, plan: CostedPlan) -> float:
        """Returns the cost of a plan with that of its memory at the model's prices."""
        prices = self.model.prices
        waiting = self._resident.cost(prices.path_copy, plan.rows, plan.edges)
        return plan.cost + _memory_cost(self.model, prices, plan.rows) + waiting

    def with_exact_cost(self, plan: CostedPlan) -> CostedPlan:
        """Returns the plan with every edge at the cost of the cheapest path over all layouts.

        On many mesh axes ``evaluate`` sees only the layouts near the assignment's own.
        """
        if self.model.unrestricted and len(self.model.parallel_axes) <= 2:  # these are all layouts
            return plan
        groups = list(self._edge_groups(plan.edges))
        needed = defaultdict[ReshardCosts, set[tuple[int, int]]](set)
        for costs, edges, _ in groups:
            needed[costs].update(edges)
        for costs, pairs in needed.items():
            self._compute_paths(costs, pairs - self._path_costs[costs].keys())
        reshards = (sum(map(self._path_costs[costs].__getitem__, edges)) * weight for costs, edges, weight in groups)
        surcharge = self.surcharge(self.model.ports.layouts(plan.rows))
        total = float(self._unary_costs(plan.rows).sum()) + surcharge + sum(reshards)
        return CostedPlan(plan.rows, total, plan.edges)

    def surcharge(self, layouts: Ids) -> float:
        """Returns what reshards cost beyond their prices (``Model.surcharges``), given the layouts of all ports."""
        return sum(surcharge_of(self.model, what, ends, layouts) for what, ends in self.model.surcharges)

    def _unary_costs(self, rows: Assignment) -> Costs:
        """Returns the cost of each node, nodes with equal costs next to each other."""
        at, costs, begin = np.einsum("ij,ij->i", rows, self._strides)[self._nodes], np.empty(len(rows)), 0
        for unary, count in self._unary:
            costs[begin : begin + count] = unary[at[begin : begin + count]]
            begin += count
        return costs

    def _edge_groups(self, edges_of: Mapping[int, Edges]) -> Iterator[tuple[ReshardCosts, Edges, float]]:
        """Yields reshard costs, a tree and how often it runs in all, per group of values with equal trees."""
        model, index, every = self.model, self.model.problem.index, list(edges_of.values())
        values = index_array(edges_of)
        spaces, weights = model.reshard_costs.index_of[values], model.value_weights[index.numbers_of(edges_of)]
        trees = intern_ids(map(object_id, every))  # equal trees are mostly one object
        for same in group_by(row_ids((spaces, trees))):
            first = int(same[0])
            yield model.reshard_costs.distinct[spaces[first]], every[first], float(weights[same].sum())

    def _compute_paths(self, costs: ReshardCosts, pairs: Iterable[tuple[int, int]]) -> None:
        """Computes the costs of cheapest paths between pairs of numbered layouts."""
        ends = np.array(sorted(pairs), dtype=np.intp).reshape(-1, 2)
        starts, row = np.unique(ends[:, 0], return_inverse=True)
        targets, column = np.unique(ends[:, 1], return_inverse=True)
        if starts.size:
            found = costs.all_pairs(starts, costs.feasible, targets)[1][row, column]
            self._path_costs[costs].update(((a, b), c) for (a, b), c in zip(ends.tolist(), found.tolist(), strict=True))

    def _tree(self, group: ReshardGroup) -> tuple[float, Edges]:
        """Returns the cheapest tree from the producers' layout to those of all consumers, with its cost."""
        domain = self.model.domain(group.values[0])
        key = domain.number, group.own, group.others
        if key not in self._trees:
            start, *targets = domain.place_of[[group.own, *group.others]].tolist()
            cost, edges = steiner_tree(
                domain.costs, domain.transit_costs, start, targets, self.model.limits.costs_exact_targets
            )
            self._trees[key] = cost, tuple((int(domain.layouts[a]), int(domain.layouts[b])) for a, b in edges)
        return self._trees[key]


def surcharge_of(model: Model, what: Surcharge, ends: Shares, layouts: Ids) -> float:
    """Returns what the reshards to some consumers cost beyond their prices.

    Args:
      ends: of these, with the part of it that each pays.
      layouts: of all ports in a plan.
    """
    ports = index_array(map(model.wiring.port, ends))
    producers, spaces = model.wiring.port_producer[ports], model.spaces[ports]
    found = np.zeros(ports.size)
    for same in group_by(spaces) if ports.size else ():
        domain = model.domains[model.reshard_costs.distinct[spaces[same[0]]]]
        own, used = (domain.place_of[layouts[each[same]]] for each in (producers, ports))
        found[same] = domain.beyond(what)[own, used]
    return float(found @ (model.port_weights[producers] * np.array(list(ends.values()))))


def exact_surcharge(model: Model, rows: Assignment) -> float:
    """Returns what it costs that a plan sends values in full to some consumers (``Model.exact``)."""
    if not model.exact:
        return 0.0
    return surcharge_of(view_of_plan(model, rows), "exact", model.exact, model.ports.layouts(rows))


def view_of_plan(model: Model, rows: Assignment) -> Model:
    """Returns a view in which an assignment can be evaluated: on many axes, reshard paths stay near its layouts."""
    return model.restricted_to_plan(rows) if len(model.parallel_axes) > 2 else model


# ---- Decoding to a solution ------------------------------------------------------------------------------------------


def rows_by_op(model: Model, rows: Assignment) -> dict[int, tuple[Signature, ...]]:
    """Returns per op id its signature on every mesh axis; equal ops in equal states share theirs."""
    states = rows.tolist()

    def signatures(n: int) -> tuple[Signature, ...]:
        node = model.nodes[n]
        return tuple(_with_literals(node.op, node.rows[r]) for r in states[n]) if node.op else ()

    found = map_classes(model.representatives_in(rows), signatures)
    return {node.op.id: mine for node, mine in zip(model.nodes, found, strict=True) if node.op}


def _with_literals(op: Op, row: Signature) -> Signature:
    """Returns a row with placements for literal operands, which nodes have no ports for, and without its ``majors``.

    These decided which rows fit together; what runs, and files of plans, do not need them.
    """
    placements = iter(row.outputs)
    inputs = tuple(B if isinstance(v, Literal) else next(placements) for v in op.inputs)
    ports = [i for i, v in enumerate((*op.inputs, *op.outputs)) if not isinstance(v, Literal)]
    collectives = tuple(replace(each, port=ports[each.port]) for each in row.collectives)
    return Signature(inputs, tuple(next(placements) for _ in op.outputs), row.size, collectives)


def layouts_of(model: Model, rows: Assignment) -> tuple[dict[int, Layout], dict[Use, Layout]]:
    """Returns the layout of every value by its id, and of every use."""
    ports, every, wiring, index = model.ports, list(model.ports.all_layouts), model.wiring, model.problem.index
    found = [every[i] for i in ports.layout_numbers(ports.layouts(rows)).tolist()]
    producers, used = wiring.producer[wiring.producer >= 0], wiring.port_of_use.tolist()
    values = wiring.value_ids[producers].tolist()
    own = {value: found[port] for value, port in zip(values, producers.tolist(), strict=True)}
    return own, {use: found[port] for use, port in zip(index.uses, used, strict=True) if port >= 0}


def trees_of(model: Model, plan: CostedPlan) -> dict[int, tuple[ReshardStep, ...]]:
    """Returns the reshard steps of every value that has any, in program order."""
    return {value: steps_of(model, value, edges) for value, edges in sorted(plan.edges.items())}


def steps_of(model: Model, value: int, edges: Edges) -> tuple[ReshardStep, ...]:
    """Returns the reshard steps along the edges of a value's tree."""
    tensor = model.problem.index.value(value)
    costs = model.reshard_costs[value]
    return tree_steps(costs.space, tensor.shape, tensor.itemsize, edges, costs.manual, costs.formats)
