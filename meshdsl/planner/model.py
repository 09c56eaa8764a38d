"""The planning problem as arrays: what every node and every value costs in every state.

A state of a node is one row per mesh axis. Nodes with equal rows, shapes and work share their
arrays, and so do values of equal shape: a model of a hundred equal layers has the tables of one.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshdsl.errors import PinError, faults
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import REDUCTIONS, B, Partial, Placement, Split
from meshdsl.layouts.rule import Row
from meshdsl.planner.closure import Closure, Costs, Ids, Scale, codes_of
from meshdsl.planner.costs import Work
from meshdsl.planner.exchanges import exchange_seconds
from meshdsl.planner.problem import Node, Problem

Assignment = NDArray[np.intp]  # [nodes, mesh axes] -> row
Axes = tuple[int, ...]  # mesh axes by number


@dataclass(frozen=True)
class Table:
    """Rows of a node as arrays, shared between equal nodes.

    Args:
      seconds: one array dim per mesh axis, over rows; infinite where dims do not divide.
      codes: per port, the placement code of every row.
      kinds: per port, the reductions in which it may be partial.
      first: the first state whose dims divide.
    """

    seconds: Costs
    codes: tuple[Ids, ...]
    kinds: tuple[frozenset[str], ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class Prices:
    """Seconds per byte that memory costs: by value for its own layout, by (node, port) for copies."""

    own: dict[int, float] = field(default_factory=dict)
    read: dict[tuple[int, int], float] = field(default_factory=dict)


class Model:
    """Arrays of a problem; ``scale`` is set from the cost of doing everything everywhere."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.mesh = problem, problem.mesh
        self.nodes = problem.nodes
        self.axes = problem.mesh.names
        self.prices = Prices()
        self._tables: dict[Hashable, Table] = {}
        self._closures: dict[Hashable, Closure] = {}
        self.tables = [self._table(node) for node in self.nodes]
        self.allowed = [_allowed(node, self.mesh) for node in self.nodes]
        self.orders = [_order(node.pin, self.mesh) for node in self.nodes]
        self._require_states()
        self.whole = self._all_broadcast()
        self.scale = Scale.of(self._total_seconds(self.whole))
        self._units: dict[Hashable, Costs] = {}
        self.closures = {v: self._closure(v) for v in problem.defined}

    def _require_states(self) -> None:
        """Every node has a joint state that its pin allows, or the pins are at fault."""
        found = zip(self.nodes, self.tables, self.allowed, strict=True)
        bad = [n for n, t, a in found if a is not None and not (a & np.isfinite(t.seconds)).any()]
        rows = [f"{node.what}: pinned to {node.pin}, shape {list(node.ports[0].value.shape)}" for node in bad]
        if rows:
            remedy = "a split divides its dim, and a value is partial in one way only: state another layout"
            raise PinError(faults("pins that no signature can meet:", rows, remedy))

    def unit(self, n: int) -> Costs:
        """Exact cost of node ``n`` in every joint state, pins included."""
        key = (id(self.tables[n]), self.nodes[n].trips, self.nodes[n].pin)
        if key not in self._units:
            cost, allowed = self.scale.pack(self.tables[n].seconds * self.nodes[n].trips), self.allowed[n]
            self._units[key] = cost if allowed is None else np.where(allowed, cost, np.inf)
        return self._units[key]

    def cost(self, n: int) -> Costs:
        """Cost of node ``n`` in every joint state, memory prices included."""
        cost = self.unit(n)
        for price, share in self._priced_ports(n):
            cost = cost + self.scale.pack(price * share)
        return cost

    def _priced_ports(self, n: int) -> Iterator[tuple[float, Costs]]:
        """Price per byte, and bytes per joint state, of what node ``n`` defines and memory is short of."""
        for p, port in enumerate(self.nodes[n].ports):
            price = self.prices.own.get(port.value.id, 0.0) if port.defines else 0.0
            if price:
                split = self.tables[n].codes[p] < len(port.value.shape)
                yield price, _per_axis(self.mesh, split) * port.value.bytes

    def read_price(self, value: int, n: int, port: int) -> Costs | None:
        """Price of a copy of ``value`` for one reader, by the copy's layout; None where memory is not short."""
        price = self.prices.read.get((n, port), 0.0)
        return self.scale.pack(price * self.closures[value].local_bytes) if price else None

    def layout_ids(self, n: int, port: int, rows: NDArray[np.intp]) -> Ids:
        """Layout number of a port in a joint state, or in several ([mesh axes, states])."""
        ids = self.closures[self.nodes[n].ports[port].value.id].ids(self.orders[n])
        codes = self.tables[n].codes[port]
        return np.asarray(ids[tuple(codes[r] for r in rows)])

    def trips(self, value: int) -> int:
        """How often the moves of a value run."""
        return self.problem.trips[value]

    def _table(self, node: Node) -> Table:
        shapes = tuple((p.value.shape, p.value.itemsize) for p in node.ports)
        key = (id(node.rows), shapes, node.work)
        if key not in self._tables:
            self._tables[key] = _make_table(node.rows, shapes, node.work, self.mesh)
        return self._tables[key]

    def _closure(self, value: int) -> Closure:
        n, p = self.problem.defined[value]
        tensor = self.nodes[n].ports[p].value
        kinds = self._kinds(value)
        key = (tensor.shape, tensor.itemsize, kinds)
        if key not in self._closures:
            self._closures[key] = Closure(self.mesh, tensor.shape, tensor.itemsize, kinds, self.scale)
            self._closures[key].number = len(self._closures)
        return self._closures[key]

    def _kinds(self, value: int) -> tuple[str, ...]:
        ports = [self.problem.defined[value], *self.problem.used.get(value, ())]
        kinds = {kind for n, p in ports for kind in self.tables[n].kinds[p]}
        return tuple(kind for kind in REDUCTIONS if kind in kinds)

    def _all_broadcast(self) -> Assignment:
        """A state that every node is allowed to be in, all-``B`` wherever no pin says otherwise."""
        return np.array([_first_allowed(t, a) for t, a in zip(self.tables, self.allowed, strict=True)], dtype=np.intp)

    def _total_seconds(self, rows: Assignment) -> float:
        return sum(float(t.seconds[tuple(r)]) * n.trips for t, r, n in zip(self.tables, rows, self.nodes, strict=True))

    @cached_property
    def width(self) -> int:
        """Number of mesh axes."""
        return len(self.axes)


def _first_allowed(table: Table, allowed: "NDArray[np.bool_] | None") -> tuple[int, ...]:
    return table.first if allowed is None else _first(np.isfinite(table.seconds) & allowed)


def _first(fine: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(fine)[0]) if fine.any() else (0,) * fine.ndim


def _allowed(node: Node, mesh: Mesh) -> "NDArray[np.bool_] | None":
    """Joint states that agree with the node's pin; None if it pins nothing."""
    if not any(name in mesh.names and mesh.axis(name) > 1 for name in node.pin.axes):
        return None
    masks = [_axis_mask(node, name, mesh) for name in mesh.names]
    found = masks[0]
    for mask in masks[1:]:
        found = np.logical_and.outer(found, mask)
    return found


def _axis_mask(node: Node, axis: str, mesh: Mesh) -> NDArray[np.bool_]:
    free = axis not in node.pin.axes or mesh.axis(axis) == 1
    return np.array([free or row.outputs[0] is node.pin.on(axis) for row in node.rows])


def _order(pin: Layout, mesh: Mesh) -> tuple[str, ...]:
    """Mesh order, but for axes that the pin states in another order."""
    stated = [name for name in pin.axes if name in mesh.names and isinstance(pin.on(name), Split)]
    at = iter(stated)
    return tuple(next(at) if name in stated else name for name in mesh.names)


def _make_table(
    rows: tuple[Row, ...], shapes: tuple[tuple[tuple[int, ...], int], ...], work: Work, mesh: Mesh
) -> Table:
    placements = [row.outputs for row in rows]
    codes = tuple(codes_of([p[i] for p in placements], len(shape)) for i, (shape, _) in enumerate(shapes))
    seconds = _seconds(rows, shapes, work, mesh)
    sizes = np.array([row.size for row in rows])
    for i, (shape, _) in enumerate(shapes):
        for dim in set(codes[i].tolist()) & set(range(len(shape))):
            seconds[~_divides(codes[i] == dim, sizes, shape[dim], mesh)] = np.inf
    for axis, size in enumerate(mesh.sizes):
        if size == 1:  # an axis of one device does nothing: one state is enough
            split = np.array([any(at is not B for at in row.outputs) for row in rows])
            seconds[(slice(None),) * axis + (split,)] = np.inf
    kinds = tuple(
        frozenset(p.reduction for p in ports if isinstance(p, Partial)) for ports in zip(*placements, strict=True)
    )
    for i, found in enumerate(kinds):
        if len(found) > 1:
            seconds[_mixes_reductions(placements, i, mesh)] = np.inf
    return Table(seconds, codes, kinds, _first(np.isfinite(seconds)))


def _seconds(rows: tuple[Row, ...], shapes: tuple[tuple[tuple[int, ...], int], ...], work: Work, mesh: Mesh) -> Costs:
    topology = mesh.topology
    parallel = np.array([any(isinstance(at, Split) for at in row.outputs) for row in rows])
    compute = _per_axis(mesh, parallel) * (work.flops / topology.flops(work.itemsize))
    for side in work.sides:
        dims = {Split(dim) for dim in side.dims}
        split = np.array([row.outputs[side.tensor] in dims for row in rows])
        compute *= 1 + topology.half_side / np.maximum(side.length * _per_axis(mesh, split), 1)
    traffic = np.zeros_like(compute)
    for i, touched in enumerate(work.touched):
        if touched:
            split = np.array([isinstance(row.outputs[i], Split) for row in rows])
            shape, itemsize = shapes[i]
            traffic += _per_axis(mesh, split) * (float(np.prod(shape)) * itemsize / topology.memory_bandwidth)
    started = topology.overhead if any(work.touched) else 0.0
    return np.maximum(compute, traffic) + started + exchange_seconds(rows, shapes, mesh)


def _per_axis(mesh: Mesh, split: NDArray[np.bool_]) -> Costs:
    """Share of the whole that one device has, in every joint state."""
    share = np.ones(())
    for size in mesh.sizes:
        share = np.multiply.outer(share, np.where(split, 1.0 / size, 1.0))
    return share


def _mixes_reductions(placements: list[tuple[Placement, ...]], port: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Joint states in which one port is partial in two ways: a sum over maxima is no maximum over sums."""
    kinds = (Partial("sum"), Partial("max"), Partial("min"))
    bits = np.array([1 << kinds.index(p[port]) if p[port] in kinds else 0 for p in placements])
    joint = np.zeros((), dtype=np.int64)
    for _ in mesh.sizes:
        joint = np.bitwise_or.outer(joint, bits)
    return np.asarray(joint & (joint - 1) > 0)


def _divides(here: NDArray[np.bool_], sizes: Ids, length: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Joint states whose axes divide a dim of this length, and the factor that carries the split.

    Args:
      here: rows that split the dim. sizes: per row, what else the axes have to divide (see ``Row``).
    """
    shards = np.ones((), dtype=np.int64)
    limit = np.zeros((), dtype=np.int64)
    for size in mesh.sizes:
        shards = np.multiply.outer(shards, np.where(here, size, 1))
        limit = np.gcd.outer(limit, np.where(here, sizes, 0))
    return np.asarray((length % shards == 0) & (limit % shards == 0))
