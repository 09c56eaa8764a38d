"""Local programs of transforms.

The compiler runs a Fourier transform of what lies row major, and fails on anything else (CPU, jax
0.10 and 0.12). Around a block that is one element thick it may choose another order, as moving
such a dim costs nothing; so the order is stated.
"""

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from meshdsl.ir import Op
from meshdsl.lowering.local.registry import Local, bind, local


@local("fft")
def fft(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """The transforms of a block, of which each is whole."""
    (x,) = arrays
    return bind(op, with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
