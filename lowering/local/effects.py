"""Local programs of calls that are made for what they do: once, on the first device."""

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Op
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.registry import ONCE


@local(*ONCE)
def once(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The call on the first device, whose operands are whole; the others pass by, with zeros as their results."""
    first = where.index(tuple(where.sizes)) == 0
    nothing = tuple(jnp.zeros(v.shape, v.dtype) for v in op.outputs)
    made: tuple[jax.Array, ...] = lax.cond(first, lambda *xs: bind(op, *xs), lambda *xs: nothing, *arrays)
    return made
