"""Local programs of transforms.

The compiler runs a Fourier transform of what lies row major, and fails on anything else (CPU, jax
0.10 and 0.12). Around a block that is one element thick it may choose another order, as moving
such a dim costs nothing, and it hands on what order the result is read in. So the order is
stated, and all dims but the transformed ones are one.
"""

from math import prod

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from meshdsl.ir.graph import Op
from meshdsl.lowering.local.registry import Local, bind, local


@local("fft")
def fft(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The transforms of a block, of which each is whole."""
    (x,) = arrays
    apart = x.shape[: x.ndim - len(op.params["fft_lengths"])]
    rows = (prod(apart),) if prod(apart) != 1 else ()
    (found,) = bind(op, _row_major(x.reshape(*rows, *x.shape[len(apart) :])))
    return (_row_major(found).reshape(*apart, *found.shape[len(rows) :]),)


def _row_major(x: jax.Array) -> jax.Array:
    stated: jax.Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return stated
