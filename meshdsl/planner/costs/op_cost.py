"""What an operation costs at local shapes: the compute and memory-traffic term of the objective.

Seconds of an operation = max(FLOPs / rate, bytes / memory bandwidth) of what one device does;
thin matrix products run below the rate (``Topology.half_side``), convolutions in groups at one of their own.
A compiler fuses elementwise chains, so charging every equation's bytes would over-count:
only *materialised* values are read and written. A value is materialised if an operation that
cannot be fused makes it or reads it whole, if it has several readers, or if it enters or
leaves a graph.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from math import prod
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from meshdsl.ir.graph import Graph, Literal, Op, Value, walk
from meshdsl.ir.index import Flags, GraphIndex, graph_index
from meshdsl.layouts.collective_cost import price
from meshdsl.layouts.exchange import ExchangeStep, ordered_exchanges
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Partial, Placement, Split
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.planner.costs.reshard_cost import placement_codes
from meshdsl.rules import RULES
from meshdsl.trace.annotate import count_trips
from meshdsl.trace.read_jaxpr import read_jaxpr
from meshdsl.util.arrays import Costs, Ids, conv_pairs

# ---- Costs -----------------------------------------------------------------------------------------------------------


FUSION_BARRIERS = frozenset(
    "dot_general ragged_dot conv_general_dilated gather sort top_k approx_top_k fft "
    "cholesky triangular_solve qr svd eigh lu "
    "cumsum cumprod cummax cummin cumlogsumexp random_bits random_split rng_bit_generator argmax argmin "
    "dynamic_update_slice concatenate roll pad select_and_scatter_add optimization_barrier io_callback ruled".split()
)
PRODUCTS = ("dot_general", "conv_general_dilated")
SLICES_OPERAND = frozenset("gather dynamic_slice slice".split())
READS_PART_OF_OPERAND = SLICES_OPERAND | set("dynamic_update_slice scatter scatter-add scatter_add pad".split())
VIEWS = frozenset("reshape squeeze expand_dims".split())  # what wrote the operand writes it as it is read here
IN_PLACE_UPDATES = {
    "dynamic_update_slice": 1,
    "scatter": 2,
}  # what is written: the rest of the result lies there already


@dataclass(frozen=True)
class OpWork:
    """What an operation does at global shapes.

    Args:
      flops: multiply-adds counted twice.
      accesses: per operand and result, how often its bytes are read or written.
      itemsize: bytes per element of the operands, which decides the FLOP rate.
      grouped: a convolution in groups, which has a FLOP rate of its own.
      sides: of a matrix product or convolution: rows, columns and what is summed.
      seconds: that were stated, of a function with a rule; then they are all that counts.
    """

    flops: float
    accesses: tuple[int, ...]
    itemsize: int
    grouped: bool = False
    sides: tuple["OperandSizes", ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class OperandSizes:
    """A side of a matrix product: its length, and the dims of one operand or result that make it up."""

    length: int
    tensor: int
    dims: tuple[int, ...]


def ends_fusion(name: str) -> bool:
    """Whether operations of this name end a chain of fused ones."""
    return name in FUSION_BARRIERS or name not in RULES or name.startswith(("reduce_", "scatter"))


_WRITTEN: WeakKeyDictionary[Graph, dict[bool, Flags]] = WeakKeyDictionary()


def materialized_ids(graph: Graph, again: bool = False) -> frozenset[int]:
    """Ids of the values that are ``materialized`` to memory."""
    return frozenset(graph_index(graph).ids(materialized(graph, again)))


def materialized(graph: Graph, again: bool = False) -> Flags:
    """The values that are written to memory, in this graph and its bodies, by number; worked out once.

    Args:
      again: what could be fused is kept neither for several readers, each of which computes it again, nor for products.
    """
    known = _WRITTEN.setdefault(graph, {})
    if again not in known:
        known[again] = _written(graph_index(graph), again)
    return known[again]


def _written(numbers: GraphIndex, again: bool) -> Flags:
    heavy = {name for name in numbers.op_names if ends_fusion(name)} - {""}
    fusing = {name for name in heavy if name.startswith("reduce_") or (again and name in PRODUCTS)}
    found = numbers.positions_named(heavy | {""})[numbers.producer]  # by heavy operations, or coming in
    found[numbers.use_value[numbers.positions_named(heavy - fusing)[numbers.use_position]]] = True
    if not again:
        first, last = np.zeros(found.size, dtype=np.intp), np.zeros(found.size, dtype=np.intp)
        first[numbers.use_value[::-1]], last[numbers.use_value] = numbers.use_position[::-1], numbers.use_position
        found |= first != last  # several read them
    return found


def work_of(op: Op, kept: Set[int]) -> OpWork:
    """The work of one operation; ``kept`` are the materialised values."""
    spent = op.params["ruled"].spent if op.name == "ruled" else None
    if spent:
        return OpWork(spent.flops, (0,) * len(operands_and_results(op)), 4, seconds=spent.seconds)
    reads = [_is_kept(v, kept) for v in op.inputs]
    if op.name in READS_PART_OF_OPERAND and reads:
        reads[0] = False
    writes = [v.id in kept for v in op.outputs]
    touched = [*map(int, reads), *map(int, writes)]
    if op.name in SLICES_OPERAND and _is_kept(op.inputs[0], kept):
        touched[len(reads)] += 1  # as much is read as is made
    elif op.name in VIEWS:
        touched = [0] * len(touched)
    elif op.name in IN_PLACE_UPDATES:  # in place; where the operand is needed later, its copy is the memory's concern
        touched = [0] * len(touched)
        touched[IN_PLACE_UPDATES[op.name]] = 2
    numbers = [
        v for v in op.inputs if jnp.issubdtype(v.dtype, jnp.inexact)
    ] or op.inputs  # not of positions beside them
    itemsize = max((v.dtype.itemsize for v in numbers if hasattr(v.dtype, "itemsize")), default=4)
    return OpWork(_flops(op), tuple(touched), itemsize, _in_groups(op), _sides(op))


def workspace_bytes(op: Op) -> int:
    """Bytes that an operation needs while it runs beside operands and results, divided as its first result is."""
    spent = op.params["ruled"].spent if op.name == "ruled" else None
    return int(spent.room) if spent else 0


def _is_kept(x: Value | Literal, kept: Set[int]) -> bool:
    return isinstance(x, Value) and x.id in kept


def _in_groups(op: Op) -> bool:
    return any(op.params.get(name, 1) > 1 for name in ("feature_group_count", "batch_group_count"))


def _sides(op: Op) -> tuple[OperandSizes, ...]:
    if op.name == "dot_general":
        contract, batch = op.params["dimension_numbers"]
        free = [
            tuple(d for d in range(len(v.shape)) if d not in (*summed, *both))
            for v, summed, both in zip(op.inputs, contract, batch, strict=True)
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


def _flops(op: Op) -> float:
    if op.name == "dot_general":
        (contract, _), _ = op.params["dimension_numbers"]
        return 2.0 * float(prod(op.outputs[0].shape) * prod(op.inputs[0].shape[i] for i in contract))
    if op.name == "conv_general_dilated":
        numbers, kernel = op.params["dimension_numbers"], op.inputs[1].shape
        batch, features, *_ = (op.outputs[0].shape[dim] for dim in numbers.out_spec)
        return 2.0 * float(batch * features * kernel[numbers.rhs_spec[1]] * _places(op))
    return _flops_inside(op) if op.name == "ruled" else 0.0


def _places(op: Op) -> int:
    """How many (output place, kernel place) pairs of a convolution meet an element: not padding, nor a gap."""
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
    """Of a user's function with a rule: the sum over its operations."""
    graph = read_jaxpr(jax.make_jaxpr(op.params["ruled"].function)(*op.inputs))
    count_trips(graph)
    return float(op.params["ruled"].stated.share) * sum(_flops(inner) * body.trips for body, inner in walk(graph))


def operands_and_results(op: Op) -> "tuple[Value | Literal, ...]":
    """Operands and results in one sequence, as rows list them."""
    return (*op.inputs, *op.outputs)


# ---- Exchanges -------------------------------------------------------------------------------------------------------
# What the collectives inside local programs cost, in every joint state of an operation.


Shapes = tuple[tuple[tuple[int, ...], int], ...]  # shape and itemsize per port
Rows = tuple[Signature, ...]


def exchange_seconds(rows: Rows, shapes: Shapes, mesh: Mesh) -> "Costs | float":
    """Seconds of the exchanges, one array dim per mesh axis, over rows.

    Infinite where rows meet whose exchanges cannot, and where blocks are too small for them.
    """
    listed = dict.fromkeys(row.collectives for row in rows)
    if not any(listed):
        return 0.0
    places = {same: [i for i, row in enumerate(rows) if row.collectives == same] for same in listed}
    total = np.full((len(rows),) * len(mesh.sizes), np.inf)
    for chosen in product(*(listed if size > 1 else [()] for size in mesh.sizes)):
        turns = ordered_exchanges(chosen)
        if turns is not None:
            here = [places[same] for same in chosen]
            met = [tuple(rows[i] for i in at) for at in here]
            costs = (_seconds(turn, met, shapes[turn.exchange.port], mesh) for turn in turns)
            total[np.ix_(*here)] = sum(costs, start=np.zeros(()))
    return total


def _seconds(
    turn: ExchangeStep, rows: Sequence[Rows], array: tuple[tuple[int, ...], int], mesh: Mesh
) -> "Costs | float":
    """Of one exchange, where each axis takes one of its ``rows``, as if exactly its own axes split its dim."""
    (shape, itemsize), e = array, turn.exchange
    extents = list(shape)
    for each in (*turn.earlier, turn):
        if each.exchange.dim is not None:
            extents[each.exchange.dim] //= prod(mesh.sizes[axis] for axis in each.axes)
    extent = extents[e.dim] if e.dim is not None else 1
    parts = e.parts(extent, [mesh.sizes[axis] for axis in turn.axes]) if all(extents) else None
    if parts is None:
        return np.inf
    split = ([isinstance(row.outputs[e.port], Split) for row in some] for some in rows)
    shares = (np.where(blocks, 1.0 / size, 1.0) for blocks, size in zip(split, mesh.sizes, strict=True))
    held = reduce(np.multiply.outer, shares) * prod(shape) * itemsize * prod(turn.widened(extents)) / prod(extents)
    total = np.zeros_like(held)
    for part in parts:
        given = held * ((part.stop - part.start) / extent if part.stop else 1.0)
        lines = price(part.kind, tuple(mesh.names[turn.axes[i]] for i in part.axes), mesh).lines
        total += reduce(np.minimum, [fixed + per_byte * given for fixed, per_byte in lines])
    return np.asarray(total)


# ---- Tables ----------------------------------------------------------------------------------------------------------
# The table of a node as arrays: what each joint state costs, and which divide its dims.


@dataclass(frozen=True)
class SignatureTable:
    """Rows of a node as arrays, shared between equal nodes.

    Args:
      seconds: one array dim per mesh axis, over rows; infinite where dims do not divide.
      codes: per port, the placement code of every row.
      reductions: per port, the reductions in which it may be partial.
      first_feasible: the first state whose dims divide.
    """

    seconds: Costs
    codes: tuple[Ids, ...]
    reductions: tuple[frozenset[str], ...]
    first_feasible: tuple[int, ...]

    @property
    def replicated_seconds(self) -> float:
        """Seconds in the first state: of doing everything everywhere."""
        return float(self.seconds[self.first_feasible])

    @cached_property
    def partial_ports(self) -> tuple[tuple[int, frozenset[str]], ...]:
        """The ports that may be partial, and the reductions."""
        return tuple((p, found) for p, found in enumerate(self.reductions) if found)


def make_table(
    rows: tuple[Signature, ...], shapes: tuple[tuple[tuple[int, ...], int], ...], work: OpWork, mesh: Mesh
) -> SignatureTable:
    """The table of a node with these rows, tensors (shape and itemsize per port) and work."""
    placements = [row.outputs for row in rows]
    codes = tuple(placement_codes([p[i] for p in placements], len(shape)) for i, (shape, _) in enumerate(shapes))
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
    return SignatureTable(seconds, codes, kinds, first_state(np.isfinite(seconds)))


def work_seconds(
    rows: tuple[Signature, ...], shapes: tuple[tuple[tuple[int, ...], int], ...], work: OpWork, mesh: Mesh
) -> Costs:
    """Seconds of the work in every joint state, without what local programs exchange."""
    topology = mesh.topology
    parallel = np.array([any(isinstance(at, Split) for at in row.outputs) for row in rows])
    seconds = work.flops / topology.flops(work.itemsize, work.grouped) if work.seconds is None else work.seconds
    compute = local_share(mesh, parallel) * seconds
    for side in work.sides:
        dims = {Split(dim) for dim in side.dims}
        split = np.array([row.outputs[side.tensor] in dims for row in rows])
        compute *= 1 + topology.half_side / np.maximum(side.length * local_share(mesh, split), 1)
    traffic = np.zeros_like(compute)
    for i, touched in enumerate(work.accesses):
        if touched:
            split = np.array([isinstance(row.outputs[i], Split) for row in rows])
            shape, itemsize = shapes[i]
            traffic += local_share(mesh, split) * (
                touched * float(np.prod(shape)) * itemsize / topology.memory_bandwidth
            )
    started = topology.overhead if any(work.accesses) else 0.0
    return np.asarray(np.maximum(compute, traffic) + started)


def unsharded_seconds(op: Op, work: OpWork, mesh: Mesh) -> float:
    """Seconds of the work of an operation on one device that has everything whole."""
    shapes = tuple((x.shape, x.itemsize if isinstance(x, Value) else 0) for x in operands_and_results(op))
    return float(work_seconds((Signature((), (B,) * len(shapes)),), shapes, work, mesh).ravel()[0])


def local_share(mesh: Mesh, split: NDArray[np.bool_]) -> Costs:
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
