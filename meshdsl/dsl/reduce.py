"""Reductions and normalisations over named dims; ``over=None`` is over all of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.dsl.array import NamedArray, Tensor, computed, lift
from meshdsl.dsl.dims import DimsLike
from meshdsl.dsl.operands import axes, axis, named_operand


def sum(x: Any, over: DimsLike | None = None) -> Tensor:
    """The sum over these dims."""
    return _reduced(jnp.sum, x, over)


def mean(x: Any, over: DimsLike | None = None) -> Tensor:
    """The mean over these dims."""
    return _reduced(jnp.mean, x, over)


def prod(x: Any, over: DimsLike | None = None) -> Tensor:
    """The product over these dims."""
    return _reduced(jnp.prod, x, over)


def max(x: Any, over: DimsLike | None = None) -> Tensor:
    """The largest element over these dims."""
    return _reduced(jnp.max, x, over)


def min(x: Any, over: DimsLike | None = None) -> Tensor:
    """The smallest element over these dims."""
    return _reduced(jnp.min, x, over)


def any(x: Any, over: DimsLike | None = None) -> Tensor:
    """Whether any element over these dims is true."""
    return _reduced(jnp.any, x, over)


def all(x: Any, over: DimsLike | None = None) -> Tensor:
    """Whether all elements over these dims are true."""
    return _reduced(jnp.all, x, over)


def var(x: Any, over: DimsLike | None = None) -> Tensor:
    """The variance over these dims, of all elements (no degree of freedom taken off)."""
    return _reduced(jnp.var, x, over)


def std(x: Any, over: DimsLike | None = None) -> Tensor:
    """The standard deviation over these dims."""
    return _reduced(jnp.std, x, over)


def logsumexp(x: Any, over: DimsLike | None = None) -> Tensor:
    """The logarithm of the sum of exponentials over these dims, without overflow."""
    return _reduced(jax.nn.logsumexp, x, over)


def norm(x: Any, over: DimsLike | None = None) -> Tensor:
    """The Euclidean norm over these dims."""
    return lift(jnp.sqrt, sum(lift(jnp.square, x), over))


def argmax(x: Any, over: DimsLike) -> Tensor:
    """The position of the largest element along one dim, int32."""
    return _argument(jnp.argmax, x, over)


def argmin(x: Any, over: DimsLike) -> Tensor:
    """The position of the smallest element along one dim, int32."""
    return _argument(jnp.argmin, x, over)


def softmax(x: Any, over: DimsLike) -> Tensor:
    """Exponentials that sum to 1 over these dims."""
    x = named_operand(x)
    return computed(jax.nn.softmax(x.array, axis=_one_or_more(axes(x, over))), x.dims)


def log_softmax(x: Any, over: DimsLike) -> Tensor:
    """The logarithm of the softmax over these dims."""
    x = named_operand(x)
    return computed(jax.nn.log_softmax(x.array, axis=_one_or_more(axes(x, over))), x.dims)


def rms_norm(x: Any, over: DimsLike, eps: float = 1e-6) -> Tensor:
    """``x`` divided by its root mean square over these dims, computed in float32 at least.

    The scale is yours to multiply: ``md.rms_norm(x, over="embed") * scale``.
    """
    wide = _wide(named_operand(x))
    scaled = wide * lift(jax.lax.rsqrt, mean(lift(jnp.square, wide), over) + eps)
    return _in(jnp.result_type(x.dtype, float), scaled)


def layer_norm(x: Any, over: DimsLike, eps: float = 1e-6) -> Tensor:
    """``x`` less its mean, divided by its standard deviation over these dims, computed in float32 at least."""
    wide = _wide(named_operand(x))
    centred = wide - mean(wide, over)
    scaled = centred * lift(jax.lax.rsqrt, mean(lift(jnp.square, centred), over) + eps)
    return _in(jnp.result_type(x.dtype, float), scaled)


def _wide(x: NamedArray) -> NamedArray:
    return _in(jnp.promote_types(x.dtype, jnp.float32), x)


def _in(dtype: Any, x: NamedArray) -> NamedArray:
    return x if x.dtype == dtype else x.astype(dtype)


def _one_or_more(found: tuple[int, ...]) -> int | tuple[int, ...]:
    return found[0] if len(found) == 1 else found


def _reduced(fn: Callable[..., Any], x: Any, over: DimsLike | None) -> Tensor:
    x = named_operand(x)
    gone = axes(x, over)
    made = fn(x.array, axis=gone)
    return computed(made, tuple(name for i, name in enumerate(x.dims) if i not in gone))


def _argument(fn: Callable[..., Any], x: Any, over: DimsLike) -> Tensor:
    x = named_operand(x)
    gone = axis(x, over)
    made = fn(x.array, axis=gone)
    return computed(made, x.dims[:gone] + x.dims[gone + 1 :])
