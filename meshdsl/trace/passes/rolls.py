"""Roll detection: slices of one array concatenated in rotated order are a roll.

    concatenate [x[n/2:], x[:n/2]]                          roll(x, n/2)
    concatenate [-x[n/2:], x[:n/2]]                         select(i < n/2, -roll(x, n/2), roll(x, n/2))
    pad(-g[:n/2], n/2 in front) + pad(g[n/2:], n/2 behind)  its gradient, likewise

Slices cut a sharded dim inside blocks, so each of them would need a gather; a roll only permutes blocks. ``jnp.roll``,
the halves of a rotary embedding (RoFormer, Su et al. 2021) and their gradients are such patterns. Between slice and
concatenation every piece may pass unary operations.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.rewrite import Table, fresh_ids, in_bodies, substitute, values, with_ops
from meshdsl.trace.read_jaxpr import written

roll_p = Primitive("roll")
UNARY = frozenset({"neg", "mul", "convert_element_type"})


def _roll(x: jax.Array, *, axis: int, shift: int) -> jax.Array:
    """Moves every element by ``shift`` places, cyclically; 0 < shift < length."""
    at = x.shape[axis] - shift
    parts = lax.slice_in_dim(x, at, None, axis=axis), lax.slice_in_dim(x, 0, at, axis=axis)
    return lax.concatenate(parts, axis)


roll_p.def_impl(_roll)
roll_p.def_abstract_eval(lambda x, *, axis, shift: x)
mlir.register_lowering(roll_p, mlir.lower_fun(_roll, multiple_results=False))


@dataclass(frozen=True)
class Piece:
    """``length`` elements of a dim of ``source``, from ``start`` on, which after ``chain`` go to ``at``."""

    source: Value
    dim: int
    start: int
    length: int
    chain: tuple[Op, ...] = ()
    at: int = 0


Parts = dict[int, list[Piece]]  # by value id: the pieces of pads and sums of pads


def find_rolls(graph: Graph) -> Graph:
    """Returns the graph with such patterns as rolls; the slices stay for their other consumers."""
    return _rolled(graph, fresh_ids(graph))


def _rolled(graph: Graph, ids: Iterator[int]) -> Graph:
    table: Table = {}
    makers: dict[int, Op] = {}
    parts: Parts = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(lambda body: _rolled(body, ids), substitute(op, table))
        for v in op.outputs:
            makers[v.id] = op
        found = _whole(_put_together(op, makers, parts), op)
        if found:
            made, result = written(partial(_assembled, pieces=found), (found[0].source,), ids, op)
            ops += made
            table[op.outputs[0].id] = result
            makers.update((v.id, new) for new in made for v in new.outputs)
        else:
            ops.append(op)
    return with_ops(graph, ops)


def _put_together(op: Op, makers: dict[int, Op], parts: Parts) -> list[Piece]:
    """The pieces that the result consists of, in order; none if it has another form."""
    if op.name == "concatenate":
        found = _concatenated(op, makers)
    else:  # recorded for the addition of this and another
        found = _added(op, parts) if op.name == "add_any" else _padded(op, makers) if op.name == "pad" else None
        parts.update({op.outputs[0].id: found} if found else {})
    return sorted(found, key=lambda piece: piece.at) if found else []


def _concatenated(op: Op, makers: dict[int, Op]) -> list[Piece] | None:
    found, at = [], 0
    for x in op.inputs:
        piece = _piece(x, int(op.params["dimension"]), makers)
        if piece is None:
            return None
        found.append(replace(piece, at=at))
        at += piece.length
    return found


def _added(op: Op, parts: Parts) -> list[Piece] | None:
    read = [parts.get(x.id) if isinstance(x, Value) else None for x in op.inputs]
    return None if None in read else [piece for pieces in read for piece in pieces or ()]


def _padded(op: Op, makers: dict[int, Op]) -> list[Piece] | None:
    """One piece among zeros."""
    config, fill = op.params["padding_config"], op.inputs[1]
    dims = [d for d, amounts in enumerate(config) if any(amounts)]
    if len(dims) != 1 or config[dims[0]][2] or not isinstance(fill, Literal) or fill.value:
        return None
    piece = _piece(op.inputs[0], dims[0], makers)
    return [replace(piece, at=int(config[dims[0]][0]))] if piece else None


def _piece(x: Atom, dim: int, makers: dict[int, Op]) -> Piece | None:
    """The piece of an array along ``dim`` that ``x`` is, if it is one."""
    chain: list[Op] = []
    while isinstance(x, Value) and x.id in makers:
        maker = makers[x.id]
        if maker.name in _CUTS:
            piece = _CUTS[maker.name](maker, x, dim)
            return replace(piece, chain=tuple(reversed(chain))) if piece else None
        read = list(values(maker.inputs))
        if maker.name not in UNARY or len(read) != 1:
            return None
        chain.append(maker)
        x = read[0]
    return None


def _sliced(op: Op, x: Atom, dim: int) -> Piece | None:
    (source,) = values(op.inputs)
    others = [d for d, (n, m) in enumerate(zip(source.shape, x.shape, strict=True)) if n != m and d != dim]
    strided = any(step != 1 for step in op.params["strides"] or ())
    return None if others or strided else Piece(source, dim, int(op.params["start_indices"][dim]), x.shape[dim])


def _split(op: Op, x: Atom, dim: int) -> Piece | None:
    (source,) = values(op.inputs)
    before = op.outputs.index(x) if isinstance(x, Value) else 0
    if op.params["axis"] != dim:
        return None
    return Piece(source, dim, int(sum(op.params["sizes"][:before])), x.shape[dim])


_CUTS: dict[str, Callable[[Op, Atom, int], Piece | None]] = {"slice": _sliced, "split": _split}


def _whole(pieces: Sequence[Piece], op: Op) -> Sequence[Piece]:
    """The pieces if together they are one array rotated by one distance; else none."""
    if not pieces:
        return ()
    source, dim = pieces[0].source, pieces[0].dim
    n, ends = source.shape[dim], [piece.at + piece.length for piece in pieces]
    alike = all(piece.source is source and piece.dim == dim for piece in pieces)
    fills = [piece.at for piece in pieces] == [0, *ends[:-1]] and ends[-1] == n == op.outputs[0].shape[dim]
    return pieces if alike and fills and len({(p.at - p.start) % n for p in pieces}) == 1 else ()


def _assembled(x: jax.Array, pieces: Sequence[Piece]) -> jax.Array:
    """The result computed from the source of the pieces."""
    dim, shift = pieces[0].dim, (pieces[0].at - pieces[0].start) % x.shape[pieces[0].dim]
    rolled = roll_p.bind(x, axis=dim, shift=shift) if shift else x
    *before, result = (_chained(rolled, piece.chain) for piece in pieces)
    if len({_text(piece.chain) for piece in pieces}) == 1:
        return result
    places = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    for piece, other in reversed(list(zip(pieces, before, strict=False))):
        result = lax.select(places < piece.at + piece.length, other, result)
    return result


def _chained(x: jax.Array, chain: Sequence[Op]) -> jax.Array:
    for op in chain:
        operands = [x if isinstance(y, Value) else jnp.asarray(y.value, y.dtype) for y in op.inputs]
        x = op.primitive.bind(*operands, **op.params)
    return x


def _text(chain: Sequence[Op]) -> Any:
    """A text that is equal for chains that compute the same."""
    literals = [[str(x.value) if isinstance(x, Literal) else "" for x in op.inputs] for op in chain]
    return str([(op.name, op.params) for op in chain]), str(literals)
