"""Local programs: what one device runs for an operation, given blocks of its operands.

Most operations run their own primitive on the blocks and have no entry. The files have the names of those in
``meshdsl/rules``, by family of operations; each program belongs to the rule of the same primitive:

    registry      ``@local(names)``, ``run_local``, and where a device stands on the mesh
    collectives   reshard steps as collectives, and exchanges between the devices of a split dim
    matmul, reduction, shape, indexing, convolution, linalg, random     one program per primitive
    ragged_exchange  rows whose receivers are data, as the platform can send them
    shard_map     the user's collectives

A program uses ``jax.lax`` and positions on named axes only, so the code that runs under ``shard_map`` is the code that
the rules are proved with under ``jax.vmap(axis_name=...)``.
"""

from meshdsl.lowering.local import (
    convolution,
    indexing,
    linalg,
    matmul,
    ragged_exchange,
    random,
    reduction,
    shape,
    shard_map,
)
from meshdsl.lowering.local.registry import Local, bind, local, run_local

__all__ = [
    "Local",
    "bind",
    "convolution",
    "indexing",
    "linalg",
    "local",
    "matmul",
    "ragged_exchange",
    "random",
    "reduction",
    "run_local",
    "shape",
    "shard_map",
]
