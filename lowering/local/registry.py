"""The registry of local programs, and the position of a device on the mesh.

The rule of an operation states which placements are legal; the local program computes the block of the result from the
blocks of the operands. For most operations it is the same primitive with the same parameters. Only operations whose
parameters contain shapes or positions (reshape, iota, slice, gather, ...), or whose devices exchange data, register a
program of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.layouts.layout import Layout

# ---- Position --------------------------------------------------------------------------------------------------------
# An axis may also be one in time: its "devices" are the iterations of a loop over microbatches, and a position on it is
# the loop's counter.


_NONE: Mapping[str, jax.Array] = MappingProxyType({})
_ITERATIONS: ContextVar[Mapping[str, jax.Array]] = ContextVar("iterations", default=_NONE)


def position(axis: str) -> jax.Array:
    """Returns the position of this device on ``axis``, as an int32 scalar."""
    iterations = _ITERATIONS.get()
    return iterations[axis] if axis in iterations else lax.axis_index(axis)


@contextmanager
def time_axis_at(axis: str, iteration: jax.Array) -> Iterator[None]:
    """Within this context, ``axis`` is an axis in time, at ``iteration``."""
    token = _ITERATIONS.set({**_ITERATIONS.get(), axis: iteration})
    try:
        yield
    finally:
        _ITERATIONS.reset(token)


# ---- Registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """The context in which one device runs an operation.

    Args:
      sizes: devices per mesh axis.
      inputs: the layout of each operand; all-``B`` for literals.
      outputs: the layout of each result.
      platform: of the devices, as jax names it; empty where nothing is said of it.
    """

    sizes: dict[str, int]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    platform: str = ""

    def local_shape(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of this device's block of a tensor of ``shape``."""
        return layout.local_shape(shape, self.sizes)

    def index(self, axes: tuple[str, ...]) -> jax.Array:
        """Returns the position of this device along ``axes``, major first, as an int32 scalar."""
        at: jax.Array = jax.numpy.int32(0)
        for axis in axes:
            at = at * self.sizes[axis] + position(axis)
        return at

    def offset(self, layout: Layout, dim: int, global_size: int) -> jax.Array:
        """Returns the start of this device's block in ``dim``, whose global size is ``global_size`` elements."""
        axes = layout.splitting(dim)
        blocks = 1
        for axis in axes:
            blocks *= self.sizes[axis]
        return self.index(axes) * (global_size // blocks)


LocalProgram = Callable[[Op, tuple[jax.Array, ...], Local], Sequence[jax.Array]]
PROGRAMS: dict[str, LocalProgram] = {}


def local(*names: str) -> Callable[[LocalProgram], LocalProgram]:
    """Returns a decorator that registers the local program of primitives of these names."""

    def register(program: LocalProgram) -> LocalProgram:
        for name in names:
            PROGRAMS[name] = program
        return program

    return register


def run_local(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Returns this device's blocks of the results, given its blocks of the operands (literals whole)."""
    program = PROGRAMS.get(op.name)
    return tuple(program(op, arrays, where)) if program else bind(op, *arrays)


def bind(op: Op, *arrays: jax.Array, **changed: Any) -> tuple[jax.Array, ...]:
    """Runs the primitive of ``op`` on ``arrays``, with some parameters changed."""
    params = {**op.params, **{name: None for name in _SHARDINGS if name in op.params}, **changed}
    if op.name == "pad":
        return (padded(arrays[0], arrays[1], params["padding_config"]),)
    result = op.primitive.bind(*arrays, **op.primitive.get_bind_params(params))
    return tuple(result) if op.primitive.multiple_results else (result,)


def padded(x: jax.Array, fill: jax.Array, amounts: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Returns ``x`` padded or cut by low, high and interior ``amounts``.

    jax does not pad keys, but passes over the graph do, to select other keys there: these have zeros beside them.
    """
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return lax.pad(x, fill, amounts)
    data = jax.random.key_data(x)
    data = lax.pad(data, jnp.zeros((), data.dtype), [*amounts, *((0, 0, 0),) * (data.ndim - x.ndim)])
    keys: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return keys


_SHARDINGS = ("sharding", "out_sharding")  # the user's types of global arrays; a block has none
