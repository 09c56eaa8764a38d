"""Where the search begins: plans that a person would try first.

``whole`` does everything everywhere, but for pins. ``forward`` splits the batch over every mesh
axis that allows it and follows the program in order, every operation taking the signature that
is cheapest given what comes in: data parallelism, to begin with.
"""

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.closure import Costs
from meshdsl.planner.model import Assignment, Model


def whole(model: Model) -> Assignment:
    """All-``B`` but for pins; sums of partial numbers wait to be reduced together."""
    rows = model.whole.copy()
    for n in scalars(model):
        state = _reducing_last(model, n)
        if state is not None:
            rows[n] = state
    return rows


def scalars(model: Model) -> list[int]:
    """Nodes of numbers, not tensors: they cost next to nothing, but they join everything (a gradient norm, say)."""
    return [n for n, node in enumerate(model.nodes) if node.op and all(p.value.shape == () for p in node.ports)]


def _reducing_last(model: Model, n: int) -> NDArray[np.intp] | None:
    """The row that keeps everything partial, on every axis, if there is one."""
    partial = [r for r, row in enumerate(model.nodes[n].rows) if all(str(at) == "P" for at in row.outputs)]
    state = np.full(model.width, partial[0] if partial else 0, dtype=np.intp)
    return state if partial and np.isfinite(model.unit(n)[tuple(state)]) else None


def forward(model: Model) -> Assignment:
    """The batch split over all axes, the rest as it comes."""
    rows = whole(model)
    for n, node in enumerate(model.nodes):
        if node.what.startswith("input") and len(node.ports) == 1:
            rows[n] = _best(_batch_cost(model, n), rows[n])
        elif node.op is not None or len(node.ports) > 1:
            rows[n] = _best(_arriving(model, n, rows), rows[n])
    return rows


def _batch_cost(model: Model, n: int) -> Costs:
    """Prefers dim 0 split on as many axes as can be."""
    codes = model.tables[n].codes[0]
    split = np.zeros(model.unit(n).shape)
    for axis in range(model.width):
        shape = [1] * model.width
        shape[axis] = len(codes)
        split = split - (codes == 0).reshape(shape) * (len(model.nodes[n].ports[0].value.shape) > 0)
    return np.where(np.isfinite(model.unit(n)), split, np.inf)


def _arriving(model: Model, n: int, rows: Assignment) -> Costs:
    """Cost of every joint state, with the moves of the operands that are already placed."""
    cost = model.unit(n).copy()
    states = np.argwhere(np.isfinite(cost)).T
    for p, port in enumerate(model.nodes[n].ports):
        d, q = model.problem.defined[port.value.id]
        if port.defines or d >= n:
            continue
        own = int(model.layout_ids(d, q, rows[d]))
        codes = model.tables[n].codes[p]
        ids = model.closures[port.value.id].ids(model.orders[n])[tuple(codes[s] for s in states)]
        cost[tuple(states)] += model.closures[port.value.id].costs[own, ids] * model.trips(port.value.id)
    return cost


def _best(cost: Costs, otherwise: NDArray[np.intp]) -> NDArray[np.intp]:
    if not np.isfinite(cost).any():
        return otherwise
    return np.array(np.unravel_index(int(np.argmin(cost)), cost.shape), dtype=np.intp)
