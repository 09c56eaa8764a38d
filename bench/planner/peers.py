"""Layout choices of other systems, on our cost tables, so that only the method differs.

* ``greedy`` (the rule of OneFlow's graph compiler before 2023): in program order, each operation takes the signature
  that is cheapest given the layouts of its operands. Unpinned arguments are replicated, and so are constants if that is
  cheaper.
* ``by_names`` (Mesh-TensorFlow's ``auto_mtf``): every dim name is split over one axis or none, wherever it occurs.
  Names are inferred: dims that some signature splits together share one. All assignments of the names with most bytes
  are tried.
* ``axis_by_axis`` (after Alpa's intra-operator solver): an integer program per mesh axis with the previous axes fixed,
  in which every consumer is charged for its own reshard.

Each choice is then evaluated like ours: reshards of a value are shared and use the cheapest resharding tree.
"""

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from meshdsl.ir.graph import Value
from meshdsl.layouts.placement import Split
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.model import Assignment, Model
from meshdsl.planner.problem.variables import Node

Dim = tuple[int, int]  # value, number of its dim

_NAMES = {1: 6, 2: 5, 3: 4}  # number of names whose assignments are enumerated, by number of mesh axes
_SECONDS = 120  # time limit of one integer program


def greedy(model: Model) -> CostedPlan:
    """Returns the greedy plan, the better of sharding constants greedily and replicating them."""
    return min((_greedy(model, shard) for shard in (True, False)), key=lambda choice: choice.cost)


def _greedy(model: Model, shard_constants: bool) -> CostedPlan:
    rows, own, problem = model.first_states.copy(), {}, model.problem
    for n, node in enumerate(model.nodes):
        states, cost = model.states[n], model.unary[n][tuple(model.states[n].T)].copy()
        for p, port in enumerate(node.ports):
            v = port.value.id
            if not port.defines and v in own:
                cost += model.domain(v).costs[own[v], model.layout_ids(n, p, states.T)] * model.weight(v)
        constant = any(port.defines and problem.unsent[problem.index.number_of(port.value.id)] for port in node.ports)
        if (shard_constants or not constant) and (node.op is not None or not node.ports[0].defines):
            rows[n] = states[int(cost.argmin())]
        for p, port in enumerate(node.ports):
            if port.defines:
                own[port.value.id] = int(model.layout_ids(n, p, rows[n]))
    return _evaluated(model, rows)


def by_names(model: Model) -> CostedPlan:
    """Returns the best plan among all assignments of axes to the names with most bytes."""
    names = _Names(model)
    tried = (names.rows(split) for split in names.assignments(_NAMES[len(model.axes)]))
    return min((_evaluated(model, rows) for rows in tried), key=lambda choice: choice.cost)


def axis_by_axis(model: Model) -> CostedPlan:
    """Returns the plan of solving one integer program per mesh axis in turn."""
    rows = model.first_states
    for axis in range(len(model.axes)):
        rows = _on_axis(model, rows, axis)
    return _evaluated(model, rows)


def _evaluated(model: Model, rows: Assignment) -> CostedPlan:
    evaluator = Evaluator(model)
    return evaluator.with_exact_cost(evaluator.evaluate(rows))


class _Names:
    """Dim names by union-find: (value, dim) pairs that some signature splits together share a name."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._parent: dict[Dim, Dim] = {}
        for node in model.nodes:
            for row in range(len(node.rows)):
                for a, b in pairwise(self._dims(node, row)):
                    self._parent[self._root(a)] = self._root(b)

    def _dims(self, node: Node, row: int) -> list[Dim]:
        """Returns the dims that a signature splits."""
        placed = zip(node.ports, node.placements(row), strict=True)
        return [(port.value.id, at.dim) for port, at in placed if isinstance(at, Split)]

    def _root(self, dim: Dim) -> Dim:
        while self._parent.setdefault(dim, dim) != dim:
            dim = self._parent[dim]
        return dim

    def assignments(self, most: int) -> Iterator[dict[Dim, int]]:
        """Yields all assignments of axes (or none) to the ``most`` names with most bytes."""
        total: dict[Dim, int] = {}
        for tensor in self.model.problem.index.values:
            for d in range(len(tensor.shape)):
                total[self._root((tensor.id, d))] = total.get(self._root((tensor.id, d)), 0) + tensor.bytes
        names = sorted(total, key=total.get, reverse=True)[:most]
        for axes in product((None, *range(len(self.model.axes))), repeat=len(names)):
            yield {name: axis for name, axis in zip(names, axes, strict=True) if axis is not None}

    def rows(self, split: dict[Dim, int]) -> Assignment:
        """Returns the cheapest state of every node given the layouts that the names imply for all values."""
        model, rows = self.model, self.model.first_states.copy()
        layouts = {v.id: self._layout(v, split) for v in model.problem.index.values}
        for n, node in enumerate(model.nodes):
            states, cost = model.states[n], model.unary[n][tuple(model.states[n].T)].copy()
            for p, port in enumerate(node.ports):
                v, at = port.value.id, model.layout_ids(n, p, states.T)
                costs = model.domain(v).costs
                cost += (costs[at, layouts[v]] if port.defines else costs[layouts[v], at]) * model.weight(v)
            rows[n] = states[int(cost.argmin())]
        return rows

    def _layout(self, value: Value, split: dict[Dim, int]) -> int:
        """Returns the id of the layout that the names imply for a value.

        Dims that do not divide stay whole; of several dims with one name, the first is split.
        """
        model, rank, closure = self.model, len(value.shape), self.model.domain(value.id)
        codes, ids = [rank] * len(model.axes), closure.ids(model.axes)
        for d in range(rank):
            axis = split.get(self._root((value.id, d)))
            if axis is not None and codes[axis] == rank:
                split_codes = [*codes[:axis], d, *codes[axis + 1 :]]
                codes = split_codes if ids[tuple(split_codes)] < closure.layouts.size else codes
        return int(ids[tuple(codes)])


def _on_axis(model: Model, rows: Assignment, axis: int) -> Assignment:
    """Returns the best states that differ from ``rows`` on one axis only, without sharing of reshards."""
    others = [a for a in range(rows.shape[1]) if a != axis]
    some = [s[(s[:, others] == rows[n][others]).all(axis=1)] for n, s in enumerate(model.states)]
    begin = np.concatenate([[0], np.cumsum([len(states) for states in some])])
    costs = [model.unary[n][tuple(states.T)] for n, states in enumerate(some)]
    entries = [(np.repeat(np.arange(len(some)), np.diff(begin)), np.arange(begin[-1]), np.ones(begin[-1]))]
    width, height = int(begin[-1]), len(some)
    for v in (value.id for value in model.problem.index.values):
        (n, p), *consumers = model.wiring.ends_of(v)
        for m, q in consumers:
            ends = model.layout_ids(n, p, some[n].T), model.layout_ids(m, q, some[m].T)
            left, right = np.nonzero(np.isfinite(table := model.domain(v).costs[ends[0][:, None], ends[1]]))
            columns = width + np.arange(left.size)
            costs.append(table[left, right] * model.weight(v))
            for node, at in ((n, left), (m, right)):
                size = len(some[node])
                entries.append((height + at, columns, np.ones(left.size)))
                entries.append((height + np.arange(size), begin[node] + np.arange(size), -np.ones(size)))
                height += size
            width += left.size
    return _solved(np.concatenate(costs), entries, len(some), height, some, begin)


def _solved(costs, entries, nodes, height, some, begin) -> Assignment:
    at, columns, values = map(np.concatenate, zip(*entries, strict=True))
    right = np.zeros(height)
    right[:nodes] = 1.0
    unit = costs[: begin[-1]][np.isfinite(costs[: begin[-1]])].sum() / 1e6
    found = milp(
        costs / unit,
        integrality=np.arange(costs.size) < begin[-1],
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(csr_matrix((values, (at, columns)), shape=(height, costs.size)), right, right),
        options={"mip_rel_gap": 1e-6, "time_limit": _SECONDS},
    )
    parts = (found.x[a:b] for a, b in pairwise(begin))
    return np.array([states[part.argmax()] for states, part in zip(some, parts, strict=True)])
