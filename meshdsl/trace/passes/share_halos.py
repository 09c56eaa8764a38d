"""Shared halos: several shifts of one array fetch the widest halo once.

    pad(x, (1, -1)), pad(x, (2, -2)), pad(x, (3, -3))      shifts(x) by 1, 2 and 3
    roll(x, 1, 0), roll(roll(x, 1, 0), 1, 1)               rolls(x) by (1, 0) and (1, 1)

A shift by three sends three rows of every block, in which the one that a shift by one sends is contained. Taken apart,
a causal convolution over four positions sends six rows where three are enough, and a stencil of nine points on a grid
that is split both ways sends every column three times, with another corner each time. ``shifts`` is one operation with
a result per shift: each block is widened once, along one dim after the other, and the results are slices of it. On a
periodic grid the shifts are rolls, along one dim after the other, and ``rolls`` is that operation.

Arrays that only differ by a factor are shifted before they are scaled, so that they are one array: the gradient of a
stencil with constant coefficients shifts one cotangent to all of its places.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.index import consumers, producers
from meshdsl.ir.rewrite import fresh_ids, in_bodies, values, with_ops
from meshdsl.rules.elementwise import is_zero

shifts_p = Primitive("shifts")
shifts_p.multiple_results = True
Move = tuple[int, ...]  # per dim, how many places forward
FAR = 8  # a roll by more than one of so many places is none of a grid's neighbours


def _shifts(x: jax.Array, fill: jax.Array, *, moves: Sequence[Move]) -> list[jax.Array]:
    """Per move, ``x`` moved by so many places along every dim, and filled up."""
    return [lax.pad(x, fill, [(by, -by, 0) for by in move]) for move in moves]


shifts_p.def_impl(_shifts)
shifts_p.def_abstract_eval(lambda x, fill, *, moves: [x] * len(moves))
mlir.register_lowering(shifts_p, mlir.lower_fun(_shifts, multiple_results=True))


rolls_p = Primitive("rolls")
rolls_p.multiple_results = True


def _rolls(x: jax.Array, *, moves: Sequence[Move]) -> list[jax.Array]:
    """Per move, ``x`` moved by so many places along every dim, cyclically."""
    return [rolled(x, move) for move in moves]


def rolled(x: jax.Array, move: Mapping[int, int] | Move) -> jax.Array:
    """Returns ``x`` moved by so many places along dims, cyclically."""
    for d, by in move.items() if isinstance(move, Mapping) else enumerate(move):
        if by:
            at = -by % x.shape[d]
            x = lax.concatenate([lax.slice_in_dim(x, at, None, axis=d), lax.slice_in_dim(x, 0, at, axis=d)], d)
    return x


rolls_p.def_impl(_rolls)
rolls_p.def_abstract_eval(lambda x, *, moves: [x] * len(moves))
mlir.register_lowering(rolls_p, mlir.lower_fun(_rolls, multiple_results=True))


# ---- Scales ----------------------------------------------------------------------------------------------------------


def scale_after_shifts(graph: Graph) -> Graph:
    """Returns the graph with pads or rolls of several multiples of one array as multiples of pads or rolls."""
    return _scaled_last(graph, fresh_ids(graph))


def _scaled_last(graph: Graph, ids: Iterator[int]) -> Graph:
    makers = producers(graph)
    padded = (unscaled(x, makers) for op in graph.ops if _is_local_pad(op) for x in values(op.inputs[:1]))
    count = Counter(source.id for source, _ in padded)
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(lambda body: _scaled_last(body, ids), op)
        x = op.inputs[0] if _is_roll(op) or _is_local_pad(op) else None
        source, chain = unscaled(x, makers) if isinstance(x, Value) else (None, ())
        if source is None or not chain or (op.name == "pad" and count[source.id] < 2):
            made = [op]
        else:
            x = Value(next(ids), op.outputs[0].shape, source.dtype)
            made = [replace(op, inputs=(source, *op.inputs[1:]), outputs=(x,))]
            for i, scale in enumerate(reversed(chain)):
                scaled = op.outputs[0] if i == len(chain) - 1 else Value(next(ids), x.shape, x.dtype)
                inputs = tuple(x if isinstance(y, Value) else y for y in scale.inputs)
                made.append(replace(scale, inputs=inputs, outputs=(scaled,)))
                x = scaled
        ops += made
        makers.update((v.id, new) for new in made for v in new.outputs)  # rolls of multiples of rolls
    return with_ops(graph, ops)


def _is_roll(op: Op) -> bool:
    return op.name == "roll" and jnp.issubdtype(op.inputs[0].dtype, jnp.floating)


def _is_local_pad(op: Op) -> bool:
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


class _Shift(NamedTuple):
    """An operation that moves ``source`` by ``move``, and what is put where nothing is moved to."""

    op: Op
    source: Value
    move: Move
    fill: object


def share_halos(graph: Graph) -> Graph:
    """Returns the graph with shifts of one array as one operation, where that sends less."""
    ops = [in_bodies(share_halos, op) for op in graph.ops]
    joined: dict[int, list[_Shift]] = {}
    for group in _groups(with_ops(graph, ops)):
        joined.update({id(shift.op): group for shift in group})
    made: list[Op] = []
    for op in ops:
        group = joined.get(id(op), [])
        if not group:
            made.append(op)
        elif group[0].op is op:
            made.append(_joined(group))
    return with_ops(graph, made)


def _joined(group: list[_Shift]) -> Op:
    first = group[0].op
    name, primitive = ("rolls", rolls_p) if first.name == "roll" else ("shifts", shifts_p)
    return replace(
        first,
        name=name,
        primitive=primitive,
        params={"moves": tuple(shift.move for shift in group)},
        inputs=(group[0].source, *first.inputs[1:]),
        outputs=tuple(v for shift in group for v in shift.op.outputs),
    )


def _groups(graph: Graph) -> list[list[_Shift]]:
    """Shifts of one array that send the same elements, without those that only others of them read."""
    readers = consumers(graph)
    of_array: dict[object, list[_Shift]] = {}
    for shift in _shifts_of(graph.ops):
        of_array.setdefault((shift.source.id, shift.fill), []).append(shift)
    found: list[list[_Shift]] = []
    for shifts in of_array.values():
        along: dict[tuple[int, ...], list[_Shift]] = {}
        for shift in shifts:
            along.setdefault(tuple(d for d, by in enumerate(shift.move) if by), []).append(shift)
        for group in [shifts] if any(len(dims) > 1 for dims in along) else along.values():
            own = {shift.op for shift in group}
            shown = [shift for shift in group if not own.issuperset(readers.get(shift.op.outputs[0].id, ()))]
            found += [shown] if _overlap([shift.move for shift in shown]) else []
    return found


def _shifts_of(ops: Sequence[Op]) -> Iterator[_Shift]:
    """Yields the operations that shift an array; rolls of a roll shift what that one rolls."""
    rolls: dict[int, _Shift] = {}
    for op in ops:
        x = op.inputs[0] if op.inputs else None
        if op.name == "pad" and any(move_of(op)) and isinstance(x, Value):
            yield _Shift(op, x, move_of(op), _key(op.inputs[1]))
        elif op.name == "roll" and isinstance(x, Value):
            first = rolls.get(x.id)
            source, before = (first.source, first.move) if first else (x, (0,) * len(x.shape))
            d, n = op.params["axis"], x.shape[op.params["axis"]]
            by = (before[d] + op.params["shift"] + n // 2) % n - n // 2  # the shorter way round
            if abs(by) <= n // FAR:
                shift = rolls[op.outputs[0].id] = _Shift(op, source, (*before[:d], by, *before[d + 1 :]), "cyclic")
                if any(shift.move):
                    yield shift


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
