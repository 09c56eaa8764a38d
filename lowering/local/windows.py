"""Local programs of operations on windows: the block with its halo, and as much padding as the windows need.

A device that holds some of the groups of a convolution runs so many groups.
"""

from math import prod

import jax
import jax.numpy as jnp

from meshdsl.ir import Op
from meshdsl.lowering.local.exchange import window
from meshdsl.lowering.local.registry import Local, bind, local
from meshdsl.lowering.moves import identity
from meshdsl.rules.windows import conv_windows, pool_windows


@local("conv_general_dilated")
def conv(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Groups of features lie along the images' feature dim, groups of the batch along its batch dim."""
    spec, (images, kernels), padding = op.params["dimension_numbers"], arrays, list(op.params["padding"])
    for k, dim in enumerate(spec.lhs_spec[2:]):
        axes = where.inputs[0].splitting(dim)
        if axes:
            summed = where.inputs[1].splitting(spec.rhs_spec[2 + k])
            sliding = conv_windows(op, k)[1 if summed else 0]
            images = window(images, where, axes, dim, sliding.before, sliding.after)
            padding[k] = sliding.padding(_blocks(axes, where))
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
            sliding = pool_windows(op, d)
            fills = [_filling(op, i, starts, x.dtype) for i, x in enumerate(operands)]
            ends = (sliding.before, sliding.after)
            operands = [window(x, where, axes, d, *ends, fill) for x, fill in zip(operands, fills, strict=True)]
            low, high = sliding.padding(_blocks(axes, where))
            padding[d] = (low, max(high, 0))
    return bind(op, *operands, *starts, padding=tuple(padding))


def _filling(op: Op, i: int, starts: tuple[jax.Array, ...], dtype: jnp.dtype) -> jax.Array | float:
    """What the reduction ignores: the start of operand i, or what the operation's name says."""
    return starts[i] if starts else identity(op.name.removeprefix("reduce_window_"), dtype)


def _blocks(axes: tuple[str, ...], where: Local) -> int:
    return prod(where.sizes[axis] for axis in axes)
