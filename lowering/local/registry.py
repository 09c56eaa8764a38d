"""Local programs: what one device runs for an operation, given blocks of the operands.

The rule of an operation says which placements are legal; the local program computes the
result's block from the operands' blocks. For most operations it is the same primitive with
the same parameters. Only those whose parameters speak of shapes or positions (reshape, iota,
slice, gather, ...) register a program of their own.

A local program uses ``jax.lax`` and positions on named axes, nothing else. So the
code that runs under ``shard_map`` is the code that the rules are proved with under
``jax.vmap(axis_name=...)``, where the ranks are rows of an array.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.layouts.layout import Layout

# ---- Position --------------------------------------------------------------------------------------------------------
# Where a device stands on a mesh axis.
#
# An axis may also be one in time: its "devices" take turns in a loop, and a position on it is the loop's counter.


_NONE: Mapping[str, jax.Array] = MappingProxyType({})
_TURNS: ContextVar[Mapping[str, jax.Array]] = ContextVar("turns", default=_NONE)


def position(axis: str) -> jax.Array:
    """The position of this device on ``axis``, as an int32 scalar."""
    turns = _TURNS.get()
    return turns[axis] if axis in turns else lax.axis_index(axis)


@contextmanager
def run_exchanges(axis: str, turn: jax.Array) -> Iterator[None]:
    """While this is traced, ``axis`` is one in time, and it is this turn."""
    token = _TURNS.set({**_TURNS.get(), axis: turn})
    try:
        yield
    finally:
        _TURNS.reset(token)


# ---- Registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local:
    """Where one device stands while it runs an operation.

    Args:
      sizes: devices per mesh axis.
      inputs: layout in which each operand is read; all-``B`` for literals.
      outputs: layout in which each result is made.
    """

    sizes: dict[str, int]
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    def local_shape(self, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this device's block of a tensor of ``shape``."""
        return layout.local_shape(shape, self.sizes)

    def index(self, axes: tuple[str, ...]) -> jax.Array:
        """Position of this device along ``axes``, major first, as an int32 scalar."""
        at: jax.Array = jax.numpy.int32(0)
        for axis in axes:
            at = at * self.sizes[axis] + position(axis)
        return at

    def offset(self, layout: Layout, dim: int, global_size: int) -> jax.Array:
        """Start of this device's block in ``dim``, which has ``global_size`` elements in all."""
        axes = layout.splitting(dim)
        blocks = 1
        for axis in axes:
            blocks *= self.sizes[axis]
        return self.index(axes) * (global_size // blocks)


LocalProgram = Callable[[Op, tuple[jax.Array, ...], Local], Sequence[jax.Array]]
PROGRAMS: dict[str, LocalProgram] = {}


def local(*names: str) -> Callable[[LocalProgram], LocalProgram]:
    """Register the local program of primitives of these names."""

    def register(program: LocalProgram) -> LocalProgram:
        for name in names:
            PROGRAMS[name] = program
        return program

    return register


def run_local(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """This device's blocks of the results, from its blocks of the operands (literals whole)."""
    program = PROGRAMS.get(op.name)
    return tuple(program(op, arrays, where)) if program else bind(op, *arrays)


def bind(op: Op, *arrays: jax.Array, **changed: Any) -> tuple[jax.Array, ...]:
    """The primitive of ``op`` on ``arrays``, with some parameters changed."""
    params = {**op.params, **{name: None for name in _SHARDINGS if name in op.params}, **changed}
    result = op.primitive.bind(*arrays, **op.primitive.get_bind_params(params))
    return tuple(result) if op.primitive.multiple_results else (result,)


_SHARDINGS = ("sharding", "out_sharding")  # the user's types of global arrays; a block has none
