"""Local programs of convolution and pooling: the block with its halo, and the padding that its windows need.

A device that holds some of the groups of a convolution runs that many groups; one that holds a part of one runs none.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir.graph import Op
from meshdsl.lowering.local.collectives import identity, slid, windows
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.rules.convolution import conv_windows, pool_windows, scatter_windows
from meshdsl.rules.halo import Sliding


@local("conv_general_dilated")
def conv(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """A convolution of blocks, with the feature groups and batch groups that the block holds."""
    spec, (images, kernels) = op.params["dimension_numbers"], arrays
    sliding = {}
    for k, dim in enumerate(spec.lhs_spec[2:]):
        if where.inputs[0].splitting(dim):
            summed = where.inputs[1].splitting(spec.rhs_spec[2 + k])
            sliding[dim] = conv_windows(op, k)[1 if summed else 0]
    images, left = slid(images, where, where.inputs[0], sliding)
    padding = [left.get(dim, ends) for dim, ends in zip(spec.lhs_spec[2:], op.params["padding"], strict=True)]
    batch, feature = (prod(where.sizes[axis] for axis in where.inputs[0].splitting(d)) for d in spec.lhs_spec[:2])
    feature_groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    return bind(
        op,
        images,
        kernels,
        padding=tuple(padding),
        feature_group_count=max(feature_groups // feature, 1),
        batch_group_count=max(batch_groups // batch, 1),
    )


@local("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def pool(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """A pooling of the block with its halo; beyond the ends of the dim is the identity of the reduction."""
    count = len(op.outputs) if op.name == "reduce_window" else len(arrays)
    operands, starts, sliding = arrays[:count], arrays[count:], _pools(op, where)
    fills = (_filling(op, i, starts, x.dtype) for i, x in enumerate(operands))
    held = [slid(x, where, where.inputs[0], sliding, fill) for x, fill in zip(operands, fills, strict=True)]
    return bind(op, *(x for x, _ in held), *starts, padding=_padding(op, held[0][1]))


@local("select_and_gather_add")
def pooled_at(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """A selection on the block with its halo; beyond the ends of the dim is a value that is never selected."""
    (x, chosen), layout, sliding = arrays, where.inputs[0], _pools(op, where)
    x, _ = slid(x, where, layout, sliding)
    chosen, left = slid(chosen, where, layout, sliding, _never(op, chosen.dtype))
    return bind(op, x, chosen, padding=_padding(op, left))


def _pools(op: Op, where: Local) -> dict[int, Sliding]:
    """The windows of a pooling over the dims that are split."""
    return {d: pool_windows(op, d) for d in range(len(op.inputs[0].shape)) if where.inputs[0].splitting(d)}


def _padding(op: Op, left: dict[int, tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The padding of a pooling, with what is ``left`` of it over dims with a halo."""
    held = {d: (low, max(high, 0)) for d, (low, high) in left.items()}
    return tuple(held.get(d, ends) for d, ends in enumerate(op.params["padding"]))


@local("select_and_scatter_add")
def unpooled(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """All windows that overlap the block write to the elements they cover; the block is then cut out."""
    (sources, chosen), layout, block = arrays, where.inputs[1], arrays[1].shape
    spreading = {d: scatter_windows(op, d) for d in range(len(block)) if layout.splitting(d)}
    seen = {d: s.elements for d, s in spreading.items()}
    sources = windows(sources, where, layout, {d: s.windows for d, s in spreading.items()})
    chosen = windows(chosen, where, layout, seen, _never(op, chosen.dtype))
    (written,) = bind(op, sources, chosen, padding=_padding(op, dict.fromkeys(seen, (0, 0))))
    starts = [seen[d][0] if d in seen else 0 for d in range(len(block))]
    return (lax.slice(written, starts, [start + n for start, n in zip(starts, block, strict=True)]),)


def _never(op: Op, dtype: jnp.dtype) -> jax.Array | float:
    """A value that is never selected as the largest, or smallest."""
    return identity("max" if op.params["select_prim"] is lax.ge_p else "min", dtype)


def _filling(op: Op, i: int, starts: tuple[jax.Array, ...], dtype: jnp.dtype) -> jax.Array | float:
    """The identity of the reduction: the initial value of operand i, or that of the operation's name."""
    return starts[i] if starts else identity(op.name.removeprefix("reduce_window_"), dtype)
