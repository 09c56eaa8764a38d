"""The table of a node as arrays: what each joint state costs, and which divide its dims."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from meshdsl.ir import Op, Value
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.rule import Signature
from meshdsl.planner.costs import Work, tensors
from meshdsl.planner.distances import codes_of
from meshdsl.planner.exact import Costs, Ids
from meshdsl.planner.exchanges import exchange_seconds


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

    @property
    def whole(self) -> float:
        """Seconds in the first state: of doing everything everywhere."""
        return float(self.seconds[self.first])

    @cached_property
    def partial(self) -> tuple[tuple[int, frozenset[str]], ...]:
        """The ports that may be partial, and the reductions."""
        return tuple((p, found) for p, found in enumerate(self.kinds) if found)


def make_table(
    rows: tuple[Signature, ...], shapes: tuple[tuple[tuple[int, ...], int], ...], work: Work, mesh: Mesh
) -> Table:
    """The table of a node with these rows, tensors (shape and itemsize per port) and work."""
    placements = [row.outputs for row in rows]
    codes = tuple(codes_of([p[i] for p in placements], len(shape)) for i, (shape, _) in enumerate(shapes))
    seconds = work_seconds(rows, shapes, work, mesh) + exchange_seconds(rows, shapes, mesh)
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
    return Table(seconds, codes, kinds, first_state(np.isfinite(seconds)))


def work_seconds(
    rows: tuple[Signature, ...], shapes: tuple[tuple[tuple[int, ...], int], ...], work: Work, mesh: Mesh
) -> Costs:
    """Seconds of the work in every joint state, without what local programs exchange."""
    topology = mesh.topology
    parallel = np.array([any(isinstance(at, Split) for at in row.outputs) for row in rows])
    seconds = work.flops / topology.flops(work.itemsize, work.grouped) if work.seconds is None else work.seconds
    compute = per_axis(mesh, parallel) * seconds
    for side in work.sides:
        dims = {Split(dim) for dim in side.dims}
        split = np.array([row.outputs[side.tensor] in dims for row in rows])
        compute *= 1 + topology.half_side / np.maximum(side.length * per_axis(mesh, split), 1)
    traffic = np.zeros_like(compute)
    for i, touched in enumerate(work.touched):
        if touched:
            split = np.array([isinstance(row.outputs[i], Split) for row in rows])
            shape, itemsize = shapes[i]
            traffic += per_axis(mesh, split) * (touched * float(np.prod(shape)) * itemsize / topology.memory_bandwidth)
    started = topology.overhead if any(work.touched) else 0.0
    return np.asarray(np.maximum(compute, traffic) + started)


def alone_seconds(op: Op, work: Work, mesh: Mesh) -> float:
    """Seconds of the work of an operation on one device that has everything whole."""
    shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in tensors(op))
    return float(work_seconds((Signature((), (B,) * len(shapes)),), shapes, work, mesh).ravel()[0])


def per_axis(mesh: Mesh, split: NDArray[np.bool_]) -> Costs:
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
      here: rows that split the dim. sizes: per row, what else the axes have to divide (see ``Signature``).
    """
    shards = np.ones((), dtype=np.int64)
    limit = np.zeros((), dtype=np.int64)
    for size in mesh.sizes:
        shards = np.multiply.outer(shards, np.where(here, size, 1))
        limit = np.gcd.outer(limit, np.where(here, sizes, 0))
    return np.asarray((length % shards == 0) & (limit % shards == 0))


def first_state(fine: NDArray[np.bool_]) -> tuple[int, ...]:
    """The first joint state that is fine; the first of all if none is."""
    return tuple(int(i) for i in np.argwhere(fine)[0]) if fine.any() else (0,) * fine.ndim
