"""Sharding rules of JAX primitives: what each operation does to placements on one mesh axis.

A rule (``layouts.sharding_rule``, as Shardy's OpShardingRule) names the factors of an operation's dims and the
properties that let partial values pass: linear, increasing, decreasing, commuting. The table of signatures, one row of
placements per operand and result, is derived from it; N axes take one row each. ``tests/rules`` proves every row by
brute force on simulated devices.

One file per family of operations, and for most of them a file of the same name in ``lowering/local`` with the program
that one device runs:

    registry      ``@rule(names)``, ``RULES``, and the table of an operation
    elementwise   one table of properties for all elementwise operations       (runs unchanged on blocks)
    matmul        dot_general, scaled and ragged products: bilinear
    reduction     reductions, running reductions, sort, top_k, argmax
    shape         data movement: reshape, transpose, pad, slice, roll, ...
    indexing      gather, scatter, dynamic slices
    convolution   convolution and pooling, on ``halo``: windows that slide over blocks
    linalg        FFT and decompositions: batches only
    random        keys, bits, and calls with effects
    ragged_exchange  ``md.ragged_exchange``: rows whose receivers are data
    shard_map     the user's ``jax.shard_map``: its boundary, and the collectives of its body
    dim_groups    read from the rules: which dims are one dim, to be padded together, and what padding may hold

A new primitive gets its rule in the file of its family, and a local program only if its parameters contain shapes or
positions, or if its devices exchange data.
"""

from meshdsl.rules import (
    convolution,
    elementwise,
    indexing,
    linalg,
    matmul,
    ragged_exchange,
    random,
    reduction,
    shape,
    shard_map,
)
from meshdsl.rules.registry import RULES, rows_if_pinned_partial, rows_of, rule

__all__ = [
    "RULES",
    "convolution",
    "elementwise",
    "indexing",
    "linalg",
    "matmul",
    "ragged_exchange",
    "random",
    "reduction",
    "rows_if_pinned_partial",
    "rows_of",
    "rule",
    "shape",
    "shard_map",
]
