"""Reductions and normalisations over named dims; ``over=None`` is over all of them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.nd.diagnostics import absent, described, fail, labels
from meshdsl.nd.named_array import (
    NamedArray,
    Names,
    Tensor,
    axes,
    axis,
    common_order,
    computed,
    lift,
    named_operand,
    promoted,
    sizes_of,
)
from meshdsl.nd.named_dims import DimsLike, read_names
from meshdsl.nd.shape import take

# ---- Reduce ----------------------------------------------------------------------------------------------------------


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


# ---- Elementwise -----------------------------------------------------------------------------------------------------
# Elementwise functions: operands meet by name, as in arithmetic.
#
# ``apply`` runs any function that keeps the shape of what it gets; the others are those that models need most.


def apply(fn: Callable[..., Any], *operands: Any) -> Tensor:
    """``fn(*arrays)``, named: ``md.apply(jnp.arctan2, x, y)``.

    Args:
      fn: an elementwise function of arrays that broadcast against each other.
      operands: named tensors and scalars.

    Raises DimError if two operands have one dim in two sizes, or the result has another shape.
    """
    return lift(fn, *operands, first=1)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    """``x`` where the condition holds, else ``y``; all three meet by name."""
    return lift(jnp.where, condition, x, y)


def _elementwise(fn: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function of ``jax`` on named tensors."""

    def run(*operands: Any) -> Tensor:
        return lift(fn, *operands)

    run.__name__ = run.__qualname__ = fn.__name__
    run.__doc__ = f"``jax``'s elementwise ``{fn.__name__}``; operands meet by name."
    return run


exp, log, log1p, expm1 = (_elementwise(fn) for fn in (jnp.exp, jnp.log, jnp.log1p, jnp.expm1))
sqrt, rsqrt, square, sign = (_elementwise(fn) for fn in (jnp.sqrt, jax.lax.rsqrt, jnp.square, jnp.sign))
sin, cos, tanh, sigmoid = (_elementwise(fn) for fn in (jnp.sin, jnp.cos, jnp.tanh, jax.nn.sigmoid))
relu, gelu, silu, softplus = (_elementwise(fn) for fn in (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus))
maximum, minimum, clip = (_elementwise(fn) for fn in (jnp.maximum, jnp.minimum, jnp.clip))
isfinite, logical_not, floor, round = (_elementwise(fn) for fn in (jnp.isfinite, jnp.logical_not, jnp.floor, jnp.round))
stop_gradient = _elementwise(jax.lax.stop_gradient)


# ---- Running ---------------------------------------------------------------------------------------------------------
# Cumulative operations along one dim, from the first element to the last or, ``reverse``, back.


def cumsum(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """The sum of all elements up to each."""
    return _running(lax.cumsum, x, over, reverse)


def cumprod(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """The product of all elements up to each."""
    return _running(lax.cumprod, x, over, reverse)


def cummax(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """The largest of all elements up to each."""
    return _running(lax.cummax, x, over, reverse)


def cummin(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """The smallest of all elements up to each."""
    return _running(lax.cummin, x, over, reverse)


def cumlogsumexp(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """The logarithm of the sum of exponentials of all elements up to each."""
    return _running(lax.cumlogsumexp, x, over, reverse)


def _running(fn: Callable[..., Any], x: Any, over: DimsLike, reverse: bool) -> Tensor:
    x = named_operand(x)
    return computed(fn(x.array, axis=axis(x, over), reverse=reverse), x.dims)


# ---- Contract --------------------------------------------------------------------------------------------------------
# ``dot``: the product of tensors, summed over the dims that are named.
#
#     md.dot(x, w, over="embed")                    x[batch seq embed] w[embed hidden] -> [batch seq hidden]
#     md.dot(q, k, over="head")                     q[batch query heads head] k[batch key heads head]
#                                                       -> [batch heads query key]
#
# Dims that several operands share and that are not summed are multiplied along. Of two operands
# it is one ``lax.dot_general``, and the result has the order in which that leaves it, so nothing is
# transposed: shared dims first, then those of the first operand, then those of the second.


def dot(*operands: Any, over: DimsLike, precision: Any = None, dtype: Any = None) -> Tensor:
    """The product of the operands, summed over dims.

    Args:
      operands: two or more named tensors.
      over: the dims to sum over, each in at least two operands; ``""`` for an outer product.
      precision: as in ``jax.numpy.einsum``.
      dtype: in which sums are made and returned, as ``preferred_element_type``.

    Raises DimError for a dim that fewer than two operands have, or that has two sizes.
    """
    read_in = [named_operand(x) for x in operands]
    summed = read_names(over)
    _check(read_in, summed)
    if len(read_in) == 2:
        return _two(read_in[0], read_in[1], summed, precision, dtype)
    return _several(read_in, summed, precision, dtype)


def _two(x: NamedArray, y: NamedArray, summed: Names, precision: Any, dtype: Any) -> Tensor:
    shared = tuple(name for name in x.dims if name in y.dims and name not in summed)
    contracted = [tuple(z.dims.index(name) for name in summed) for z in (x, y)]
    batch = [tuple(z.dims.index(name) for name in shared) for z in (x, y)]
    left, right = promoted(x.array, y.array)
    numbers = ((contracted[0], contracted[1]), (batch[0], batch[1]))
    made = lax.dot_general(left, right, numbers, precision=precision, preferred_element_type=dtype or left.dtype)
    free = (name for z in (x, y) for name in z.dims if name not in summed and name not in shared)
    return computed(made, (*shared, *free))


def _several(operands: Sequence[NamedArray], summed: Names, precision: Any, dtype: Any) -> Tensor:
    """An einsum in the cheapest order of pairs; the result has the merged order of its operands."""
    number = {name: i for i, name in enumerate(common_order(x.dims for x in operands))}
    kept = tuple(name for name in number if name not in summed)
    spelled = [part for x in operands for part in (x.array, [number[name] for name in x.dims])]
    out = [number[name] for name in kept]
    made = jnp.einsum(*spelled, out, precision=precision, preferred_element_type=dtype)
    return computed(made, kept)


def _check(operands: Sequence[NamedArray], summed: Names) -> None:
    if len(operands) < 2:
        raise fail("dot takes two operands or more; md.sum(x, over=...) sums one")
    sizes_of(operands)
    rows = [row for name in summed for row in _faults(name, operands)]
    if rows:
        raise fail(rows)


def _faults(name: str, operands: Sequence[NamedArray]) -> list[str]:
    having = [i for i, x in enumerate(operands) if name in x.dims]
    called = labels(len(operands))
    if not having or len(operands) == 2:
        return [absent(name, called[i], x) for i, x in enumerate(operands) if i not in having]
    if len(having) == 1:
        (i,) = having
        return [f"dim {name!r} is only in {called[i]}{described(operands[i])}; md.sum sums one operand"]
    return []


# ---- Loss ------------------------------------------------------------------------------------------------------------
# Losses over named dims.


def cross_entropy(logits: Any, labels: Any, over: DimsLike) -> Tensor:
    """The negative log-likelihood of each label.

    Args:
      logits: with the dim of classes, ``[batch seq vocab]``.
      labels: integers, without that dim, ``[batch seq]``.
      over: the dim of classes.

    Returns one value per label, in the dims that are left of the logits.
    """
    return logsumexp(logits, over) - take(logits, labels, over)
