"""``md.stage``: cuts a step that is no scan over layers into the stages of a pipeline.

    x = md.stage(block0(params[0], x))
    x = md.stage(block1(params[1], x))
    loss = head(params[2], x)            # three stages

The primitive behind it is the identity. Its transpose is a cut as well, so the backward pass is cut at the same places.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from meshdsl.errors import ArgumentError, faults, is_a

T = TypeVar("T")
stage_p = Primitive("stage")
stage_p.multiple_results = True


def stage(x: T) -> T:
    """Return ``x``; with ``Pipeline(axis=...)``, operations on it belong to the next stage.

    Args:
      x: an array or a pytree of arrays of any shape: everything that later stages need from earlier ones. Values that
        depend on the batch alone need not be among them.

    Returns:
      ``x``, unchanged.

    Raises:
      ArgumentError: lists the leaves that are no arrays.

    Example:
      >>> x = md.stage(block0(params[0], x))
      >>> loss = head(params[1], x)
      >>> md.parallelize(step, md.Mesh(pipe=2), pipeline=md.Pipeline(8, axis="pipe"))

    The schedules are those of GPipe (Huang et al. 2019) and its successors, see ``meshdsl.schedules``.
    """
    leaves, tree = jax.tree.flatten(x)
    alien = [is_a(leaf) for leaf in leaves if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))]
    if alien:
        raise ArgumentError(faults("stage takes arrays:", alien))
    made: T = jax.tree.unflatten(tree, stage_p.bind(*leaves, back=False) if leaves else leaves)
    return made


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, back: bool) -> tuple[Any, Any]:
    """Tangents of inexact values pass through a cut of their own."""
    live = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]
    given = [ad.instantiate_zeros(tangents[i]) for i in live]
    moved = dict(zip(live, stage_p.bind(*given, back=back) if given else (), strict=True))
    return stage_p.bind(*primals, back=back), [moved.get(i, t) for i, t in enumerate(tangents)]


def _transpose(cotangents: Sequence[Any], *operands: Any, back: bool) -> list[Any]:
    return list(stage_p.bind(*map(ad.instantiate_zeros, cotangents), back=not back))


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, back: bool) -> tuple[Any, Sequence[Any]]:
    return stage_p.bind(*operands, back=back), dims


stage_p.def_impl(lambda *xs, back: list(xs))
stage_p.def_abstract_eval(lambda *xs, back: list(xs))
mlir.register_lowering(stage_p, lambda context, *xs, back: list(xs))
ad.primitive_jvps[stage_p] = _jvp
ad.primitive_transposes[stage_p] = _transpose
batching.primitive_batchers[stage_p] = _batch
