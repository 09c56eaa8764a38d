"""Local programs of operations on windows: the block with its halo, and as much padding as the windows need.

A device that holds some of the groups of a convolution runs so many groups.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.ir import Op
from meshdsl.lowering.local.exchange import slid, window
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.lowering.moves import identity
from meshdsl.rules.windows import conv_windows, pool_windows, scatter_windows


@local("conv_general_dilated")
def conv(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Groups of features lie along the images' feature dim, groups of the batch along its batch dim."""
    spec, (images, kernels), padding = op.params["dimension_numbers"], arrays, list(op.params["padding"])
    for k, dim in enumerate(spec.lhs_spec[2:]):
        axes = where.inputs[0].splitting(dim)
        if axes:
            summed = where.inputs[1].splitting(spec.rhs_spec[2 + k])
            images, padding[k] = slid(images, where, axes, dim, conv_windows(op, k)[1 if summed else 0])
    batch, feature = (prod(where.sizes[axis] for axis in where.inputs[0].splitting(d)) for d in spec.lhs_spec[:2])
    feature_groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    return bind(
        op,
        images,
        kernels,
        padding=tuple(padding),
        feature_group_count=feature_groups // feature if feature_groups > 1 else 1,
        batch_group_count=batch_groups // batch if batch_groups > 1 else 1,
    )


@local("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def pool(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Beyond the ends of the whole dim lies what the reduction ignores."""
    count = len(op.outputs) if op.name == "reduce_window" else len(arrays)
    operands, starts, padding = list(arrays[:count]), arrays[count:], list(op.params["padding"])
    for d in range(len(op.inputs[0].shape)):
        axes = where.inputs[0].splitting(d)
        if axes:
            for i, x in enumerate(operands):
                fill = _filling(op, i, starts, x.dtype)
                operands[i], (low, high) = slid(x, where, axes, d, pool_windows(op, d), fill)
                padding[d] = (low, max(high, 0))
    return bind(op, *operands, *starts, padding=tuple(padding))


@local("select_and_gather_add")
def pooled_at(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Beyond the ends of the whole dim lies what is never selected."""
    (x, chosen), padding = arrays, list(op.params["padding"])
    for d in range(len(op.inputs[0].shape)):
        axes = where.inputs[0].splitting(d)
        if axes:
            sliding = pool_windows(op, d)
            x, _ = slid(x, where, axes, d, sliding)
            chosen, (low, high) = slid(chosen, where, axes, d, sliding, _never(op, chosen.dtype))
            padding[d] = (low, max(high, 0))
    return bind(op, x, chosen, padding=tuple(padding))


@local("select_and_scatter_add")
def unpooled(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """All windows that reach into the block write to what they see, and the block is cut out of that."""
    (sources, chosen), padding, block = arrays, list(op.params["padding"]), arrays[1].shape
    starts = [0] * len(block)
    for d in range(len(block)):
        axes = where.inputs[1].splitting(d)
        if axes:
            spreading = scatter_windows(op, d)
            sources = window(sources, where, axes, d, *spreading.windows)
            chosen = window(chosen, where, axes, d, *spreading.elements, _never(op, chosen.dtype))
            padding[d], starts[d] = (0, 0), spreading.elements[0]
    (written,) = bind(op, sources, chosen, padding=tuple(padding))
    return (lax.slice(written, starts, [start + n for start, n in zip(starts, block, strict=True)]),)


def _never(op: Op, dtype: jnp.dtype) -> jax.Array | float:
    """What is never the largest, or smallest."""
    return identity("max" if op.params["select_prim"] is lax.ge_p else "min", dtype)


def _filling(op: Op, i: int, starts: tuple[jax.Array, ...], dtype: jnp.dtype) -> jax.Array | float:
    """What the reduction ignores: the start of operand i, or what the operation's name says."""
    return starts[i] if starts else identity(op.name.removeprefix("reduce_window_"), dtype)
