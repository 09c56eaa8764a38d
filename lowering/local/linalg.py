"""The local program of the Fourier transform: batches of whole transforms.

The compiler requires row-major operands and fails on any other order (CPU, jax 0.10 and 0.12). Around a block with a
dim of length 1 it may choose another order, since moving such a dim costs nothing, and propagates it. So the order is
fixed by a layout constraint, and all batch dims are merged into one.
"""

from math import prod

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from meshdsl.ir.graph import Op
from meshdsl.lowering.local.registry import Local, bind, local


@local("fft")
def fft(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Transforms the batch of a block."""
    (x,) = arrays
    apart = x.shape[: x.ndim - len(op.params["fft_lengths"])]
    rows = (prod(apart),) if prod(apart) != 1 else ()
    (found,) = bind(op, _row_major(x.reshape(*rows, *x.shape[len(apart) :])))
    return (_row_major(found).reshape(*apart, *found.shape[len(rows) :]),)


def _row_major(x: jax.Array) -> jax.Array:
    constrained: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return constrained
