"""Local program of convolution: a device that holds some of the groups runs so many groups."""

import jax

from meshdsl.ir import Op
from meshdsl.lowering.local.registry import Local, bind, local


@local("conv_general_dilated")
def conv(op: Op, arrays: tuple[jax.Array, ...], where: Local) -> tuple[jax.Array, ...]:
    """Groups of features lie along the images' feature dim, groups of the batch along its batch dim."""
    batch, feature = op.params["dimension_numbers"].lhs_spec[:2]
    blocks = where.inputs[0].shards(len(op.inputs[0].shape), where.sizes)
    feature_groups, batch_groups = op.params["feature_group_count"], op.params["batch_group_count"]
    return bind(
        op,
        *arrays,
        feature_group_count=feature_groups // blocks[feature] if feature_groups > 1 else 1,
        batch_group_count=batch_groups // blocks[batch] if batch_groups > 1 else 1,
    )
