"""From a state of every node to a Solution: rows, layouts, moves, seconds and memory."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshdsl.ir import Literal, Op, walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.move import Move
from meshdsl.layouts.placement import B
from meshdsl.layouts.rule import Signature
from meshdsl.planner.closure import Closure
from meshdsl.planner.distances import Distances
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.tree import Edges, moves_of, tree

Rows = Sequence[tuple[int, ...]]  # per node, its row on every mesh axis


@dataclass(frozen=True)
class Choice:
    """A state with its cost, as exact integers (see ``Scale``), and per value its moves between numbered layouts."""

    rows: Assignment
    cost: float
    edges: dict[int, Edges]


class Evaluator:
    """The objective of a state: node costs and, per value, the cheapest tree of moves."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[float, Edges]] = {}
        self._layouts: dict[Hashable, int] = {}
        self._exact: dict[Distances, dict[tuple[int, int], float]] = defaultdict(dict)

    def evaluate(self, rows: Assignment) -> Choice:
        """Cost and moves of a state."""
        model, states = self.model, list(map(tuple, rows.tolist()))
        total = sum([float(model.unit(n)[state]) for n, state in enumerate(states)])
        edges: dict[int, Edges] = {}
        for value in model.problem.defined:
            cost, found = self._tree(value, states)
            if found:
                total += cost * model.trips(value)
                edges[value] = found
        return Choice(rows, total, edges)

    def around(self, n: int, values: Iterable[int], states: Rows) -> float:
        """What a node and the moves of these values cost, ``states`` being one per node."""
        moves = (self._tree(value, states)[0] * self.model.trips(value) for value in values)
        return float(self.model.unit(n)[states[n]]) + sum(moves)

    def objective(self, choice: Choice) -> float:
        """The cost of a choice, the model's present prices of memory included."""
        model = self.model
        priced = {model.problem.defined[v][0] for v in model.prices.own} | {n for n, _ in model.prices.read}
        return choice.cost + sum(model.memory_price(n, tuple(choice.rows[n].tolist())) for n in sorted(priced))

    def exact(self, choice: Choice) -> Choice:
        """The choice with each of its moves taking the cheapest way of all (see ``Model.focus``)."""
        model, asked = self.model, defaultdict[Distances, set[tuple[int, int]]](set)
        for value, edges in choice.edges.items():
            asked[model.distances[value]].update(edges)
        for distances, moves in asked.items():
            self._price(distances, moves - self._exact[distances].keys())
        total = sum([float(model.unit(n)[tuple(state)]) for n, state in enumerate(choice.rows.tolist())])
        for value, edges in choice.edges.items():
            costs = self._exact[model.distances[value]]
            total += sum(costs[edge] for edge in edges) * model.trips(value)
        return Choice(choice.rows, total, choice.edges)

    def _price(self, distances: Distances, moves: Iterable[tuple[int, int]]) -> None:
        """Work out the cheapest ways of moves between numbered layouts."""
        ends = np.array(sorted(moves), dtype=np.intp).reshape(-1, 2)
        starts, row = np.unique(ends[:, 0], return_inverse=True)
        targets, column = np.unique(ends[:, 1], return_inverse=True)
        if starts.size:
            costs = distances.rows(starts, distances.fitting, targets)[1][row, column]
            self._exact[distances].update(((a, b), c) for (a, b), c in zip(ends.tolist(), costs.tolist(), strict=True))

    def _tree(self, value: int, states: Rows) -> tuple[float, Edges]:
        problem, closure = self.model.problem, self.model.closures[value]
        own = self._layout(closure, *problem.defined[value], states)
        wanted = {self._layout(closure, n, port, states) for n, port in problem.used.get(value, ())} - {own}
        if not wanted:
            return 0.0, ()
        key = (closure.number, own, tuple(sorted(wanted)))
        if key not in self._known:
            cost, edges = tree(closure.costs, closure.inner, own, wanted)
            self._known[key] = cost, tuple((int(closure.active[a]), int(closure.active[b])) for a, b in edges)
        return self._known[key]

    def _layout(self, closure: Closure, n: int, port: int, states: Rows) -> int:
        key = (id(self.model.tables[n]), port, closure.number, self.model.orders[n], states[n])
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = int(self.model.layout_ids(n, port, np.array(states[n])))
        return found


def rows_by_op(model: Model, rows: Assignment) -> dict[int, tuple[Signature, ...]]:
    """Per op id, its row on every mesh axis; equal operations in equal states get the same rows."""
    found, known = {}, dict[Hashable, tuple[Signature, ...]]()
    for node, state in zip(model.nodes, map(tuple, rows.tolist()), strict=True):
        if node.op is not None:
            key = id(node.rows), state
            if key not in known:
                known[key] = tuple(_full_row(node.op, node.rows[r]) for r in state)
            found[node.op.id] = known[key]
    return found


def _full_row(op: Op, row: Signature) -> Signature:
    """A row with the literals put back."""
    at = iter(row.outputs)
    inputs = tuple(B if isinstance(v, Literal) else next(at) for v in op.inputs)
    real = [i for i, v in enumerate((*op.inputs, *op.outputs)) if not isinstance(v, Literal)]
    inside = tuple(replace(e, port=real[e.port]) for e in row.collectives)
    return Signature(inputs, tuple(next(at) for _ in op.outputs), row.size, inside)


def layouts_of(model: Model, rows: Assignment) -> tuple[dict[int, Layout], dict[tuple[int, int], Layout]]:
    """The layout of every value, and of every operand as it is read."""
    own: dict[int, Layout] = {}
    uses: dict[tuple[int, int], Layout] = {}
    known: dict[Hashable, Layout] = {}
    for n, state in enumerate(map(tuple, rows.tolist())):
        table, order = id(model.tables[n]), model.orders[n]
        for p, port in enumerate(model.nodes[n].ports):
            key = table, p, order, id(model.distances[port.value.id]), state
            if key not in known:
                known[key] = model.layout(n, p, rows[n])
            if port.defines:
                own[port.value.id] = known[key]
            elif port.reader is not None:
                uses[port.reader] = known[key]
    return own, uses


def trees_of(model: Model, choice: Choice) -> dict[int, tuple[Move, ...]]:
    """The moves of every value that has any, in program order."""
    values = {v.id: v for v in model.problem.program.graph.inputs}
    for _, op in walk(model.problem.program.graph):
        values.update((v.id, v) for v in op.outputs)
        values.update((v.id, v) for body in op.bodies for v in body.inputs)
    return {
        v: moves_of(model.distances[v].space, values[v].shape, values[v].itemsize, edges)
        for v, edges in sorted(choice.edges.items())
    }
