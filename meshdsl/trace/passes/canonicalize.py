"""Canonicalisation: identities, products with masks, constant results and slices of broadcasts get one form.

The compiler makes the same rewrites. Left in the graph, these patterns would hide that two values are one, or that a
result needs no operand, and the compiled program would communicate less than planned.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jax.lax import broadcast_in_dim_p

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.rewrite import Table, broadcast_params, fresh_ids, in_bodies, substitute, values, with_ops
from meshdsl.rules.elementwise import is_zero
from meshdsl.trace.read_jaxpr import literal, written

# ---- Identities ------------------------------------------------------------------------------------------------------
# The planner chooses layouts, so placing an array on devices, or a sharding without names of axes, is an identity as
# well. So is a chain of reshapes that ends in the shape it began with.


PLACING = frozenset({"sharding_constraint", "layout_constraint", "mesh_cast", "reshard", "device_put"})
_CASTS = {"vary_unreduced_cast", "reduced_vary_cast"}
_VARYING = {"pvary", "pcast", "preduced", *_CASTS, *(f"{name}_p" for name in _CASTS)}  # types of the user's shard_map
_STATED = {"name", "expect_iterations", "alternatives"}
ALWAYS_IDENTITIES = PLACING | _VARYING | _STATED | {"copy", "copy_p", "stop_gradient", "shard_alike"}
_CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
_NEUTRAL = {"mul": 1, "div": 1, "sub": 0}  # second operands; 0.0 added to -0.0 changes its sign
# Identities whenever shape and dtype stay the same.
_BY_SHAPE = frozenset({"convert_element_type", "broadcast_in_dim", "squeeze", "slice", "dynamic_slice"})
_RESHAPES = frozenset({"broadcast_in_dim", "squeeze", "reshape"})


def remove_identities(graph: Graph) -> Graph:
    """Returns the graph without identities: their consumers read the operand instead."""
    table: Table = {}
    reshaped: dict[int, Value] = {}
    parts: dict[int, Sequence[Atom]] = {}  # of complex numbers
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(remove_identities, substitute(op, table))
        if op.name == "split" and op.inputs[0].shape in [v.shape for v in op.outputs]:  # the others are empty
            table.update({v.id: op.inputs[0] for v in op.outputs if v.shape == op.inputs[0].shape})
            ops += [_made_of(_zero(v), v, op) for v in op.outputs if v.shape != op.inputs[0].shape]
            continue
        if op.name == "concatenate":  # likewise
            op = replace(op, inputs=tuple(x for x in op.inputs if 0 not in x.shape) or op.inputs)
        known = op.inputs if _is_identity(op) else _second(op) or _before_reshapes(op, reshaped) or _part(op, parts)
        if known:
            table.update({out.id: x for out, x in zip(op.outputs, known, strict=False)})
        else:
            ops.append(op)
    return with_ops(graph, ops)


def remove_stages(graph: Graph, cuts: bool = False) -> Graph:
    """Returns the graph without ``md.stage``, which is the identity; with ``cuts``, only without those in loops."""
    graph = with_ops(graph, (in_bodies(remove_stages, op) for op in graph.ops))
    return graph if cuts else _without(graph, lambda op: op.name == "stage")


def remove_stated(graph: Graph) -> Graph:
    """Returns the graph without the constraints that jax's own functions state."""
    graph = with_ops(graph, (in_bodies(remove_stated, op) for op in graph.ops))
    return _without(graph, lambda op: op.name == "constrain" and "by" in op.params)


def _without(graph: Graph, removed: Callable[[Op], bool]) -> Graph:
    """The graph without these operations, which are identities; its bodies stay."""
    table: Table = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = substitute(op, table)
        if removed(op):
            table.update({out.id: x for out, x in zip(op.outputs, op.inputs, strict=True)})
        else:
            ops.append(op)
    return with_ops(graph, ops)


def _before_reshapes(op: Op, reshaped: dict[int, Value]) -> Sequence[Atom]:
    """The value at the start of a chain of reshapes if ``op`` restores its shape; else records it in ``reshaped``."""
    if op.name not in _RESHAPES or (op.params.get("dimensions") is not None and op.name == "reshape"):
        return ()
    x, made = op.inputs[0], op.outputs[0]
    if not isinstance(x, Value) or prod(x.shape) != prod(made.shape):
        return ()
    reshaped[made.id] = first = reshaped.get(x.id, x)
    return (first,) if first.shape == made.shape else ()


def _part(op: Op, parts: dict[int, Sequence[Atom]]) -> Sequence[Atom]:
    """The real or imaginary part that a complex number was made of; records the parts of ``op`` if it makes one."""
    if op.name == "complex":
        parts[op.outputs[0].id] = op.inputs
    known = parts.get(op.inputs[0].id) if op.name in ("real", "imag") else None
    return () if known is None else (known[op.name == "imag"],)


def _second(op: Op) -> Sequence[Atom]:
    """The second operand, if it is the result: an update that replaces the whole array, or x of 1 * x, max(-inf, x)."""
    if op.name not in ("dynamic_update_slice", "mul", "max", "min"):
        return ()
    first, second, made = op.inputs[0], op.inputs[1], op.outputs[0]
    if second.shape != made.shape or second.dtype != made.dtype:
        return ()
    neutral = op.name == "dynamic_update_slice" or (isinstance(first, Literal) and _is_neutral_number(op, first))
    return (second,) if neutral else ()


def _is_identity(op: Op) -> bool:
    same = all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(op.inputs, op.outputs, strict=False))
    if not op.inputs or not op.outputs or not same or op.effects:
        return False
    if op.name in ALWAYS_IDENTITIES:
        return len(op.inputs) == len(op.outputs)
    return op.name in _BY_SHAPE or _keeps_dims(op)


def _keeps_dims(op: Op) -> bool:
    """Whether a transpose, reshape, reduction, pad or concatenation does nothing."""
    shape, params = op.outputs[0].shape, op.params
    if op.name == "reshape":  # it may read its operand's dims in another order
        return params["dimensions"] is None
    if op.name == "transpose":
        longer = [d for d in params["permutation"] if shape[d] != 1]
        return longer == sorted(longer)
    if op.name == "rev":
        return all(shape[d] == 1 for d in params["dimensions"])
    if op.name in _CUMULATIVE:
        return bool(shape[params["axis"]] == 1)
    if op.name == "pad":
        return not any(map(any, params["padding_config"]))
    if op.name == "concatenate":
        return isinstance(op.inputs[0], Value) and all(0 in x.shape for x in op.inputs[1:])
    return _is_neutral(op) or (op.name.startswith("reduce_") and params.get("axes") == ())


def _is_neutral(op: Op) -> bool:
    """Whether it is x * 1, x / 1, x - 0, or a maximum or minimum with the infinity that it never takes."""
    return op.name in ("div", "sub", "mul", "max", "min") and (
        isinstance(op.inputs[1], Literal) and _is_neutral_number(op, op.inputs[1])
    )


def _is_neutral_number(op: Op, x: Literal) -> bool:
    if op.name in ("max", "min"):
        return jnp.issubdtype(x.dtype, np.floating) and float(x.value) == (-inf if op.name == "max" else inf)
    return bool(x.value == _NEUTRAL[op.name])


# ---- Masks -----------------------------------------------------------------------------------------------------------
# A number times a mask is a selection between the number and zero.
#
#     convert_element_type(mask) * x        select_n(mask, zeros, x)
#
# XLA makes this rewrite wherever it sees cast and product together, and a masked infinity then gives zero, where the
# product as written gives NaN. Whether XLA sees both together depends on layouts; rewritten here, the result does not.
# The gradient of a maximum is such a product.


def mask_to_select(graph: Graph) -> Graph:
    """Returns the graph with products of floats and masks as selections; the casts stay for their other consumers."""
    return _chosen(graph, fresh_ids(graph))


def _chosen(graph: Graph, ids: Iterator[int]) -> Graph:
    table: Table = {}
    masks: dict[int, Atom] = {}  # by value: the booleans that it was cast from
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(lambda body: _chosen(body, ids), substitute(op, table))
        if op.name == "convert_element_type" and op.inputs[0].dtype == np.bool_:
            masks[op.outputs[0].id] = op.inputs[0]
        found = _masked(op, masks)
        if found:
            made, table[op.outputs[0].id] = written(_choice, found, ids, op)
            ops += made
        else:
            ops.append(op)
    return with_ops(graph, ops)


def _masked(op: Op, masks: Mapping[int, Atom]) -> tuple[Atom, Atom] | None:
    """Mask and number of a product of both, of one shape."""
    if op.name != "mul" or not jax.numpy.issubdtype(op.outputs[0].dtype, np.inexact):
        return None
    for mask, x in (op.inputs, op.inputs[::-1]):
        if isinstance(mask, Value) and mask.id in masks and x.shape == mask.shape:
            return masks[mask.id], x
    return None


def _choice(mask: jax.Array, x: jax.Array) -> jax.Array:
    return lax.select(mask, x, lax.full_like(x, 0))


# ---- Constant results ------------------------------------------------------------------------------------------------
# Arrays without elements are created by a broadcast of zero: they need no operand, which could be resharded in vain.
# A padded empty array is the padding, and the sum of one is zero. Where autodiff adds such zeros to a cotangent, as in
# the gradient of a roll by no places, it would not have added them had it known.
# Integers that cancel, as in x * 0, x - x or x == x, need no operand either; floats do not, as they may be infinite.


_WITH_ITSELF = {"sub": 0, "xor": 0, "eq": 1, "le": 1, "ge": 1, "ne": 0, "lt": 0, "gt": 0}  # of x and x
_ABSORBING = ("mul", "and", "or")  # of any x and one number: all bits for "or", else 0
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def materialize_constants(graph: Graph) -> Graph:
    """Returns the graph with broadcasts in place of operations whose results do not depend on their operands."""
    table: Table = {}
    zeros: set[int] = set()
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(materialize_constants, substitute(op, table))
        rest = [x for x in op.inputs if x.id not in zeros] if op.name == "add_any" else []
        if len(rest) == 1:
            table[op.outputs[0].id] = rest[0]
            continue
        made = _simplest(op)
        zeros |= {v.id for new in made if new is not op and is_zero(new.inputs[0]) for v in new.outputs}
        ops += made
    return with_ops(graph, ops)


def _simplest(op: Op) -> tuple[Op, ...]:
    if _is_idle(op):
        return tuple(_made_of(_zero(value), value, op) for value in op.outputs)
    if op.name == "reduce_sum" and 0 in op.inputs[0].shape:
        return (_made_of(_zero(op.outputs[0]), op.outputs[0], op),)
    if op.name == "pad" and 0 in op.inputs[0].shape:
        return (_made_of(op.inputs[1], op.outputs[0], op),)
    constant = _cancelled(op)
    return (op,) if constant is None else (_made_of(literal(constant, op.outputs[0].dtype), op.outputs[0], op),)


def _cancelled(op: Op) -> int | None:
    """The only element of a result that is the same whatever the operands are; None for other results."""
    if op.name == "integer_pow":
        return 1 if op.params["y"] == 0 else None
    if op.name not in (*_WITH_ITSELF, *_ABSORBING) or not all(map(_is_integer, op.inputs)):
        return None
    first, second = op.inputs
    if isinstance(first, Value) and isinstance(second, Value):
        return _WITH_ITSELF.get(op.name) if first is second else None
    number = second if isinstance(second, Literal) else first
    if op.name in _MIRRORED and isinstance(number, Literal):
        return _beyond_all(op.name if number is second else _MIRRORED[op.name], number)
    found = int(number.value) if isinstance(number, Literal) and op.name in _ABSORBING else None
    return found if found is not None and found == (_all_bits(number.dtype) if op.name == "or" else 0) else None


def _beyond_all(comparison: str, number: Literal) -> int | None:
    """The result of comparing any integer with a number; None if it is not the same for all."""
    is_bool = jnp.issubdtype(number.dtype, np.bool_)
    smallest, largest = (0, 1) if is_bool else (jnp.iinfo(number.dtype).min, jnp.iinfo(number.dtype).max)
    known = {("lt", smallest): 0, ("ge", smallest): 1, ("gt", largest): 0, ("le", largest): 1}
    return known.get((comparison, int(number.value)))


def _all_bits(dtype: Any) -> int:
    if jnp.issubdtype(dtype, np.bool_):
        return 1
    return int(jnp.iinfo(dtype).max) if jnp.issubdtype(dtype, np.unsignedinteger) else -1


def _is_integer(x: Atom) -> bool:
    return bool(jnp.issubdtype(x.dtype, np.integer) or jnp.issubdtype(x.dtype, np.bool_))


def _is_idle(op: Op) -> bool:
    empty = bool(op.outputs) and all(map(_is_empty, op.outputs))
    return empty and any(values(op.inputs)) and not op.effects and not op.bodies


def _is_empty(value: Value) -> bool:
    return 0 in value.shape and not dtypes.issubdtype(value.dtype, dtypes.extended)


def _zero(value: Value) -> Literal:
    return Literal(np.zeros((), jnp.dtype(value.dtype))[()], (), value.dtype)


def _made_of(x: Value | Literal, value: Value, op: Op) -> Op:
    """The broadcast that defines a value by one scalar, in place of ``op``."""
    params = broadcast_params(value.shape, ())
    place: dict[str, Any] = {"source": op.source, "scope": op.scope, "manual": op.manual}
    return Op(0, "broadcast_in_dim", broadcast_in_dim_p, params, (x,), (value,), **place)


# ---- Broadcasts ------------------------------------------------------------------------------------------------------
# A slice of an array that is constant along a dim is a smaller broadcast.
#
# The gradient of a sum over concatenated pieces is one number, broadcast to all of them and then sliced. Compilers see
# that the slices are equal, and send what depends on them once; as broadcasts they are one expression for ``cse`` too.


def fold_broadcast_slices(graph: Graph) -> Graph:
    """Returns the graph with slices of broadcasts as broadcasts."""
    made: dict[int, Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(fold_broadcast_slices, op)
        source = _spread(op, made) if op.name in ("slice", "split", "unstack") else None
        pieces = [_piece(op, source, v) for v in op.outputs] if source else [op]
        made.update((piece.outputs[0].id, piece) for piece in pieces if piece.name == "broadcast_in_dim")
        ops += pieces
    return with_ops(graph, ops)


def _spread(op: Op, made: Mapping[int, Op]) -> Op | None:
    """The broadcast that ``op`` slices, if it is constant along all dims that are sliced."""
    (x,) = op.inputs
    source = made.get(x.id) if isinstance(x, Value) else None
    if source is None:
        return None
    kept = zip(source.inputs[0].shape, source.params["broadcast_dimensions"], strict=True)
    if op.name == "unstack":
        return None if op.params["axis"] in source.params["broadcast_dimensions"] else source
    cut = {d for v in op.outputs for d, n in enumerate(v.shape) if n != x.shape[d]}
    return None if cut & {d for n, d in kept if n > 1} else source


def _piece(op: Op, source: Op, v: Value) -> Op:
    gone = op.params["axis"] if op.name == "unstack" else len(v.shape)
    params = broadcast_params(v.shape, [d - (d > gone) for d in source.params["broadcast_dimensions"]])
    return replace(source, params=params, outputs=(v,), source=op.source, scope=op.scope, phase=op.phase)
