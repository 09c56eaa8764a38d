"""Clean-up: arrays without elements are made where they are read.

They need no operand. Left in the plan, their operands could be moved for them, and the compiled
program, which leaves that out, would communicate less than planned.
"""

import jax.numpy as jnp
import numpy as np
from jax import dtypes
from jax.lax import broadcast_in_dim_p

from meshdsl.ir import Graph, Literal, Op, Value
from meshdsl.trace.graphs import broadcast_params, in_bodies, values, with_ops


def make_empty(graph: Graph) -> Graph:
    """The graph with operations that return nothing but empty arrays replaced by such arrays."""
    ops = (in_bodies(make_empty, op) for op in graph.ops)
    return with_ops(graph, (new for op in ops for new in (_made(op) if _is_idle(op) else (op,))))


def _is_idle(op: Op) -> bool:
    reads = any(values(op.inputs)) and not op.effects and not op.bodies
    return reads and bool(op.outputs) and all(map(_is_empty, op.outputs))


def _is_empty(value: Value) -> bool:
    return 0 in value.shape and not dtypes.issubdtype(value.dtype, dtypes.extended)


def _made(op: Op) -> tuple[Op, ...]:
    """One operation for each result."""
    found = []
    for value in op.outputs:
        params = broadcast_params(value.shape, ())
        zero = Literal(np.zeros((), jnp.dtype(value.dtype)), (), value.dtype)
        found.append(
            Op(0, "broadcast_in_dim", broadcast_in_dim_p, params, (zero,), (value,), source=op.source, scope=op.scope)
        )
    return tuple(found)
