"""Local programs of the user's ``jax.shard_map``: blocks cross its boundary as they are, collectives run as written.

Inside ours all mesh axes are bound by their names, so a collective of the user's body is the same function of jax over
the same axes, on this device's block. The plan for automatic axes (a block cut further, a partial sum) does not
concern it.
"""

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.ir.graph import Literal, Op
from meshdsl.ir.manual import BOUNDARY
from meshdsl.lowering.local.collectives import collective_scope
from meshdsl.lowering.local.registry import Local, local
from meshdsl.rules.shard_map import KINDS


@local(*BOUNDARY)
def cross(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> Sequence[jax.Array]:
    """The block itself: inside it is whole, outside it is a part."""
    return arrays


@local("axis_index")
def index(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> Sequence[jax.Array]:
    """The position of this device."""
    return (lax.axis_index(op.params["axis_name"]),)


@local(*KINDS)
def collective(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> Sequence[jax.Array]:
    """The user's collective under its planned name; of a literal, computed without communication."""
    if isinstance(op.inputs[0], Literal):
        return (_of_literal(op, arrays[0], where),)
    with jax.named_scope(collective_scope(KINDS[op.name], op.params["moved"], op.inputs[0].dtype)):
        return COLLECTIVES[op.name](op, arrays)


def _psum(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    return (lax.psum(arrays[0], op.params["axes"], axis_index_groups=op.params["groups"]),)


def _pmax(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    return (lax.pmax(arrays[0], op.params["axes"], axis_index_groups=op.params["groups"]),)


def _pmin(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    return (lax.pmin(arrays[0], op.params["axes"], axis_index_groups=op.params["groups"]),)


def _all_gather(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    options = {"axis": op.params["dim"], "tiled": op.params["tiled"], "axis_index_groups": op.params["groups"]}
    return (lax.all_gather(arrays[0], op.params["axes"], **options),)


def _reduce_scatter(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    options = {"tiled": op.params["tiled"], "axis_index_groups": op.params["groups"]}
    return (lax.psum_scatter(arrays[0], op.params["axes"], scatter_dimension=op.params["dim"], **options),)


def _all_to_all(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    options = {"tiled": True, "axis_index_groups": op.params["groups"]}
    return (lax.all_to_all(arrays[0], op.params["axes"], op.params["split"], op.params["join"], **options),)


def _ragged_all_to_all(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    output, operand, *positions = arrays
    return (lax.ragged_all_to_all(operand, output, *positions, axis_name=op.params["axes"]),)


def _ppermute(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    return (lax.ppermute(arrays[0], op.params["axes"], op.params["pairs"]),)


def _pbroadcast(op: Op, arrays: tuple[jax.Array, ...]) -> Sequence[jax.Array]:
    """A sum in which all but one are zero: backends without a broadcast of their own have sums."""
    x, axes = arrays[0], op.params["axes"]
    source = op.params["source"] if "source" in op.params else arrays[1]
    kept = jnp.where(lax.axis_index(axes) == source, x, jnp.zeros_like(x))
    return (jnp.asarray(lax.psum(kept, axes), x.dtype),)


COLLECTIVES: dict[str, Callable[[Op, tuple[jax.Array, ...]], Sequence[jax.Array]]] = {
    "psum": _psum,
    "pmax": _pmax,
    "pmin": _pmin,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "ragged_all_to_all": _ragged_all_to_all,
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
}


def _of_literal(op: Op, x: jax.Array, where: Local) -> jax.Array:
    """The collective of a scalar that is the same everywhere."""
    if op.name == "psum":
        group = (len(group) for group in op.params["groups"] or ())
        return x * np.asarray(next(group, prod(where.sizes[axis] for axis in op.params["axes"])), x.dtype)
    if op.name == "all_gather":
        return jnp.broadcast_to(x, op.outputs[0].shape)
    if op.name == "ppermute":
        receivers = jnp.asarray([to for _, to in op.params["pairs"]], jnp.int32)
        return jnp.where((receivers == lax.axis_index(op.params["axes"])).any(), x, jnp.zeros_like(x))
    return x
