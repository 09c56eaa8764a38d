"""Pad folding: pads and slices are folded into the consumer where it can pad by itself.

    pad(x, (1, 0))[:-1]                     pad(x, (1, -1))         the last token's features
    concatenate [0, x[:-1]]                 the same
    conv(pad(x, (3, 0)), padding (0, 0))    conv(x, padding (3, 0))
    reduce_window_sum of a padded x         the same, of x          the gradient of average pooling

A dim of n + 1 elements cannot be split where one of n can, so each half of such a pair would need the dim whole;
together they only send the ends of blocks. A slice is a pad by negative amounts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.rewrite import in_bodies, values, with_ops

Amounts = tuple[int, int, int]  # in front, behind, between
FEW = 8  # one of so many places is few


@dataclass(frozen=True)
class Edges:
    """``source`` with its dims padded by ``amounts`` of ``fill``; negative amounts cut, and need none."""

    source: Value
    amounts: tuple[Amounts, ...]
    fill: Literal | None


def fold_pads(graph: Graph) -> Graph:
    """Returns the graph with such pairs as one operation; the first of a pair stays for its other consumers."""
    makers: dict[int, Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(fold_pads, op)
        op = _FOLDS[op.name](op, makers) if op.name in _FOLDS else op
        makers.update((v.id, op) for v in op.outputs)
        ops.append(op)
    return with_ops(graph, ops)


def _edges(x: Atom, makers: dict[int, Op]) -> Edges | None:
    """The pads and slices that produce ``x``."""
    maker = makers.get(x.id) if isinstance(x, Value) else None
    return _EDGES[maker.name](maker, x, makers) if maker is not None and maker.name in _EDGES else None


def _padded(op: Op, x: Atom, makers: dict[int, Op]) -> Edges | None:
    source, fill = op.inputs[0], _scalar(op.inputs[1], makers)
    if not isinstance(source, Value) or fill is None:
        return None
    return Edges(source, tuple(_whole(amounts) for amounts in op.params["padding_config"]), fill)


def _sliced(op: Op, x: Atom, makers: dict[int, Op]) -> Edges | None:
    (source,) = values(op.inputs)
    ends = zip(op.params["start_indices"], op.params["limit_indices"], source.shape, strict=True)
    strided = any(step != 1 for step in op.params["strides"] or ())
    return None if strided else Edges(source, tuple(_whole((-a, b - n, 0)) for a, b, n in ends), None)


def _split(op: Op, x: Atom, makers: dict[int, Op]) -> Edges | None:
    (source,), dim, sizes = values(op.inputs), op.params["axis"], op.params["sizes"]
    before = next(i for i, v in enumerate(op.outputs) if v is x)
    ends = -int(sum(sizes[:before])), -int(sum(sizes[before + 1 :])), 0
    return Edges(source, tuple(ends if d == dim else (0, 0, 0) for d in range(len(source.shape))), None)


def _joined(op: Op, x: Atom, makers: dict[int, Op]) -> Edges | None:
    """The concatenation of an array and a constant."""
    if len(op.inputs) != 2:
        return None
    fills = [_constant(y, makers) for y in op.inputs]
    source, fill = (op.inputs[0], fills[1]) if fills[1] is not None else (op.inputs[1], fills[0])
    if fill is None or not isinstance(source, Value):
        return None
    dim, more = op.params["dimension"], x.shape[op.params["dimension"]] - source.shape[op.params["dimension"]]
    amounts = (0, more, 0) if source is op.inputs[0] else (more, 0, 0)
    return Edges(source, tuple(amounts if d == dim else (0, 0, 0) for d in range(len(source.shape))), fill)


def _constant(x: Atom, makers: dict[int, Op]) -> Literal | None:
    """The scalar that fills ``x``."""
    maker = makers.get(x.id) if isinstance(x, Value) else None
    return _scalar(maker.inputs[0], makers) if maker is not None and maker.name == "broadcast_in_dim" else None


def _scalar(x: Atom, makers: dict[int, Op]) -> Literal | None:
    """The literal that ``x`` is, cast or not."""
    maker = makers.get(x.id) if isinstance(x, Value) else None
    if maker is None or maker.name != "convert_element_type":
        return x if isinstance(x, Literal) else None
    inner = _scalar(maker.inputs[0], makers)
    return inner and Literal(np.asarray(inner.value).astype(x.dtype)[()], (), x.dtype)


_EDGES: dict[str, Callable[[Op, Atom, dict[int, Op]], Edges | None]] = {
    "pad": _padded,
    "slice": _sliced,
    "split": _split,
    "concatenate": _joined,
}


def _leaves_few(inner: Edges, outer: Edges) -> bool:
    """Whether the inner one leaves few places of a dim that the outer one leaves alone: few that a slice finds."""
    ends = zip(inner.source.shape, inner.amounts, outer.amounts, strict=True)
    return any(not any(then) and 0 < FEW * (n + low + high) <= n for n, (low, high, _), then in ends)


def _fold_edges(op: Op, makers: dict[int, Op]) -> Op:
    """Folds a pad or slice of a padded or sliced array into one."""
    outer = _EDGES[op.name](op, op.outputs[0], makers)
    inner = _edges(outer.source, makers) if outer else None
    if outer is None or inner is None:
        return replace(op, inputs=(op.inputs[0], outer.fill)) if outer and outer.fill and op.name == "pad" else op
    if _leaves_few(inner, outer):
        return op
    fills = [edges.fill for edges in (inner, outer) if edges.fill is not None and _fills(edges)]
    amounts = [_after(a, b) for a, b in zip(inner.amounts, outer.amounts, strict=True)]
    if not fills or None in amounts or len({str(fill.value) for fill in fills}) > 1:
        return op
    params: dict[str, Any] = {"padding_config": tuple(amounts)}
    return replace(op, name="pad", primitive=lax.pad_p, params=params, inputs=(inner.source, fills[0]))


def _fold_into_windows(dilation: str) -> Callable[[Op, dict[int, Op]], Op]:
    """Folds zeros around the operand of a window sum into its padding, and zeros between elements into its dilation."""

    def fold(op: Op, makers: dict[int, Op]) -> Op:
        inner = _edges(op.inputs[0], makers)
        if inner is None or inner.fill is None or inner.fill.value:
            return op
        dims = (
            op.params["dimension_numbers"].lhs_spec[2:]
            if "dimension_numbers" in op.params
            else range(len(inner.amounts))
        )
        others = [a for d, a in enumerate(inner.amounts) if d not in dims]
        own = zip(op.params["padding"], op.params[dilation], strict=True)
        found = [_after(inner.amounts[d], (*ends, k - 1)) for d, (ends, k) in zip(dims, own, strict=True)]
        whole = [amounts for amounts in found if amounts is not None]
        if len(whole) < len(found) or any(map(any, others)):
            return op
        changed = {"padding": tuple((a, b) for a, b, _ in whole), dilation: tuple(k + 1 for *_, k in whole)}
        return replace(op, params={**op.params, **changed}, inputs=(inner.source, *op.inputs[1:]))

    return fold


def _fold_slice(op: Op, makers: dict[int, Op]) -> Op:
    """Folds a slice into a strided slice."""
    inner = _edges(op.inputs[0], makers)
    if inner is None or _fills(inner) or any(between for *_, between in inner.amounts):
        return _fold_edges(op, makers)
    more = [-low for low, *_ in inner.amounts]
    ends = {
        name: tuple(int(n) + k for n, k in zip(op.params[name], more, strict=True))
        for name in ("start_indices", "limit_indices")
    }
    return replace(op, params={**op.params, **ends}, inputs=(inner.source,))


_FOLDS: dict[str, Callable[[Op, dict[int, Op]], Op]] = {
    "pad": _fold_edges,
    "slice": _fold_slice,
    "concatenate": _fold_edges,
    "conv_general_dilated": _fold_into_windows("lhs_dilation"),
    "reduce_window_sum": _fold_into_windows("base_dilation"),
}


def _whole(amounts: Any) -> Amounts:
    low, high, between = map(int, amounts)
    return low, high, between


def _fills(edges: Edges) -> bool:
    return any(n > 0 for amounts in edges.amounts for n in amounts)


def _after(first: Amounts, then: Amounts) -> Amounts | None:
    """The composition of two pads; None if the second refills elements that the first drops, or dilates its padding."""
    spread = then[2] and any(first)
    refilled = any(a < 0 < b for a, b in zip(first[:2], then[:2], strict=True))
    return None if spread or refilled else (first[0] + then[0], first[1] + then[1], first[2] + then[2])
