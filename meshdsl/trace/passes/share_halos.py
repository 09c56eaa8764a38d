"""Shared halos: several shifts of one array fetch the widest halo once.

    pad(x, (1, -1)), pad(x, (2, -2)), pad(x, (3, -3))      shifts(x) by 1, 2 and 3

A shift by three sends three rows of every block, in which the one that a shift by one sends is contained. Taken apart,
a causal convolution over four positions sends six rows where three are enough, and a stencil of nine points on a grid
that is split both ways sends every column three times, with another corner each time. ``shifts`` is one operation with
a result per shift: each block is widened once, along one dim after the other, and the results are slices of it.

Arrays that only differ by a factor are shifted before they are scaled, so that they are one array: the gradient of a
stencil with constant coefficients shifts one cotangent to all of its places.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.index import producers
from meshdsl.ir.rewrite import fresh_ids, in_bodies, values, with_ops
from meshdsl.rules.elementwise import is_zero

shifts_p = Primitive("shifts")
shifts_p.multiple_results = True
Move = tuple[int, ...]  # per dim, how many places forward


def _shifts(x: jax.Array, fill: jax.Array, *, moves: Sequence[Move]) -> list[jax.Array]:
    """Per move, ``x`` moved by so many places along every dim, and filled up."""
    return [lax.pad(x, fill, [(by, -by, 0) for by in move]) for move in moves]


shifts_p.def_impl(_shifts)
shifts_p.def_abstract_eval(lambda x, fill, *, moves: [x] * len(moves))
mlir.register_lowering(shifts_p, mlir.lower_fun(_shifts, multiple_results=True))


# ---- Scales ----------------------------------------------------------------------------------------------------------


def scale_after_shifts(graph: Graph) -> Graph:
    """Returns the graph with pads of several multiples of one array as multiples of pads."""
    return _scaled_last(graph, fresh_ids(graph))


def _scaled_last(graph: Graph, ids: Iterator[int]) -> Graph:
    makers = producers(graph)
    padded = ((op, x) for op in graph.ops if _is_local(op) for x in values(op.inputs[:1]))
    scaled = {op.outputs[0].id: unscaled(x, makers) for op, x in padded}
    count = Counter(source.id for source, _ in scaled.values())
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(lambda body: _scaled_last(body, ids), op)
        source, chain = scaled.get(op.outputs[0].id, (None, ())) if op.outputs else (None, ())
        if source is None or not chain or count[source.id] < 2:
            ops.append(op)
            continue
        x = Value(next(ids), op.outputs[0].shape, source.dtype)
        ops.append(replace(op, inputs=(source, op.inputs[1]), outputs=(x,)))
        for i, scale in enumerate(reversed(chain)):
            made = op.outputs[0] if i == len(chain) - 1 else Value(next(ids), x.shape, x.dtype)
            inputs = tuple(x if isinstance(y, Value) else y for y in scale.inputs)
            ops.append(replace(scale, inputs=inputs, outputs=(made,)))
            x = made
    return with_ops(graph, ops)


def _is_local(op: Op) -> bool:
    """Whether a pad with zeros leaves its operand about as long as it is."""
    if op.name != "pad" or not isinstance(op.inputs[0], Value) or not is_zero(op.inputs[1]):
        return False
    return prod(op.outputs[0].shape) <= 2 * prod(op.inputs[0].shape) and jnp.issubdtype(
        op.inputs[0].dtype, jnp.floating
    )


def unscaled(x: Value, makers: Mapping[int, Op]) -> tuple[Value, tuple[Op, ...]]:
    """Returns the array that ``x`` is a multiple of, and the operations that scale it, the last one first."""
    chain: list[Op] = []
    while x.id in makers and (op := makers[x.id]).name in ("mul", "neg"):
        read = [y for y in op.inputs if isinstance(y, Value)]
        if len(read) != 1 or not all(np.isfinite(y.value) for y in op.inputs if isinstance(y, Literal)):
            break
        chain.append(op)
        (x,) = read
    return x, tuple(chain)


def scaled(x: jax.Array, scales: Sequence[Op]) -> jax.Array:
    """Returns ``x`` after operations that scale it, the last one first."""
    for op in reversed(scales):
        operands = [x if isinstance(y, Value) else jnp.asarray(y.value, y.dtype) for y in op.inputs]
        x = op.primitive.bind(*operands, **op.params)
    return x


# ---- Halos -----------------------------------------------------------------------------------------------------------


def share_halos(graph: Graph) -> Graph:
    """Returns the graph with shifts of one array as one operation, where that sends less."""
    ops = [in_bodies(share_halos, op) for op in graph.ops]
    joined: dict[int, list[Op]] = {}
    for group in _groups(ops):
        joined.update({id(op): group for op in group})
    made: list[Op] = []
    for op in ops:
        group = joined.get(id(op), [op])
        if group[0] is op:
            made.append(_joined(group) if len(group) > 1 else op)
    return with_ops(graph, made)


def _joined(group: list[Op]) -> Op:
    params = {"moves": tuple(move_of(op) for op in group)}
    return replace(
        group[0],
        name="shifts",
        primitive=shifts_p,
        params=params,
        outputs=tuple(v for op in group for v in op.outputs),
    )


def _groups(ops: Sequence[Op]) -> list[list[Op]]:
    """Shifts of one array that send the same elements."""
    of_array: dict[object, list[Op]] = {}
    for op in ops:
        if op.name == "pad" and any(move_of(op)) and isinstance(op.inputs[0], Value):
            of_array.setdefault((op.inputs[0].id, _key(op.inputs[1])), []).append(op)
    found: list[list[Op]] = []
    for shifts in of_array.values():
        along: dict[tuple[int, ...], list[Op]] = {}
        for op in shifts:
            along.setdefault(tuple(d for d, by in enumerate(move_of(op)) if by), []).append(op)
        groups = [shifts] if any(len(dims) > 1 for dims in along) else list(along.values())
        found += [group for group in groups if _overlap([move_of(op) for op in group])]
    return found


def _overlap(moves: Sequence[Move]) -> bool:
    """Whether two of the moves send elements to the same side."""
    sides = [(d, by > 0) for move in moves for d, by in enumerate(move) if by]
    return len(set(sides)) < len(sides)


def move_of(op: Op) -> Move:
    """Returns how far a pad moves its operand; nowhere if it does anything else."""
    config = op.params["padding_config"]
    only = all(low == -high and not between for low, high, between in config)
    return tuple(int(low) for low, *_ in config) if only else (0,) * len(config)


def _key(fill: Atom) -> object:
    return (fill.value.tobytes(), str(fill.dtype)) if isinstance(fill, Literal) else fill.id
