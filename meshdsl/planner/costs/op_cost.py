"""Seconds of an operation in every joint signature: the first term of the objective (a roofline model).

    seconds = max(FLOPs / rate, bytes / memory bandwidth) of one device  +  collectives inside its local program

Narrow matrix products run below the rate (``Topology.half_side``); groups of a convolution have a rate of their own.
What is read and written is a matter of fusion (``fusion``).

Sections: the work of an operation at global shapes; exchanges, the collectives of local programs; the table of an
operation, [rows on axis 1, rows on axis 2, ...].
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, reduce
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Op, Value, element_bits, sent_itemsize, walk
from meshdsl.ir.host import TO_DEVICE, TO_HOST, TRANSFERS
from meshdsl.layouts.collective_cost import exchange_price
from meshdsl.layouts.exchange import ExchangeStep, ordered_exchanges
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.sharding_rule import Part, Signature, divides
from meshdsl.layouts.topology import rate_of
from meshdsl.planner.costs.fusion import operands_and_results
from meshdsl.planner.costs.reshard_cost import placement_codes
from meshdsl.planner.costs.traffic import NOTHING, Moved
from meshdsl.trace.annotate import count_trips
from meshdsl.trace.read_jaxpr import read_jaxpr
from meshdsl.util.arrays import Costs, Ids, conv_pairs

DOTS = ("dot_general", "scaled_dot")  # products of two operands

# ---- Work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpWork:
    """The work of an operation at global shapes.

    Args:
      flops: multiply-adds counted twice.
      accesses: per operand and result, how often its bytes are read or written.
      rate: FLOP rate, a field of ``Topology``.
      groups: of a convolution: how many, and the dim of the images that holds them; those of one device run one by one,
        at a FLOP rate of their own. None if there is one.
      sides: of a matrix product or convolution: rows, columns and contracted dims.
      seconds: as specified for a function with a rule; the only cost then.
      loads, stores: tensors that come from the host's memory, and that go there: nothing is computed meanwhile.
      copied: as ``accesses``, of copies before and after the operation; empty if there are none.
      starts: kernels.
    """

    flops: float
    accesses: tuple[float, ...]
    rate: str = "flops32"
    groups: "OperandSizes | None" = None
    sides: tuple["OperandSizes", ...] = ()
    seconds: float | None = None
    loads: tuple[int, ...] = ()
    stores: tuple[int, ...] = ()
    copied: tuple[float, ...] = ()
    starts: int = 0


@dataclass(frozen=True)
class OperandSizes:
    """A side of a matrix product, or groups: the length, and the dims of one operand or result that form it."""

    length: int
    tensor: int
    dims: tuple[int, ...]


def work_of(op: Op, moved: Moved = NOTHING) -> OpWork:
    """Returns the work of an operation, given what it moves."""
    spent = op.params["ruled"].spent if op.name == "ruled" else None
    if spent:
        return OpWork(spent.flops, (0,) * len(operands_and_results(op)), seconds=spent.seconds)
    if op.name in TRANSFERS:
        return OpWork(0.0, (0, 0), loads=(1,) * (op.name == TO_DEVICE), stores=(1,) * (op.name == TO_HOST))
    floats = [v for v in op.inputs if jnp.issubdtype(v.dtype, jnp.inexact)] or op.inputs  # positions do not count
    itemsize = max((element_bits(v.dtype) / 8 for v in floats), default=4.0)
    multiplied = op.inputs if op.name == "scaled_dot" else op.inputs[:2]
    rate = rate_of([str(v.dtype) for v in multiplied], itemsize)
    sizes = _groups(op), _sides(op)
    return OpWork(flops_of(op), moved.accesses, rate, *sizes, copied=moved.copied, starts=moved.starts)


def _groups(op: Op) -> OperandSizes | None:
    if op.name != "conv_general_dilated":
        return None
    batch, feature, *_ = op.params["dimension_numbers"].lhs_spec
    counts = ((op.params["batch_group_count"], batch), (op.params["feature_group_count"], feature))
    return next((OperandSizes(count, 0, (dim,)) for count, dim in counts if count > 1), None)


def _sides(op: Op) -> tuple[OperandSizes, ...]:
    if op.name in DOTS:
        contract, batch = op.params["dimension_numbers"]
        free = [
            tuple(d for d in range(len(v.shape)) if d not in (*summed, *both))
            for v, summed, both in zip(op.inputs[:2], contract, batch, strict=True)
        ]
        return (_side(op, 0, free[0]), _side(op, 1, free[1]), _side(op, 0, tuple(contract[0])))
    if op.name == "conv_general_dilated":
        numbers = op.params["dimension_numbers"]
        kernel, out = numbers.rhs_spec, numbers.out_spec
        return (_side(op, 2, (out[0], *out[2:])), _side(op, 1, kernel[:1]), _side(op, 1, kernel[1:]))
    return ()


def _side(op: Op, tensor: int, dims: tuple[int, ...]) -> OperandSizes:
    shape = operands_and_results(op)[tensor].shape
    return OperandSizes(prod(shape[d] for d in dims), tensor, tuple(dims))


def flops_of(op: Op) -> float:
    """Returns the FLOPs of an operation at global shapes: multiply-adds counted twice."""
    if op.name in DOTS:
        (contract, _), _ = op.params["dimension_numbers"]
        return 2.0 * float(prod(op.outputs[0].shape) * prod(op.inputs[0].shape[i] for i in contract))
    if op.name == "ragged_dot_general":  # each row meets one matrix
        numbers = op.params["ragged_dot_dimension_numbers"]
        (_, contract), (_, batch) = numbers.dot_dimension_numbers
        right, taken = op.inputs[1].shape, {*contract, *batch, *numbers.rhs_group_dimensions}
        return 2.0 * float(prod(op.inputs[0].shape) * prod(n for i, n in enumerate(right) if i not in taken))
    if op.name == "conv_general_dilated":
        numbers, kernel = op.params["dimension_numbers"], op.inputs[1].shape
        batch, features, *_ = (op.outputs[0].shape[dim] for dim in numbers.out_spec)
        return 2.0 * float(batch * features * kernel[numbers.rhs_spec[1]] * _conv_pairs(op))
    if op.name == "ruled":
        return op.params["ruled"].spent.flops if op.params["ruled"].spent else _flops_inside(op)
    return 0.0


def _conv_pairs(op: Op) -> int:
    """Returns how many (output, kernel) positions of a convolution meet an element, not padding or a gap."""
    numbers = op.params["dimension_numbers"]
    sizes = [
        [x.shape[dim] for dim in spec[2:]]
        for x, spec in zip(
            (*op.inputs, *op.outputs), (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True
        )
    ]
    pads = [low for low, _ in op.params["padding"]]
    options = op.params["window_strides"], pads, op.params["lhs_dilation"], op.params["rhs_dilation"]
    return prod(conv_pairs(*dim) for dim in zip(*sizes, *options, strict=True))


def _flops_inside(op: Op) -> float:
    """Returns the FLOPs of a user's function with a rule: the sum over its operations."""
    graph = read_jaxpr(jax.make_jaxpr(op.params["ruled"].multiplying)(*op.inputs))
    count_trips(graph)
    return float(op.params["ruled"].stated.share) * sum(flops_of(inner) * body.trips for body, inner in walk(graph))


# ---- Exchanges -------------------------------------------------------------------------------------------------------
# Collectives inside local programs, such as the halo of a window.


Shapes = tuple[tuple[tuple[int, ...], float], ...]  # shape and itemsize per port
Rows = tuple[Signature, ...]


def exchange_seconds(rows: Rows, shapes: Shapes, mesh: Mesh) -> "Costs | float":
    """Returns the seconds of the exchanges, [rows on axis 1, rows on axis 2, ...].

    They are infinite where exchanges of the rows exclude each other, and where blocks are too small for them.
    """
    listed = dict.fromkeys(row.collectives for row in rows)
    if not any(listed):
        return 0.0
    places = {same: [i for i, row in enumerate(rows) if row.collectives == same] for same in listed}
    total = np.full((len(rows),) * len(mesh.sizes), np.inf)
    for chosen in product(*(listed if size > 1 else [()] for size in mesh.sizes)):
        steps = ordered_exchanges(chosen)
        if steps is not None:
            here = [places[same] for same in chosen]
            rows_per_axis = [tuple(rows[i] for i in at) for at in here]
            costs = (_step_seconds(step, rows_per_axis, shapes[step.exchange.port], mesh) for step in steps)
            total[np.ix_(*here)] = sum(costs, start=np.zeros(()))
    return total


def _step_seconds(
    step: ExchangeStep, rows: Sequence[Rows], array: tuple[tuple[int, ...], float], mesh: Mesh
) -> "Costs | float":
    """Returns the seconds of one exchange, [rows per axis]; blocks are as if exactly its own axes split its dim."""
    (shape, itemsize), e = array, step.exchange
    extents = list(shape)
    for each in (*step.earlier, step):
        if each.exchange.dim is not None:
            extents[each.exchange.dim] //= prod(mesh.sizes[axis] for axis in each.axes)
    extent = extents[e.dim] if e.dim is not None else 1
    parts = e.parts(extent, [mesh.sizes[axis] for axis in step.axes]) if all(extents) else None
    if parts is None:
        return np.inf
    split = ([isinstance(row.outputs[e.port], Split) for row in some] for some in rows)
    shares = (np.where(blocks, 1.0 / size, 1.0) for blocks, size in zip(split, mesh.sizes, strict=True))
    size = prod(shape) * sent_itemsize(itemsize)
    local_bytes = reduce(np.multiply.outer, shares) * size * prod(step.widened(extents)) / prod(extents)
    total = np.zeros_like(local_bytes)
    for part in parts:
        sent = local_bytes * ((part.stop - part.start) / extent if part.stop else 1.0)
        lines = exchange_price(part.kind, tuple(mesh.names[step.axes[i]] for i in part.axes), mesh, part.group).lines
        total += reduce(np.minimum, [fixed + per_byte * sent for fixed, per_byte in lines])
    return np.asarray(total)


# ---- Tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignatureTable:
    """The rows of a node as arrays, shared between equal nodes. A joint state is one row per mesh axis.

    Args:
      seconds: [rows on axis 1, rows on axis 2, ...], infinite where dims do not divide.
      codes: per port, [rows], the placement code.
      reductions: per port, the reductions in which it may be partial.
      first_feasible: the first joint state whose dims divide; usually replicated everywhere.
    """

    seconds: Costs
    codes: tuple[Ids, ...]
    reductions: tuple[frozenset[str], ...]
    first_feasible: tuple[int, ...]

    @property
    def replicated_seconds(self) -> float:
        """Seconds in the first feasible state, in which every device does everything."""
        return float(self.seconds[self.first_feasible])

    @cached_property
    def partial_ports(self) -> tuple[tuple[int, frozenset[str]], ...]:
        """The ports that may be partial, and their reductions."""
        return tuple((p, found) for p, found in enumerate(self.reductions) if found)


def make_table(rows: Rows, shapes: Shapes, work: OpWork, mesh: Mesh) -> SignatureTable:
    """Returns the table of a node with these rows, tensors (shape and itemsize per port) and work."""
    placements = [row.outputs for row in rows]
    codes = tuple(placement_codes([p[i] for p in placements], len(shape)) for i, (shape, _) in enumerate(shapes))
    seconds = work_seconds(rows, shapes, work, mesh) + exchange_seconds(rows, shapes, mesh)
    for i, (shape, _) in enumerate(shapes):
        for dim in set(codes[i].tolist()) & set(range(len(shape))):
            parts = [row.part(i) if split else None for row, split in zip(rows, codes[i] == dim, strict=True)]
            seconds[~_divides(parts, shape[dim], mesh)] = np.inf
    for axis, size in enumerate(mesh.sizes):
        if size == 1:  # an axis of one device: one row is enough
            split = np.array([any(at is not B for at in row.outputs) for row in rows])
            seconds[(slice(None),) * axis + (split,)] = np.inf
    kinds = tuple(
        frozenset(p.reduction for p in ports if isinstance(p, Partial)) for ports in zip(*placements, strict=True)
    )
    for i, found in enumerate(kinds):
        if len(found) > 1:
            seconds[_mixes_reductions(placements, i, mesh)] = np.inf
    return SignatureTable(seconds, codes, kinds, first_state(np.isfinite(seconds)))


_KNOWN_TABLES, _KNOWN_ENTRIES = 1 << 12, 1 << 12  # tables that are remembered, and entries of the largest: 134 MB


def known_table(rows: Rows, shapes: Shapes, work: OpWork, mesh: Mesh) -> SignatureTable:
    """Returns a table as ``make_table`` does; small ones are remembered for other programs in this process.

    Variants of a step, and a step before and after an edit, have most tables in common.
    """
    if len(rows) ** len(mesh.sizes) > _KNOWN_ENTRIES:
        return make_table(rows, shapes, work, mesh)
    return copy(_remembered_table(rows, shapes, work, mesh))  # nodes of a model are told apart by their tables


@lru_cache(_KNOWN_TABLES)
def _remembered_table(rows: Rows, shapes: Shapes, work: OpWork, mesh: Mesh) -> SignatureTable:
    return make_table(rows, shapes, work, mesh)


def work_seconds(rows: Rows, shapes: Shapes, work: OpWork, mesh: Mesh) -> Costs:
    """Returns the seconds of the work in every joint state, without exchanges."""
    topology = mesh.topology
    parallel = np.array([any(isinstance(at, Split) for at in row.outputs) for row in rows])
    one, several = (work.flops / topology.flops(work.rate, grouped) for grouped in (False, True))
    seconds = one if work.groups is None else np.where(_local_length(work.groups, rows, mesh) > 1, several, one)
    compute = local_share(mesh, parallel) * (seconds if work.seconds is None else work.seconds)
    for side in work.sides:
        compute *= 1 + topology.half_side / np.maximum(_local_length(side, rows, mesh), 1)
    traffic = np.zeros_like(compute) + _moving_seconds(rows, shapes, work.accesses, mesh)
    copying = _moving_seconds(rows, shapes, work.copied, mesh) + _transfer_seconds(rows, shapes, work, mesh)
    starts = work.starts + len(work.loads) + len(work.stores)
    return np.asarray(np.maximum(compute, traffic) + topology.overhead * starts + copying)


def _moving_seconds(rows: Rows, shapes: Shapes, counts: Sequence[float], mesh: Mesh) -> "Costs | float":
    """Returns the seconds of moving tensors from or to memory so many times, in every joint state."""
    total: Costs | float = 0.0
    for i, count in enumerate(counts):
        if count:
            split = np.array([isinstance(row.outputs[i], Split) for row in rows])
            shape, itemsize = shapes[i]
            seconds = count * float(np.prod(shape)) * itemsize / mesh.topology.memory_bandwidth
            total = total + local_share(mesh, split) * seconds
    return total


def _transfer_seconds(rows: Rows, shapes: Shapes, work: OpWork, mesh: Mesh) -> "Costs | float":
    """Returns the seconds on the link to the host's memory in every joint state."""
    topology = mesh.topology
    total: Costs | float = 0.0
    for ports, bandwidth in ((work.loads, topology.host_load), (work.stores, topology.host_store)):
        for i in ports:
            split = np.array([isinstance(row.outputs[i], Split) for row in rows])
            shape, itemsize = shapes[i]
            total = total + local_share(mesh, split) * (float(np.prod(shape)) * itemsize / bandwidth)
    return total


def _local_length(sizes: OperandSizes, rows: Rows, mesh: Mesh) -> Costs:
    """Returns the length on one device in every joint state."""
    dims = {Split(dim) for dim in sizes.dims}
    split = np.array([row.outputs[sizes.tensor] in dims for row in rows])
    return sizes.length * local_share(mesh, split)


def unsharded_seconds(op: Op, work: OpWork, mesh: Mesh) -> float:
    """Returns the seconds of an operation on one device with all operands unsharded."""
    shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in operands_and_results(op))
    return float(work_seconds((Signature((), (B,) * len(shapes)),), shapes, work, mesh).ravel()[0])


def local_share(mesh: Mesh, split: NDArray[np.bool_]) -> Costs:
    """Returns the share of the whole on one device, in every joint state, given the rows that split it."""
    share = np.ones(())
    for size in mesh.sizes:
        share = np.multiply.outer(share, np.where(split, 1.0 / size, 1.0))
    return share


def _mixes_reductions(placements: list[tuple[Placement, ...]], port: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Returns the joint states in which a port is partial in two ways: a sum of maxima is no maximum of sums."""
    kinds = (Partial("sum"), Partial("max"), Partial("min"))
    bits = np.array([1 << kinds.index(p[port]) if p[port] in kinds else 0 for p in placements])
    joint = np.zeros((), dtype=np.int64)
    for _ in mesh.sizes:
        joint = np.bitwise_or.outer(joint, bits)
    return np.asarray(joint & (joint - 1) > 0)


def _divides(parts: "Sequence[Part | None]", length: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Returns the joint states whose axes divide a dim of this length.

    Args:
      parts: by row, the part of the dim that it splits, if any.
    """
    kinds = list(dict.fromkeys(parts))
    at = [kinds.index(part) for part in parts]
    return _dividing(tuple(kinds), length, mesh.sizes)[np.ix_(*[at] * len(mesh.sizes))]


@cache
def _dividing(kinds: "tuple[Part | None, ...]", length: int, sizes: tuple[int, ...]) -> NDArray[np.bool_]:
    """Returns whether axes of these sizes divide a dim, by the part that each of them splits."""
    joint = product(kinds, repeat=len(sizes))
    splits = ([(size, part) for size, part in zip(sizes, parts, strict=True) if part] for parts in joint)
    return np.array([divides(length, each) for each in splits]).reshape((len(kinds),) * len(sizes))


def first_state(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    """Returns the first joint state in the mask; the first of all if it is empty."""
    return tuple(int(i) for i in np.argwhere(mask)[0]) if mask.any() else (0,) * mask.ndim
