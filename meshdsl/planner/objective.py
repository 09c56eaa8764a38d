"""From a state of every node to a Solution: rows, layouts, moves, seconds and memory."""

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
from meshdsl.planner.costs.reshard_cost import ReshardCosts
from meshdsl.planner.costs.steiner import Edges, steiner_tree, tree_steps
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.ports import End, ReshardGroup
from meshdsl.planner.problem.variables import map_classes
from meshdsl.util.arrays import Costs, Ids, group_by, index_array, intern_ids, object_id, row_ids

# ---- Kept ------------------------------------------------------------------------------------------------------------
# What is kept of a value for a reader that comes later: some copy on the way there, at least the smallest one.


class ResidentCopies:
    """Answers for plans of one model; equal values that are moved alike are looked at once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._ports: dict[tuple[End, End | None], tuple[Value, int, int | None, list[int]]] = {}
        self._known: dict[tuple[int, Edges, int, int | None, frozenset[int]], int] = {}  # elements

    def paid(self, rows: Assignment, edges: Mapping[int, Edges]) -> float:
        """What a plan pays at the model's present prices for what is kept."""
        if not (prices := self.model.prices.path_copy):
            return 0.0
        held = np.array(self.bytes(prices.keys(), self.model.ports.layouts(rows), edges))
        return float(self.model.scale.pack(held * np.array(list(prices.values()))).sum())

    def bytes(self, ends: Iterable[End], layouts: Ids, edges: Mapping[int, Edges]) -> list[float]:
        """Of the smallest copy on the way to each reader, from where it has gone to the others that read the value.

        Args:
          layouts: of the ports in a plan. edges: by value, its moves.
        """
        numbers = layouts.tolist()
        return [self._least(end, None, numbers, edges) for end in ends]

    def besides(self, ends: Iterable[tuple[End, End]], layouts: Ids, edges: Mapping[int, Edges]) -> list[float]:
        """The same, but nothing where that copy may be the one that another reader takes meanwhile.

        Args:
          ends: of later readers, each with that of the other one.
        """
        numbers = layouts.tolist()
        return [self._least(end, meanwhile, numbers, edges) for end, meanwhile in ends]

    def _least(self, end: End, meanwhile: End | None, layouts: Sequence[int], edges: Mapping[int, Edges]) -> float:
        model, known = self.model, self._ports.get((end, meanwhile))
        value, port, its, others = known or self._of(end, meanwhile)
        distances, moved = model.reshard_costs[value.id], edges.get(value.id, ())
        taken = None if its is None else layouts[its]
        key = object_id(distances), moved, layouts[port], taken, frozenset([layouts[other] for other in others])
        if key not in self._known:
            space, sizes = distances.space, model.mesh.sizes_by_name
            way = {move.after: move.before for move in tree_steps(space, value.shape, value.itemsize, moved)}
            gone = {layout for other in key[-1] for layout in _back(space.layouts[other], way)}
            there = list(_until(gone, _back(space.layouts[key[2]], way)))
            free = taken is not None and space.layouts[taken] in there
            self._known[key] = 0 if free else min(prod(layout.local_shape(value.shape, sizes)) for layout in there)
        return float(self._known[key] * value.itemsize)

    def _of(self, end: End, meanwhile: End | None) -> tuple[Value, int, int | None, list[int]]:
        """What is read, the ports of its reader, of the one that reads meanwhile, and of others; known from now on."""
        wiring = self.model.wiring
        value, its = wiring.value_at(end), meanwhile and wiring.port(meanwhile)
        port, *others = map(wiring.port, (end, *wiring.ends_of(value)[1:]))
        found = self.model.problem.index.value(value), port, its, [at for at in others if at not in (port, its)]
        self._ports[end, meanwhile] = found
        return found


def _back(layout: Layout, way: Mapping[Layout, Layout]) -> Iterator[Layout]:
    """A layout, and those that it is made from, one from the other."""
    yield layout
    while layout in way:
        layout = way[layout]
        yield layout


def _until(those: set[Layout], layouts: Iterator[Layout]) -> Iterator[Layout]:
    """Layouts up to the first that is among those, with it."""
    for layout in layouts:
        yield layout
        if layout in those:
            return


# ---- Paying ----------------------------------------------------------------------------------------------------------
# What nodes pay for memory where it is short: over their joint states, and in a plan, with the copies they read.


def payers(model: Model) -> list[int]:
    """The nodes whose states cost more at the model's present prices, copies aside."""
    wiring = model.wiring
    made = wiring.node_of[wiring.producer[model.problem.index.numbers_of(model.prices.own_layout)]].tolist()
    return sorted({*made, *(n for n, _ in model.prices.resident)})


def terms(model: Model, n: int) -> Hashable:
    """What the price of a node consists of: nodes with one table and equal terms pay alike."""
    own, held, wiring = model.prices.own_layout, model.prices.resident, model.wiring
    made = tuple([(p, own[value]) for p, value in wiring.defined_values(n) if value in own])
    there = [(p, *held[n, p]) for p in range(len(wiring.ports(n))) if (n, p) in held]
    return made, tuple([(p, price, object_id(share)) for p, price, share in there])


def paid(model: Model, n: int) -> Costs:
    """What a node pays in every joint state; for bytes that are there whatever the plan, rounded down."""
    total = np.zeros_like(model.unary[n])
    for price, share in _made(model, n):
        total += model.scale.pack(price * share)
    for p in range(len(model.wiring.ports(n))):
        if (n, p) in model.prices.resident:
            price, share = model.prices.resident[n, p]
            total += np.floor(price * share / model.scale.unit) * TIES
    return total


def paid_in(model: Model, rows: Assignment) -> float:
    """What a plan pays for the values that it makes and the copies that it reads."""
    prices, wiring, layouts = model.prices, model.wiring, model.ports.layouts(rows)
    made, read = (
        wiring.producer[model.problem.index.numbers_of(prices.own_layout)],
        index_array(map(wiring.port, prices.copy)),
    )
    ports, price, total = np.append(made, read), np.array([*prices.own_layout.values(), *prices.copy.values()]), 0.0
    copies = np.arange(ports.size) >= made.size
    there = ~copies | (layouts[ports] != layouts[wiring.port_producer[ports]])
    ports, price = ports[there], price[there]
    spaces, layouts = model.spaces[ports], layouts[ports]
    for alike in group_by(spaces):
        layout = model.reshard_costs.distinct[spaces[alike[0]]]
        held = layout.bytes * layout.shares[layouts[alike]]
        total += float(model.scale.pack(price[alike] * held).sum())
    return total


def _made(model: Model, n: int) -> Iterator[tuple[float, Costs]]:
    """Price per byte, and bytes per joint state, of what a node defines."""
    for p, made in model.wiring.defined_values(n):
        if price := model.prices.own_layout.get(made, 0.0):
            value = model.problem.index.value(made)
            split = model.tables[n].codes[p] < len(value.shape)
            yield price, local_share(model.mesh, split) * value.bytes


# ---- Extract ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CostedPlan:
    """A state with its cost, as exact integers (see ``Scale``), and per value its moves between numbered layouts."""

    rows: Assignment
    cost: float
    edges: dict[int, Edges]


class Evaluator:
    """The objective of a state: node costs and, per value, the cheapest tree of moves."""

    def __init__(self, model: Model) -> None:
        self.model = model
        numbers = model.class_ids(lambda n: object_id(model.unary[n]))
        alike = group_by(numbers)
        self._nodes = np.concatenate([index_array(()), *alike])  # those of equal costs together
        self._units = [(model.unary[int(nodes[0])].ravel(), nodes.size) for nodes in alike]
        shapes = np.array([model.unary[int(nodes[0])].shape for nodes in alike], dtype=np.intp)
        shapes = shapes.reshape(-1, model.width)[numbers]
        self._steps = np.ones_like(shapes)  # per node and mesh axis, so many costs further on is the next row
        self._steps[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[float, Edges]] = {}
        self._exact: dict[ReshardCosts, dict[tuple[int, int], float]] = defaultdict(dict)
        self._kept = ResidentCopies(model)

    def at(self, model: Model) -> "Evaluator":
        """Returns an evaluator of a view of the model, which shares the costs that are known."""
        other = copy(self)
        other.model = model
        return other

    def evaluate(self, rows: Assignment) -> CostedPlan:
        """Cost and moves of a state."""
        ports, trips, total = self.model.ports, self.model.port_trips, self._alone(rows)
        edges: dict[int, Edges] = {}
        for read in ports.resharded(ports.layouts(rows)):
            cost, found = self._tree(read)
            if found:
                total += cost * int(trips[read.producers].sum())
                edges.update(dict.fromkeys(read.values, found))
        return CostedPlan(rows, total, edges)

    def shares(self, rows: Assignment) -> tuple[Costs, Costs]:
        """What each node of a state costs, and by the port that makes it, what the moves of each value do."""
        here = self.at(view_of_plan(self.model, rows))
        ports, trips = self.model.ports, self.model.port_trips
        nodes, moves = np.empty(len(rows)), np.zeros(trips.size)
        nodes[self._nodes] = self._costs(rows)
        for read in ports.resharded(ports.layouts(rows)):
            moves[read.producers] = here._tree(read)[0] * trips[read.producers]
        return nodes, moves

    def allowed(self, rows: Assignment) -> NDArray[np.bool_]:
        """Whether the pins allow the state of each node."""
        found = np.empty(len(rows), dtype=np.bool_)
        found[self._nodes] = np.isfinite(self._costs(rows))
        return found

    def _alone(self, rows: Assignment) -> float:
        """What the nodes of a state cost, moves aside."""
        return float(self._costs(rows).sum())

    def _costs(self, rows: Assignment) -> Costs:
        """The same node by node, those of equal costs together."""
        at, costs, begin = np.einsum("ij,ij->i", rows, self._steps)[self._nodes], np.empty(len(rows)), 0
        for unit, count in self._units:
            costs[begin : begin + count] = unit[at[begin : begin + count]]
            begin += count
        return costs

    def around(self, n: int, values: Iterable[int], rows: Assignment, elsewhere: Mapping[int, ReshardGroup]) -> float:
        """What a node and the moves of these values cost, ``elsewhere`` being what all values are moved to."""
        moves = (self._tree(elsewhere[v])[0] * self.model.trips(v) for v in values if v in elsewhere)
        return float(self.model.unary[n][tuple(rows[n])]) + sum(moves)

    def objective(self, choice: CostedPlan) -> float:
        """The cost of a choice, the model's present prices of memory included."""
        return choice.cost + paid_in(self.model, choice.rows) + self._kept.paid(choice.rows, choice.edges)

    def exact(self, choice: CostedPlan) -> CostedPlan:
        """The choice with each of its moves taking the cheapest way of all (see ``Model.restricted``)."""
        if self.model.unrestricted and len(self.model.parallel_axes) <= 2:  # there is no other
            return choice
        ways = list(self._ways(choice.edges))
        asked = defaultdict[ReshardCosts, set[tuple[int, int]]](set)
        for distances, edges, _ in ways:
            asked[distances].update(edges)
        for distances, moves in asked.items():
            self._price(distances, moves - self._exact[distances].keys())
        moved = (sum(map(self._exact[distances].__getitem__, edges)) * trips for distances, edges, trips in ways)
        return CostedPlan(choice.rows, self._alone(choice.rows) + sum(moved), choice.edges)

    def _ways(self, moved: Mapping[int, Edges]) -> Iterator[tuple[ReshardCosts, Edges, int]]:
        """How values are moved, those together that have equal layouts and are moved alike, and how often in all."""
        model, numbers, every = self.model, self.model.problem.index, list(moved.values())
        values = index_array(moved)
        spaces, trips = model.reshard_costs.index_of[values], numbers.trips[numbers.numbers_of(moved)]
        ways = intern_ids(map(object_id, every))  # those that lead alike are mostly one object
        for alike in group_by(row_ids((spaces, ways))):
            first = int(alike[0])
            yield model.reshard_costs.distinct[spaces[first]], every[first], int(trips[alike].sum())

    def _price(self, distances: ReshardCosts, moves: Iterable[tuple[int, int]]) -> None:
        """Work out the cheapest ways of moves between numbered layouts."""
        ends = np.array(sorted(moves), dtype=np.intp).reshape(-1, 2)
        starts, row = np.unique(ends[:, 0], return_inverse=True)
        targets, column = np.unique(ends[:, 1], return_inverse=True)
        if starts.size:
            costs = distances.all_pairs(starts, distances.feasible, targets)[1][row, column]
            self._exact[distances].update(((a, b), c) for (a, b), c in zip(ends.tolist(), costs.tolist(), strict=True))

    def _tree(self, read: ReshardGroup) -> tuple[float, Edges]:
        """Cost and moves of values from their own layout to those in which they are read."""
        closure = self.model.domain(read.values[0])
        key = closure.number, read.own, read.others
        if key not in self._known:
            start, *wanted = closure.place_of[[read.own, *read.others]].tolist()
            cost, edges = steiner_tree(closure.costs, closure.transit_costs, start, wanted)
            self._known[key] = cost, tuple((int(closure.layouts[a]), int(closure.layouts[b])) for a, b in edges)
        return self._known[key]


def view_of_plan(model: Model, rows: Assignment) -> Model:
    """Returns a view in which a plan can be evaluated; on many axes, reshard paths stay near its layouts."""
    return model.restricted_to_plan(rows) if len(model.parallel_axes) > 2 else model


def rows_by_op(model: Model, rows: Assignment) -> dict[int, tuple[Signature, ...]]:
    """Per op id, its row on every mesh axis; equal operations in equal states get the same rows."""
    states = rows.tolist()

    def row(n: int) -> tuple[Signature, ...]:
        node = model.nodes[n]
        return tuple(_full_row(node.op, node.rows[r]) for r in states[n]) if node.op else ()

    found = map_classes(model.representatives_in(rows), row)
    return {node.op.id: mine for node, mine in zip(model.nodes, found, strict=True) if node.op}


def _full_row(op: Op, row: Signature) -> Signature:
    """A row with the literals put back."""
    at = iter(row.outputs)
    inputs = tuple(B if isinstance(v, Literal) else next(at) for v in op.inputs)
    real = [i for i, v in enumerate((*op.inputs, *op.outputs)) if not isinstance(v, Literal)]
    inside = tuple(replace(e, port=real[e.port]) for e in row.collectives)
    return Signature(inputs, tuple(next(at) for _ in op.outputs), row.size, inside)


def layouts_of(model: Model, rows: Assignment) -> tuple[dict[int, Layout], dict[Use, Layout]]:
    """The layout of every value, and of every operand as it is read."""
    ports, every, wiring, numbers = model.ports, list(model.ports.all_layouts), model.wiring, model.problem.index
    found = [every[i] for i in ports.layout_numbers(ports.layouts(rows)).tolist()]
    made, read = wiring.producer[wiring.producer >= 0], wiring.port_of_use.tolist()
    own = {value: found[port] for value, port in zip(wiring.value_ids[made].tolist(), made.tolist(), strict=True)}
    return own, {reading: found[port] for reading, port in zip(numbers.uses, read, strict=True) if port >= 0}


def trees_of(model: Model, choice: CostedPlan) -> dict[int, tuple[ReshardStep, ...]]:
    """The moves of every value that has any, in program order."""
    return {value: moves_along(model, value, edges) for value, edges in sorted(choice.edges.items())}


def moves_along(model: Model, value: int, edges: Edges) -> tuple[ReshardStep, ...]:
    """The moves of a value between numbered layouts."""
    tensor = model.problem.index.value(value)
    return tree_steps(model.reshard_costs[value].space, tensor.shape, tensor.itemsize, edges)
