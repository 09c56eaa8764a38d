"""Local programs of calls that are made for what they do, not for what they return: once, on the first device."""

import jax
from jax import lax

from meshdsl.ir import Op
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.registry import ONCE


@local(*ONCE)
def once(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The call on the first device, whose operands are whole; the others pass by."""
    first = where.index(tuple(where.sizes)) == 0
    lax.cond(first, lambda *xs: bind(op, *xs), lambda *xs: (), *arrays)
    return ()
