"""Dim groups: which dims have to be padded together, and what their padding has to hold.

The factors of an operation's rule say which dims of operands and results are the same dim. If the operation treats
every position of a factor alike, these dims form a *dim group*, and the operation runs on the longer dims unchanged,
except for parameters that spell out shapes. If it combines positions, the group also says what the padding of the
operands has to hold, so that the combined positions beyond the length do not matter:

    add          [n] [n] -> [n]          one group: both operands and the result             any padding
    dot_general  [m, k] [k, n] -> [m, n] three groups: m, n, k                               k: zeros
    reduce_max   [m, n] -> [m]           two groups: m; n of the operand                     n: -inf
    gather       [n, d] [b, 1] -> [b, d] groups b, d; n with the indices that address it     n: indices out of bounds

Operations and dims that are not listed here have no group: they keep the length that was written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.ir.loops import ABSENT, PortRole, loop_ports
from meshdsl.layouts.sharding_rule import Rule
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.indexing import SCATTERS, Lookup, gather_dims, scatter_dims
from meshdsl.rules.linalg import CORE
from meshdsl.rules.reduction import top_k_dim
from meshdsl.rules.registry import RULES
from meshdsl.util.lazy import memoize_by_object

# ---- Dim groups ------------------------------------------------------------------------------------------------------

DimAt = tuple[int, int]  # an operand, or counted on behind them a result, and its dim
BodyDimAt = tuple[int, DimAt]  # a body, and one of its inputs, or counted on behind them a value that it returns


@dataclass(frozen=True)
class DimGroup:
    """Dims of one operation, and of its bodies, that are padded together.

    Args:
      size: their length.
      ports: where they are.
      fill: what the padding of the operands has to hold; None if it may hold anything.
      others: operands, with what theirs has to hold instead.
      column: for a gather or scatter, the column of the indices whose positions are in this dim.
      inside: where the bodies of a loop or conditional have them.
    """

    size: int
    ports: tuple[DimAt, ...]
    fill: Any = None
    column: int | None = None
    inside: tuple[BodyDimAt, ...] = ()
    others: tuple[tuple[int, Any], ...] = ()


ELEMENTWISE = frozenset(name for name, make in RULES.items() if make is elementwise)
DATA_MOVEMENT = frozenset(
    "broadcast_in_dim iota transpose reshape squeeze rev slice dynamic_slice dynamic_update_slice pad concatenate "
    "split stack unstack tile cumsum cumprod cummax cummin cumlogsumexp sort".split()
)
DECOMPOSITIONS = frozenset("fft triangular_solve".split()) | CORE.keys()  # of the matrices of a batch
LOOKUPS = ("gather", *SCATTERS)


@memoize_by_object
def dim_groups(op: Op) -> tuple[DimGroup, ...]:
    """Returns the groups of an operation; none if it is not listed here, or has effects and no bodies.

    Operations inside the user's shard_map have none either: their shapes are those of blocks, which the user chose.
    """
    if op.manual:
        return ()
    if op.bodies:
        found = _of_loop(op)
    else:
        known = (op.name in RULES or op.name == "constrain") and not op.effects
        found = _of_operation(op) if known else iter(())
    atoms = (*op.inputs, *op.outputs)
    keys = {i for i, x in enumerate(atoms) if jnp.issubdtype(x.dtype, jax.dtypes.extended)}
    if keys and not op.bodies:
        return ()

    def has_its_size(group: DimGroup) -> bool:
        return all(i not in keys and atoms[i].shape[d] == group.size for i, d in group.ports)

    return tuple(filter(has_its_size, found))


def _of_operation(op: Op) -> Iterator[DimGroup]:
    if op.name == "constrain":
        yield from (DimGroup(n, ((0, d), (1, d))) for d, n in enumerate(op.inputs[0].shape))
    elif op.name in ELEMENTWISE or op.name in DATA_MOVEMENT:
        yield from _preserved(op)
        if op.name in RUNNING:
            yield from _running(op)
    elif op.name in ("dot_general", "conv_general_dilated"):
        yield from _preserved(op)
        yield from _contracted(op)
    elif op.name in POOLINGS:
        yield from _pooled(op)
    elif op.name in DECOMPOSITIONS:
        yield from _preserved(op)
    elif op.name in REDUCTIONS:
        yield from _preserved(op)
        yield from _reduced(op, op.params["axes"])
    elif op.name == "top_k":
        yield from _preserved(op)
        yield from _reduced(op, (top_k_dim(op),))
    elif op.name in LOOKUPS:
        yield from _preserved(op)
        yield from _addressed(op)
        yield from _added(op)


# ---- Loops: an array is as long inside as outside --------------------------------------------------------------------
# So a parameter is padded once, before the loop, and a carry stays padded through all iterations.


def _of_loop(op: Op) -> Iterator[DimGroup]:
    """Yields a group per dim of every array that passes the boundary of a loop or conditional."""
    atoms = (*op.inputs, *op.outputs)
    for port in loop_ports(op):
        if port.role is PortRole.PREDICATE:
            continue
        positions = [port.operand] if port.operand != ABSENT else []
        positions += [len(op.inputs) + port.result] if port.result != ABSENT else []
        places = [*port.inputs, *((body, len(op.bodies[body].inputs) + j) for body, j in port.outputs)]
        leading = int(port.stacked)
        for d, n in enumerate(atoms[positions[0]].shape[leading:]):
            inside = tuple((body, (position, d)) for body, position in places)
            yield DimGroup(n, tuple((i, d + leading) for i in positions), inside=inside)


# ---- Operations: factors of the rule ---------------------------------------------------------------------------------


def _preserved(op: Op) -> Iterator[DimGroup]:
    """Yields groups of factors that the results have: every position is treated alike."""
    rule = RULES[op.name](op)
    first_result = len(rule.inputs)
    promised = op.name in LOOKUPS and bool(op.params.get("indices_are_sorted") or op.params.get("unique_indices"))
    for name, ports in _factors(rule).items():
        breaks_promise = promised and any(i == 1 for i, _ in ports)  # padded indices are neither sorted nor unique
        if any(i >= first_result for i, _ in ports) and name not in rule.reduced and not breaks_promise:
            yield _group(op, ports)


def _contracted(op: Op) -> Iterator[DimGroup]:
    """Yields groups of factors that a product sums away: zeros in both operands, since 0 * inf is NaN."""
    rule = RULES[op.name](op)
    zero = np.zeros((), op.outputs[0].dtype)
    yield from (_group(op, ports, zero) for name, ports in _factors(rule).items() if name in rule.reduced)


def _pooled(op: Op) -> Iterator[DimGroup]:
    """Yields groups of dims whose windows are single elements."""
    arrays = [i for i, x in enumerate((*op.inputs, *op.outputs)) if x.shape]
    yield from (_group(op, [(i, d) for i in arrays]) for d in range(len(op.outputs[0].shape)) if _is_alone(op, d))


def _is_alone(op: Op, d: int) -> bool:
    names = ("window_dimensions", "window_strides", "window_dilation", "base_dilation")
    return not any(op.params["padding"][d]) and all(op.params[name][d] == 1 for name in names if name in op.params)


def _reduced(op: Op, dims: Iterable[int]) -> Iterator[DimGroup]:
    """Yields groups of dims of the operand that are reduced: filled with the identity of the reduction."""
    fill = FILLS[op.name](op.inputs[0].dtype)
    if fill is not None:
        yield from (_group(op, ((0, d),), fill) for d in dims)


def _running(op: Op) -> Iterator[DimGroup]:
    """Yields the dim along which a reduction runs, filled with its identity."""
    d = int(op.params["axis"])
    fill = RUNNING[op.name](op.inputs[0].dtype)
    if fill is not None:
        yield _group(op, ((0, d), (1, d)), fill)


def _added(op: Op) -> Iterator[DimGroup]:
    """Yields the batch dims of updates that are added up: zeros beside them add nothing, wherever they go."""
    if op.name not in ("scatter-add", "scatter-sub") or op.params["unique_indices"] or op.params["indices_are_sorted"]:
        return
    rule, zero = RULES[op.name](op), np.zeros((), op.inputs[2].dtype)
    for ports in _factors(rule).values():
        if [i for i, _ in ports] == [1, 2]:
            yield _group(op, ports, zero)


def _addressed(op: Op) -> Iterator[DimGroup]:
    """Yields groups of dims that a column of the indices addresses, if its dtype can name positions in the padding."""
    dims = lookup_dims(op)
    largest = np.iinfo(op.inputs[1].dtype).max
    ports = (0,) if op.name == "gather" else (0, 3)
    for d in dims.looked_up:
        n = op.inputs[0].shape[d]
        if 2 * n <= largest:
            yield DimGroup(n, tuple((i, d) for i in ports), column=dims.columns.index(d))


def lookup_dims(op: Op) -> Lookup:
    """Returns what the dims of a gather or scatter mean."""
    return gather_dims(op) if op.name == "gather" else scatter_dims(op)


def _group(op: Op, ports: Sequence[DimAt], fill: Any = None) -> DimGroup:
    i, d = ports[0]
    return DimGroup((*op.inputs, *op.outputs)[i].shape[d], tuple(ports), fill)


def _factors(rule: Rule) -> dict[str, list[DimAt]]:
    """Returns where each factor is, without those that share a dim with another, or have length 1."""
    found: dict[str, list[DimAt]] = {}
    shared: set[str] = set()
    for i, dims in enumerate((*rule.inputs, *rule.outputs)):
        for d, factors in enumerate(dims):
            names = [name for name in factors if rule.sizes.get(name) != 1]
            shared |= set(names) if len(names) > 1 else set()
            for name in names:
                found.setdefault(name, []).append((i, d))
    return {name: ports for name, ports in found.items() if name not in shared}


# ---- Fill values -----------------------------------------------------------------------------------------------------


def _ones(dtype: Any) -> Any:
    return np.ones((), dtype)


def _zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


def _all_bits(dtype: Any) -> Any:
    return np.invert(np.zeros((), dtype))


def lowest(dtype: Any) -> Any:
    """Returns the identity of max; None for floats that may have no infinity (8 bits), and for complex numbers."""
    if jnp.issubdtype(dtype, jnp.inexact):
        real = jnp.issubdtype(dtype, jnp.floating)
        return np.array(-np.inf, dtype) if real and dtype.itemsize > 1 else None
    return np.zeros((), dtype) if dtype == jnp.bool_ else np.array(jnp.iinfo(dtype).min, dtype)  # type: ignore[no-untyped-call]


def highest(dtype: Any) -> Any:
    """Returns the identity of min; None for floats that may have no infinity (8 bits), and for complex numbers."""
    if jnp.issubdtype(dtype, jnp.inexact):
        real = jnp.issubdtype(dtype, jnp.floating)
        return np.array(np.inf, dtype) if real and dtype.itemsize > 1 else None
    return np.ones((), dtype) if dtype == jnp.bool_ else np.array(jnp.iinfo(dtype).max, dtype)  # type: ignore[no-untyped-call]


# The identity of each reduction, as a function of the dtype. Of equal elements argmax and top_k take the first, and
# padding comes last.
FILLS: dict[str, Callable[[Any], Any]] = {
    "reduce_sum": _zero,
    "reduce_prod": _ones,
    "reduce_max": lowest,
    "reduce_min": highest,
    "reduce_or": _zero,
    "reduce_and": _all_bits,
    "reduce_xor": _zero,
    "argmax": lowest,
    "argmin": highest,
    "top_k": lowest,
}
REDUCTIONS = frozenset(FILLS) - {"top_k"}
RUNNING: dict[str, Callable[[Any], Any]] = {
    "cumsum": _zero,
    "cumprod": _ones,
    "cummax": lowest,
    "cummin": highest,
    "cumlogsumexp": lowest,
}
POOLINGS = frozenset(
    "reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add "
    "select_and_scatter_add".split()
)

# ---- Parameters that spell out shapes --------------------------------------------------------------------------------

_RESULT_SHAPES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
_OPERAND_EXTENTS = {"slice": "limit_indices", "gather": "slice_sizes", "dynamic_slice": "slice_sizes"}


def padded_params(op: Op, operands: Sequence[Value | Literal], results: Sequence[Value]) -> dict[str, Any]:
    """Returns the parameters of an operation on these operands and results, some of whose dims are padded."""
    params = dict(op.params)
    if op.name in _RESULT_SHAPES:
        params[_RESULT_SHAPES[op.name]] = results[0].shape
    if op.name in _OPERAND_EXTENTS:
        name, old, new = _OPERAND_EXTENTS[op.name], op.inputs[0].shape, operands[0].shape
        params[name] = tuple(m if s == n else s for s, n, m in zip(params[name], old, new, strict=True))
    if op.name == "conv_general_dilated":
        batch, features, *_ = op.params["dimension_numbers"].lhs_spec
        for name, d in (("batch_group_count", batch), ("feature_group_count", features)):
            if op.params[name] == op.inputs[0].shape[d]:  # groups alone are in a dim that is padded
                params[name] = operands[0].shape[d]
    return params
