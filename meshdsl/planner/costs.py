"""What an operation costs at local shapes: the compute and memory-traffic term of the objective.

Seconds of an operation = max(FLOPs / rate, bytes / memory bandwidth) of what one device does;
thin matrix products run below the rate (``Topology.half_side``), convolutions in groups at one of their own.
A compiler fuses elementwise chains, so charging every equation's bytes would over-count:
only *materialised* values are read and written. A value is materialised if an operation that
cannot be fused makes it or reads it whole, if it has several readers, or if it enters or
leaves a graph.
"""

from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from math import prod
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir import Graph, Literal, Op, Value, walk
from meshdsl.planner.numbering import Flags, Numbering, numbering_of
from meshdsl.rules import RULES
from meshdsl.trace.read import read_jaxpr
from meshdsl.trace.trips import count_trips

HEAVY = frozenset(
    "dot_general ragged_dot conv_general_dilated gather sort top_k approx_top_k fft "
    "cholesky triangular_solve qr svd eigh lu "
    "cumsum cumprod cummax cummin cumlogsumexp random_bits random_split rng_bit_generator argmax argmin "
    "dynamic_update_slice concatenate roll pad select_and_scatter_add optimization_barrier io_callback ruled".split()
)
PRODUCTS = ("dot_general", "conv_general_dilated")
TAKES_PART = frozenset("gather dynamic_slice slice".split())
READS_PART = TAKES_PART | set("dynamic_update_slice scatter scatter-add scatter_add pad".split())
VIEWS = frozenset("reshape squeeze expand_dims".split())  # what wrote the operand writes it as it is read here
WRITES_PART = {"dynamic_update_slice": 1, "scatter": 2}  # what is written: the rest of the result lies there already


@dataclass(frozen=True)
class Work:
    """What an operation does at global shapes.

    Args:
      flops: multiply-adds counted twice.
      touched: per operand and result, how often its bytes are read or written.
      itemsize: bytes per element of the operands, which decides the FLOP rate.
      grouped: a convolution in groups, which has a FLOP rate of its own.
      sides: of a matrix product or convolution: rows, columns and what is summed.
      seconds: that were stated, of a function with a rule; then they are all that counts.
    """

    flops: float
    touched: tuple[int, ...]
    itemsize: int
    grouped: bool = False
    sides: tuple["Side", ...] = ()
    seconds: float | None = None


@dataclass(frozen=True)
class Side:
    """A side of a matrix product: its length, and the dims of one operand or result that make it up."""

    length: int
    tensor: int
    dims: tuple[int, ...]


def is_heavy(name: str) -> bool:
    """Whether operations of this name end a chain of fused ones."""
    return name in HEAVY or name not in RULES or name.startswith(("reduce_", "scatter"))


_WRITTEN: WeakKeyDictionary[Graph, dict[bool, Flags]] = WeakKeyDictionary()


def materialised(graph: Graph, again: bool = False) -> frozenset[int]:
    """Ids of the values that are ``written`` to memory."""
    return frozenset(numbering_of(graph).ids(written(graph, again)))


def written(graph: Graph, again: bool = False) -> Flags:
    """The values that are written to memory, in this graph and its bodies, by number; worked out once.

    Args:
      again: what could be fused is kept neither for several readers, each of which computes it again, nor for products.
    """
    known = _WRITTEN.setdefault(graph, {})
    if again not in known:
        known[again] = _written(numbering_of(graph), again)
    return known[again]


def _written(numbers: Numbering, again: bool) -> Flags:
    heavy = {name for name in numbers.names if is_heavy(name)} - {""}
    fusing = {name for name in heavy if name.startswith("reduce_") or (again and name in PRODUCTS)}
    found = numbers.named(heavy | {""})[numbers.made]  # by heavy operations, or coming in
    found[numbers.read[numbers.named(heavy - fusing)[numbers.at]]] = True
    if not again:
        first, last = np.zeros(found.size, dtype=np.intp), np.zeros(found.size, dtype=np.intp)
        first[numbers.read[::-1]], last[numbers.read] = numbers.at[::-1], numbers.at
        found |= first != last  # several read them
    return found


def work_of(op: Op, kept: Set[int]) -> Work:
    """The work of one operation; ``kept`` are the materialised values."""
    spent = op.params["ruled"].spent if op.name == "ruled" else None
    if spent:
        return Work(spent.flops, (0,) * len(tensors(op)), 4, seconds=spent.seconds)
    reads = [_is_kept(v, kept) for v in op.inputs]
    if op.name in READS_PART and reads:
        reads[0] = False
    writes = [v.id in kept for v in op.outputs]
    touched = [*map(int, reads), *map(int, writes)]
    if op.name in TAKES_PART and _is_kept(op.inputs[0], kept):
        touched[len(reads)] += 1  # as much is read as is made
    elif op.name in VIEWS:
        touched = [0] * len(touched)
    elif op.name in WRITES_PART:  # in place; where the operand is needed later, its copy is the memory's concern
        touched = [0] * len(touched)
        touched[WRITES_PART[op.name]] = 2
    numbers = [
        v for v in op.inputs if jnp.issubdtype(v.dtype, jnp.inexact)
    ] or op.inputs  # not of positions beside them
    itemsize = max((v.dtype.itemsize for v in numbers if hasattr(v.dtype, "itemsize")), default=4)
    return Work(_flops(op), tuple(touched), itemsize, _in_groups(op), _sides(op))


def room_of(op: Op) -> int:
    """Bytes that an operation needs while it runs beside operands and results, divided as its first result is."""
    spent = op.params["ruled"].spent if op.name == "ruled" else None
    return int(spent.room) if spent else 0


def _is_kept(x: Value | Literal, kept: Set[int]) -> bool:
    return isinstance(x, Value) and x.id in kept


def _in_groups(op: Op) -> bool:
    return any(op.params.get(name, 1) > 1 for name in ("feature_group_count", "batch_group_count"))


def _sides(op: Op) -> tuple[Side, ...]:
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


def _side(op: Op, tensor: int, dims: tuple[int, ...]) -> Side:
    shape = tensors(op)[tensor].shape
    return Side(prod(shape[d] for d in dims), tensor, tuple(dims))


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
    options = (op.params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation"))
    return prod(_meet(*dim) for dim in zip(*sizes, *options, strict=True))


@cache
def _meet(size: int, kernel: int, out: int, stride: int, pad: tuple[int, int], spread: int, apart: int) -> int:
    """Of one dim."""
    at = np.arange(out)[:, None] * stride - pad[0] + np.arange(kernel) * apart
    return int(((at >= 0) & (at <= (size - 1) * spread) & (at % spread == 0)).sum())


def _flops_inside(op: Op) -> float:
    """Of a user's function with a rule: the sum over its operations."""
    graph = read_jaxpr(jax.make_jaxpr(op.params["ruled"].function)(*op.inputs))
    count_trips(graph)
    return float(op.params["ruled"].stated.share) * sum(_flops(inner) * body.trips for body, inner in walk(graph))


def tensors(op: Op) -> "tuple[Value | Literal, ...]":
    """Operands and results in one sequence, as rows list them."""
    return (*op.inputs, *op.outputs)
