"""The unsharded step of a program that the user divides by ``jax.shard_map``: every device runs all of it.

Outside the user's shard_maps every device has whole arrays. Inside it takes its block of them and exchanges what the
user's collectives exchange, and the results are gathered. No layout is planned, so this is what the planned step is
compared with. (``jax.jit`` of the step is the same, but needs the mesh that the user wrote, with devices.)
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshdsl.ir.graph import Graph, Op, Value, walk
from meshdsl.ir.manual import BOUNDARY
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.interpreter import Arrays, Target, run_graph
from meshdsl.lowering.local.registry import Local, bind, run_local
from meshdsl.rules.shard_map import KINDS


class WholeTarget(Target):
    """Whole arrays, and blocks inside the user's shard_maps.

    Args:
      sizes: devices per mesh axis; empty without shard_maps.
    """

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.arrays: dict[int, jax.Array] = {}

    def inner(self) -> "WholeTarget":
        """Returns an empty environment."""
        return type(self)(self.sizes)

    def define(self, value: Value, array: jax.Array) -> None:
        """Stores the array."""
        self.arrays[value.id] = array

    def read(self, op: Op, index: int, value: Value) -> jax.Array:
        """Returns the stored array."""
        return self.arrays[value.id]

    def run(self, op: Op, arrays: Arrays) -> Sequence[jax.Array]:
        """Runs the operation as it is."""
        return self.run_changed(op, arrays)

    def run_changed(self, op: Op, arrays: Arrays, **params: Any) -> Sequence[jax.Array]:
        """Runs the operation with some parameters changed."""
        if op.name == "enter_shard_map":
            return (_summand(self._block(arrays[0], op.params["spec"]), op.params["unreduced"]),)
        if op.name == "leave_shard_map":
            whole = _gathered(arrays[0], op.params["spec"])
            return (lax.psum(whole, op.params["unreduced"]) if op.params["unreduced"] else whole,)
        if op.name in KINDS:
            return run_local(op, arrays, Local(self.sizes, (Layout(),) * len(op.inputs), (Layout(),)))
        return bind(op, *arrays, **params)

    def _block(self, x: jax.Array, spec: Sequence[tuple[str, ...]]) -> jax.Array:
        for dim, axes in enumerate(spec):
            if axes:
                length = x.shape[dim] // prod(self.sizes[axis] for axis in axes)
                x = lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * length, length, dim)
        return x


def _summand(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the whole on the first device along ``axes``, zeros on all others."""
    return jnp.where(lax.axis_index(axes) == 0, x, jnp.zeros_like(x)) if axes else x


def _gathered(x: jax.Array, spec: Sequence[tuple[str, ...]]) -> jax.Array:
    for dim, axes in enumerate(spec):
        x = lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x
    return x


def is_divided(graph: Graph) -> bool:
    """Whether the user divides a part of the program."""
    return any(op.name in BOUNDARY for _, op in walk(graph))


def whole_step(
    graph: Graph, mesh: jax.sharding.Mesh, target: Callable[[dict[str, int]], Target] = WholeTarget
) -> Callable[..., list[jax.Array]]:
    """Returns a divided program as a function of flat whole arrays, which every device of the mesh runs."""
    run: Callable[..., Arrays] = jax.shard_map(
        lambda *arrays: run_graph(graph, arrays, target(dict(mesh.shape))),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return lambda *arrays: list(run(*arrays))
