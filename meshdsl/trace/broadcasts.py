"""Clean-up: a piece of what is the same all along a dim is made as small as it is.

The gradient of a sum over pieces put together is one number, spread over all of them and then cut up. Compilers see
that the pieces are equal, and send what is made of them once; made as pieces, they are one expression here too.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshdsl.ir import Graph, Op, Value
from meshdsl.trace.graphs import broadcast_params, in_bodies, with_ops


def fold_cuts(graph: Graph) -> Graph:
    """The graph with pieces of broadcast arrays as broadcasts."""
    made: dict[int, Op] = {}
    ops: list[Op] = []
    for op in graph.ops:
        op = in_bodies(fold_cuts, op)
        source = _spread(op, made) if op.name in ("slice", "split") else None
        pieces = [_piece(op, source, v) for v in op.outputs] if source else [op]
        made.update((piece.outputs[0].id, piece) for piece in pieces if piece.name == "broadcast_in_dim")
        ops += pieces
    return with_ops(graph, ops)


def _spread(op: Op, made: Mapping[int, Op]) -> Op | None:
    """The broadcast that a cut is a piece of, if it is the same along all dims that are cut."""
    (x,) = op.inputs
    source = made.get(x.id) if isinstance(x, Value) else None
    if source is None:
        return None
    cut = {d for v in op.outputs for d, n in enumerate(v.shape) if n != x.shape[d]}
    kept = zip(source.inputs[0].shape, source.params["broadcast_dimensions"], strict=True)
    return None if cut & {d for n, d in kept if n > 1} else source


def _piece(op: Op, source: Op, v: Value) -> Op:
    params = broadcast_params(v.shape, source.params["broadcast_dimensions"])
    return replace(source, params=params, outputs=(v,), source=op.source, scope=op.scope, phase=op.phase)
