"""Strands: the dims of one operation that are padded together.

The factors of a rule say which dims of operands and results are one and the same. Where an
operation treats every position of a factor alike, the factor is a strand and the operation runs
on the longer dims unchanged but for parameters that spell out shapes. Where it takes positions
together, the strand says what the padding of its operands has to hold. Operations and dims that
are not listed here have no strand: they are read and made at the size that was written.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.layouts.sharding_rule import Rule
from meshdsl.rules import RULES
from meshdsl.rules.elementwise import elementwise
from meshdsl.rules.indexing import Lookup, gather_dims, scatter_dims
from meshdsl.rules.reduction import top_k_dim

# ---- Strand ----------------------------------------------------------------------------------------------------------
# A strand: dims of one operation, and of its bodies, that are padded together.


Port = tuple[int, int]  # an operand, or beyond them a result, and its dim
InnerPort = tuple[int, Port]  # a body, and what it takes, or beyond that what it returns


@dataclass(frozen=True)
class DimGroup:
    """Dims of one operation that are padded together.

    Args:
      size: their length.
      ports: where they are.
      fill: what the padding of the operands has to hold; None if that does not matter.
      column: of the indices of a gather or scatter, the one whose positions lie in this dim.
      inside: where the bodies of a loop or conditional have them.
    """

    size: int
    ports: tuple[Port, ...]
    fill: Any = None
    column: int | None = None
    inside: tuple[InnerPort, ...] = ()


# ---- Loops -----------------------------------------------------------------------------------------------------------
# Strands through loops and conditionals: what they hand on is as long inside as outside.
#
#     scan    a const, a slice of a stack     operand = what the body takes
#             a carry                         operand = what the body takes = what it returns = result
#             a row of a stack that is made   what the body returns = result
#     while   likewise, the carry being taken by the condition as well
#     cond    an operand is what every branch takes, a result what every branch returns
#
# So a parameter is padded once, in front of the loop, and a carry stays padded through all trips.


@dataclass(frozen=True)
class _Handed:
    """One array that is handed on.

    Args:
      ports: operands of the loop, and beyond them results.
      inside: per place in a body: the body, and what it takes or, beyond that, returns.
      stacked: the loop has it with a dim in front that the body has not.
    """

    ports: tuple[int, ...]
    inside: tuple[tuple[int, int], ...]
    stacked: bool = False


def loop_dim_groups(op: Op) -> Iterator[DimGroup]:
    """A strand per dim of what a loop or conditional hands on."""
    atoms = (*op.inputs, *op.outputs)
    for handed in _HANDED[op.name](op):
        first = int(handed.stacked)
        for d, n in enumerate(atoms[handed.ports[0]].shape[first:]):
            inside: tuple[InnerPort, ...] = tuple((body, (port, d)) for body, port in handed.inside)
            yield DimGroup(n, tuple((port, d + first) for port in handed.ports), inside=inside)


def _scan(op: Op) -> Iterator[_Handed]:
    consts, stacks, results = op.params["num_consts"], op.params["num_consts"] + op.params["num_carry"], len(op.inputs)
    yield from (_Handed((i,), ((0, i),)) for i in range(consts))
    for i in range(consts, stacks):
        made = results + i - consts
        yield _Handed((i, made), ((0, i), (0, made)))
    alone = (*range(stacks, results), *range(results + stacks - consts, results + len(op.outputs)))
    yield from (_Handed((i,), ((0, i),), stacked=True) for i in alone)


def _while(op: Op) -> Iterator[_Handed]:
    asked, closed = op.params["cond_nconsts"], op.params["body_nconsts"]
    yield from (_Handed((i,), ((0, i),)) for i in range(asked))
    yield from (_Handed((asked + i,), ((1, i),)) for i in range(closed))
    carries = len(op.outputs)
    for i in range(carries):
        inside = (0, asked + i), (1, closed + i), (1, closed + carries + i)
        yield _Handed((asked + closed + i, len(op.inputs) + i), inside)


def _cond(op: Op) -> Iterator[_Handed]:
    branches, ports = range(len(op.bodies)), len(op.inputs) + len(op.outputs)
    yield from (_Handed((i,), tuple((branch, i - 1) for branch in branches)) for i in range(1, ports))


_HANDED = {"scan": _scan, "while": _while, "cond": _cond}


# ---- Strands ---------------------------------------------------------------------------------------------------------


# Every position of a dim that the rule lets be split is treated alike.
ELEMENTWISE = frozenset(name for name, make in RULES.items() if make is elementwise)
MOVING = frozenset(
    "broadcast_in_dim iota transpose reshape squeeze rev slice dynamic_slice dynamic_update_slice pad concatenate "
    "split stack unstack tile cumsum cumprod cummax cummin cumlogsumexp sort".split()
)
LOOKUPS = ("gather", "scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")


def dim_groups(op: Op) -> list[DimGroup]:
    """The strands of an operation; none if it is not known here, or has effects and no bodies."""
    if op.bodies:
        found = loop_dim_groups(op)
    else:
        known = (op.name in RULES or op.name == "constrain") and not op.effects
        found = _strands(op) if known else iter(())
    atoms = (*op.inputs, *op.outputs)
    keys = {i for i, x in enumerate(atoms) if jnp.issubdtype(x.dtype, jax.dtypes.extended)}
    if keys and not op.bodies:
        return []
    return [s for s in found if all(i not in keys and atoms[i].shape[d] == s.size for i, d in s.ports)]


def _strands(op: Op) -> Iterator[DimGroup]:
    if op.name == "constrain":
        yield from (DimGroup(n, ((0, d), (1, d))) for d, n in enumerate(op.inputs[0].shape))
    elif op.name in ELEMENTWISE or op.name in MOVING:
        yield from _kept(op)
    elif op.name == "dot_general":
        yield from _kept(op)
        yield from _contracted(op)
    elif op.name in REDUCED:
        yield from _kept(op)
        yield from _filled(op, op.params["axes"])
    elif op.name == "top_k":
        yield from _kept(op)
        yield from _filled(op, (top_k_dim(op),))
    elif op.name in LOOKUPS:
        yield from _kept(op)
        yield from _looked_up(op)


def _kept(op: Op) -> Iterator[DimGroup]:
    """Factors of the rule that the results have."""
    rule = RULES[op.name](op)
    first = len(rule.inputs)
    for name, ports in _factors(rule).items():
        if any(i >= first for i, _ in ports) and name not in rule.reduced and not _is_promised(op, ports):
            yield _strand(op, ports)


def _is_promised(op: Op, ports: Sequence[Port]) -> bool:
    """Whether indices are said to be sorted or unique, which padding would break."""
    promises = op.params.get("indices_are_sorted") or op.params.get("unique_indices")
    return op.name in LOOKUPS and bool(promises) and any(i == 1 for i, _ in ports)


def _contracted(op: Op) -> Iterator[DimGroup]:
    rule = RULES[op.name](op)
    zero = np.zeros((), op.outputs[0].dtype)
    yield from (_strand(op, ports, zero) for name, ports in _factors(rule).items() if name in rule.reduced)


def _filled(op: Op, dims: Iterable[int]) -> Iterator[DimGroup]:
    """Dims of the operand whose positions are taken together."""
    fill = FILLS[op.name](op.inputs[0].dtype)
    if fill is not None:
        yield from (_strand(op, ((0, d),), fill) for d in dims)


def _looked_up(op: Op) -> Iterator[DimGroup]:
    """Dims that are addressed by a column of the indices, if those can name a position beyond the padding."""
    dims = lookup_dims(op)
    most = np.iinfo(op.inputs[1].dtype).max
    both = (0,) if op.name == "gather" else (0, 3)
    for d in dims.looked_up:
        n = op.inputs[0].shape[d]
        if 2 * n <= most:
            yield DimGroup(n, tuple((i, d) for i in both), column=dims.columns.index(d))


def lookup_dims(op: Op) -> Lookup:
    """What the dims of a gather or scatter mean."""
    return gather_dims(op) if op.name == "gather" else scatter_dims(op)


def _strand(op: Op, ports: Sequence[Port], fill: Any = None) -> DimGroup:
    i, d = ports[0]
    return DimGroup((*op.inputs, *op.outputs)[i].shape[d], tuple(ports), fill)


def _factors(rule: Rule) -> dict[str, list[Port]]:
    """Where each factor is, without those that share a dim with another."""
    found: dict[str, list[Port]] = {}
    shared: set[str] = set()
    for i, dims in enumerate((*rule.inputs, *rule.outputs)):
        for d, names in enumerate(dims):
            shared |= set(names) if len(names) > 1 else set()
            for name in names:
                found.setdefault(name, []).append((i, d))
    return {name: ports for name, ports in found.items() if name not in shared}


def _ones(dtype: Any) -> Any:
    return np.ones((), dtype)


def _zero(dtype: Any) -> Any:
    return np.zeros((), dtype)


def _all_bits(dtype: Any) -> Any:
    return np.invert(np.zeros((), dtype))


def lowest(dtype: Any) -> Any:
    """What no maximum is changed by; None for floats that may have no infinity, and for complex numbers."""
    if jnp.issubdtype(dtype, jnp.inexact):
        real = jnp.issubdtype(dtype, jnp.floating)
        return np.array(-np.inf, dtype) if real and dtype.itemsize > 1 else None
    return np.zeros((), dtype) if dtype == jnp.bool_ else np.array(jnp.iinfo(dtype).min, dtype)  # type: ignore[no-untyped-call]


def highest(dtype: Any) -> Any:
    """What no minimum is changed by; None for floats that may have no infinity, and for complex numbers."""
    if jnp.issubdtype(dtype, jnp.inexact):
        real = jnp.issubdtype(dtype, jnp.floating)
        return np.array(np.inf, dtype) if real and dtype.itemsize > 1 else None
    return np.ones((), dtype) if dtype == jnp.bool_ else np.array(jnp.iinfo(dtype).max, dtype)  # type: ignore[no-untyped-call]


# What the padding holds where positions are taken together. Of equal elements argmax and top_k take the first, and
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
REDUCED = frozenset(FILLS) - {"top_k"}
_SHAPES = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
_KEPT_WHOLE = {"slice": "limit_indices", "gather": "slice_sizes", "dynamic_slice": "slice_sizes"}


def padded_params(op: Op, before: Sequence[Value | Literal], after: Sequence[Value]) -> dict[str, Any]:
    """The parameters for operands ``before`` and results ``after``, some dims of which are padded."""
    params = dict(op.params)
    if op.name in _SHAPES:
        params[_SHAPES[op.name]] = after[0].shape
    if op.name in _KEPT_WHOLE:
        name, old, new = _KEPT_WHOLE[op.name], op.inputs[0].shape, before[0].shape
        params[name] = tuple(m if s == n else s for s, n, m in zip(params[name], old, new, strict=True))
    return params
