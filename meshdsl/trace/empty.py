"""Clean-up: arrays without elements are made where they are read.

They need no operand. Left in the plan, their operands could be moved for them, and the compiled
program, which leaves that out, would communicate less than planned. One that is padded is the padding.
"""

import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.lax import broadcast_in_dim_p

from meshdsl.ir import Graph, Literal, Op, Value
from meshdsl.trace.graphs import broadcast_params, in_bodies, values, with_ops


def make_empty(graph: Graph) -> Graph:
    """The graph with operations that return nothing but empty arrays replaced by such arrays, or pad such an array."""
    ops = (in_bodies(make_empty, op) for op in graph.ops)
    return with_ops(graph, (new for op in ops for new in _simplest(op)))


def _simplest(op: Op) -> tuple[Op, ...]:
    if _is_idle(op):
        return tuple(_made_of(_zero(value), value, op) for value in op.outputs)
    if op.name == "pad" and 0 in op.inputs[0].shape:
        return (_made_of(op.inputs[1], op.outputs[0], op),)
    return (op,)


def _is_idle(op: Op) -> bool:
    empty = bool(op.outputs) and all(map(_is_empty, op.outputs))
    return empty and any(values(op.inputs)) and not op.effects and not op.bodies


def _is_empty(value: Value) -> bool:
    return 0 in value.shape and not dtypes.issubdtype(value.dtype, dtypes.extended)


def _zero(value: Value) -> Literal:
    return Literal(np.zeros((), jnp.dtype(value.dtype))[()], (), value.dtype)


def _made_of(x: Value | Literal, value: Value, op: Op) -> Op:
    """An operation that makes a value of one scalar, in place of another."""
    params = broadcast_params(value.shape, ())
    return Op(0, "broadcast_in_dim", broadcast_in_dim_p, params, (x,), (value,), source=op.source, scope=op.scope)
