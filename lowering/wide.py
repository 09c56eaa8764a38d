"""The unsharded step with its short floats held wide: how far the step itself is off.

Where a step sums in bfloat16, it is off by what every partial sum was rounded. Another order of
summation is off by as much, elsewhere; neither is nearer to what was meant. Nudging the arguments
does not show that, for both then round alike. So the graph is walked once more, with every float
shorter than 32 bits held in 32:

    value                 bfloat16   ->  float32, in every operation that says nothing of bits
    operation of bits     bitcasts, functions of one's own, kernels: narrowed before, widened after
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir import Literal, Op, Program, Value, walk
from meshdsl.lowering.local.registry import bind
from meshdsl.lowering.walk import Arrays, Target, literal, run_graph

_WIDE = np.dtype(np.float32)
_BITS = "bitcast_convert_type reduce_precision random_bits nextafter".split()
_SIMPLE = (bool, int, float, complex, str, tuple, type(None), np.dtype, np.generic)


class _WideTarget(Target):
    """Whole arrays, those of short floats in float32."""

    def __init__(self) -> None:
        self.arrays: dict[int, jax.Array] = {}

    def inner(self) -> "_WideTarget":
        """An empty environment."""
        return _WideTarget()

    def define(self, value: Value, array: jax.Array) -> None:
        """Keep the array, widened."""
        self.arrays[value.id] = _widened(array)

    def literal(self, x: Literal) -> jax.Array:
        """The literal, widened."""
        return _widened(literal(x))

    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """The array as it is kept."""
        return self.arrays[value.id]

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """The operation in wide floats, or in its own if it looks at their bits or runs a function of its own."""
        if op.name not in _BITS and all(isinstance(x, _SIMPLE) for x in op.params.values()):
            return bind(op, *arrays, **{name: _WIDE for name, x in op.params.items() if _is_short(x)})
        return bind(op, *(jnp.asarray(x, read.dtype) for x, read in zip(arrays, op.inputs, strict=True)))


def wide_step(program: Program) -> Callable[..., list[jax.Array]] | None:
    """The unsharded step on flat arrays with short floats held wide; None if there are none."""
    if not any(_is_short(value.dtype) for _, op in walk(program.graph) for value in op.outputs):
        return None
    return lambda *leaves: list(run_graph(program.graph, leaves, _WideTarget()))


def _is_short(dtype: Any) -> bool:
    known = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)
    return known and dtype.itemsize < _WIDE.itemsize


def _widened(x: jax.Array) -> jax.Array:
    return jnp.asarray(x, _WIDE) if _is_short(x.dtype) else x
