"""Arithmetic on tensors with named dims: reductions, normalisation, elementwise functions, contraction, losses.

Every function takes named tensors (``NamedArray``) of any shape and dtype that the function of the same name in
``jax.numpy`` or ``jax.nn`` takes, and returns a named tensor, or an ordinary scalar array where no dims are left.
``over`` names the dims to work on, as text ``"batch seq"`` or names; ``over=None`` means all of them.

    p = md.softmax(scores, over="key")                  # [batch heads query key], same dims
    loss = md.mean(md.cross_entropy(logits, labels, over="vocab"))       # a scalar

All raise DimError, with the nearest name and the tensor as it is called at the user's line, for a dim that a tensor
lacks or that two operands have in two sizes.
"""

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

# ---- Reductions ------------------------------------------------------------------------------------------------------


def sum(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the sum over these dims: ``md.sum(x, over="batch seq")``.

    Example:
      >>> md.sum(md.ones("row=2 col=3"), over="col")
      NamedArray([row=2], Array([3., 3.], dtype=float32))
    """
    return _reduced(jnp.sum, x, over)


def mean(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the mean over these dims.

    Example:
      >>> md.mean(md.arange("col=4"))
      Array(1.5, dtype=float32)
    """
    return _reduced(jnp.mean, x, over)


def prod(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the product over these dims.

    Example:
      >>> md.prod(md.full("row=2 col=3", 2), over="col")
      NamedArray([row=2], Array([8, 8], dtype=int32))
    """
    return _reduced(jnp.prod, x, over)


def max(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the largest element over these dims.

    Example:
      >>> md.max(md.arange("col=4"))
      Array(3, dtype=int32)
    """
    return _reduced(jnp.max, x, over)


def min(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the smallest element over these dims.

    Example:
      >>> md.min(md.arange("col=4"))
      Array(0, dtype=int32)
    """
    return _reduced(jnp.min, x, over)


def any(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return whether any element over these dims is true, as bool.

    Example:
      >>> md.any(md.arange("col=4") > 2)
      Array(True, dtype=bool)
    """
    return _reduced(jnp.any, x, over)


def all(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return whether all elements over these dims are true, as bool.

    Example:
      >>> md.all(md.arange("col=4") > 2)
      Array(False, dtype=bool)
    """
    return _reduced(jnp.all, x, over)


def var(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the population variance over these dims (``ddof=0``).

    Example:
      >>> md.var(md.arange("col=4"))
      Array(1.25, dtype=float32)
    """
    return _reduced(jnp.var, x, over)


def std(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the population standard deviation over these dims (``ddof=0``).

    Example:
      >>> md.std(md.full("row=2 col=4", 3.0), over="col")
      NamedArray([row=2], Array([0., 0.], dtype=float32))
    """
    return _reduced(jnp.std, x, over)


def logsumexp(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the logarithm of the sum of exponentials over these dims, without overflow.

    Example:
      >>> md.logsumexp(md.zeros("row=2 col=4"), over="col").shape
      dims('row=2')
    """
    return _reduced(jax.nn.logsumexp, x, over)


def norm(x: Any, over: DimsLike | None = None) -> Tensor:
    """Return the Euclidean norm over these dims.

    Example:
      >>> md.norm(md.ones("row=2 col=4"), over="col")
      NamedArray([row=2], Array([2., 2.], dtype=float32))
    """
    return lift(jnp.sqrt, sum(lift(jnp.square, x), over))


def argmax(x: Any, over: DimsLike) -> Tensor:
    """Return the position of the largest element along one dim, as int32.

    Example:
      >>> md.argmax(md.arange("row=4"), over="row")
      Array(3, dtype=int32)
    """
    return _argument(jnp.argmax, x, over)


def argmin(x: Any, over: DimsLike) -> Tensor:
    """Return the position of the smallest element along one dim, as int32.

    Example:
      >>> md.argmin(md.arange("row=4"), over="row")
      Array(0, dtype=int32)
    """
    return _argument(jnp.argmin, x, over)


def softmax(x: Any, over: DimsLike) -> Tensor:
    """Return exponentials normalised to sum 1 over these dims, with the dims of ``x``.

    Example:
      >>> weights = md.softmax(scores, over="key")
    """
    x = named_operand(x)
    return computed(jax.nn.softmax(x.array, axis=_one_or_more(axes(x, over))), x.dims)


def log_softmax(x: Any, over: DimsLike) -> Tensor:
    """Return the logarithm of the softmax over these dims.

    Example:
      >>> md.log_softmax(md.zeros("row=2 col=4"), over="col").shape
      dims('row=2 col=4')
    """
    x = named_operand(x)
    return computed(jax.nn.log_softmax(x.array, axis=_one_or_more(axes(x, over))), x.dims)


def rms_norm(x: Any, over: DimsLike, eps: float = 1e-6) -> Tensor:
    """Return ``x`` divided by its root mean square over these dims, without a scale (Zhang and Sennrich 2019).

    Args:
      x: a named tensor; the computation is in float32 or wider.
      over: the dims of one mean, ``"embed"``.
      eps: added to the mean square.

    Returns:
      A tensor with the dims and the dtype of ``x``.

    Example:
      >>> y = md.rms_norm(x, over="embed") * scale
    """
    x32 = _at_least_float32(named_operand(x))
    scaled = x32 * lift(jax.lax.rsqrt, mean(lift(jnp.square, x32), over) + eps)
    return _cast(jnp.result_type(x.dtype, float), scaled)


def layer_norm(x: Any, over: DimsLike, eps: float = 1e-6) -> Tensor:
    """Return ``x`` with mean 0 and variance 1 over these dims, without scale and bias (Ba, Kiros and Hinton 2016).

    Args:
      x: a named tensor; the computation is in float32 or wider.
      over: the dims of one mean, ``"embed"``.
      eps: added to the variance.

    Returns:
      A tensor with the dims and the dtype of ``x``.

    Example:
      >>> y = md.layer_norm(x, over="embed") * scale + bias
    """
    x32 = _at_least_float32(named_operand(x))
    centred = x32 - mean(x32, over)
    scaled = centred * lift(jax.lax.rsqrt, mean(lift(jnp.square, centred), over) + eps)
    return _cast(jnp.result_type(x.dtype, float), scaled)


def _at_least_float32(x: NamedArray) -> NamedArray:
    return _cast(jnp.promote_types(x.dtype, jnp.float32), x)


def _cast(dtype: Any, x: NamedArray) -> NamedArray:
    return x if x.dtype == dtype else x.astype(dtype)


def _one_or_more(found: tuple[int, ...]) -> int | tuple[int, ...]:
    return found[0] if len(found) == 1 else found


def _reduced(fn: Callable[..., Any], x: Any, over: DimsLike | None) -> Tensor:
    x = named_operand(x)
    reduced = axes(x, over)
    result = fn(x.array, axis=reduced)
    return computed(result, tuple(name for i, name in enumerate(x.dims) if i not in reduced))


def _argument(fn: Callable[..., Any], x: Any, over: DimsLike) -> Tensor:
    x = named_operand(x)
    reduced = axis(x, over)
    return computed(fn(x.array, axis=reduced), x.dims[:reduced] + x.dims[reduced + 1 :])


# ---- Elementwise functions -------------------------------------------------------------------------------------------
# Operands meet by name, as in arithmetic. ``apply`` runs any elementwise function; the others are those that models use
# most.


def apply(fn: Callable[..., Any], *operands: Any) -> Tensor:
    """Return ``fn`` of tensors that meet by name.

    Args:
      fn: an elementwise function of arrays that broadcast against each other.
      *operands: named tensors and scalars.

    Raises:
      DimError: two operands have one dim in two sizes, or the result has another shape than the broadcast operands.

    Example:
      >>> angle = md.apply(jnp.arctan2, y, x)
    """
    return lift(fn, *operands, first=1)


def where(condition: Any, x: Any, y: Any) -> Tensor:
    """Return ``x`` where ``condition`` is true, else ``y``; the three broadcast against each other by name.

    Args:
      condition: bools, with any dims.
      x: a named tensor or a scalar.
      y: a named tensor or a scalar.

    Raises:
      DimError: a dim has two sizes.

    Example:
      >>> scores = md.where(md.causal("query=128 key=128"), scores, -jnp.inf)
    """
    return lift(jnp.where, condition, x, y)


_ELEMENTWISE = """Return jax's elementwise ``{name}`` of named tensors and scalars, which meet by name.

Example:
  >>> y = md.{name}({operands})
"""


def _elementwise(fn: Callable[..., Any], operands: str = "x") -> Callable[..., Tensor]:
    """Return an elementwise function of jax as one of named tensors; ``operands`` are those of its example."""

    def run(*operands: Any) -> Tensor:
        return lift(fn, *operands)

    run.__name__ = run.__qualname__ = fn.__name__
    run.__doc__ = _ELEMENTWISE.format(name=fn.__name__, operands=operands)
    return run


exp, log, log1p, expm1 = (_elementwise(fn) for fn in (jnp.exp, jnp.log, jnp.log1p, jnp.expm1))
sqrt, rsqrt, square, sign = (_elementwise(fn) for fn in (jnp.sqrt, jax.lax.rsqrt, jnp.square, jnp.sign))
sin, cos, tanh, sigmoid = (_elementwise(fn) for fn in (jnp.sin, jnp.cos, jnp.tanh, jax.nn.sigmoid))
relu, gelu, silu, softplus = (_elementwise(fn) for fn in (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.softplus))
maximum, minimum = (_elementwise(fn, "x, y") for fn in (jnp.maximum, jnp.minimum))
clip = _elementwise(jnp.clip, "x, -1.0, 1.0")
isfinite, logical_not, floor, round = (_elementwise(fn) for fn in (jnp.isfinite, jnp.logical_not, jnp.floor, jnp.round))
stop_gradient = _elementwise(jax.lax.stop_gradient)


# ---- Cumulative reductions -------------------------------------------------------------------------------------------
# Along one dim, from the first element to the last or, with ``reverse``, from the last to the first.


def cumsum(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """Return the cumulative sum along one dim.

    Example:
      >>> md.cumsum(md.arange("seq=4"), over="seq")
      NamedArray([seq=4], Array([0, 1, 3, 6], dtype=int32))
    """
    return _running(lax.cumsum, x, over, reverse)


def cumprod(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """Return the cumulative product along one dim.

    Example:
      >>> md.cumprod(md.arange("seq=3") + 1, over="seq")
      NamedArray([seq=3], Array([1, 2, 6], dtype=int32))
    """
    return _running(lax.cumprod, x, over, reverse)


def cummax(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """Return the cumulative maximum along one dim.

    Example:
      >>> md.cummax(md.flip(md.arange("seq=3"), over="seq"), over="seq")
      NamedArray([seq=3], Array([2, 2, 2], dtype=int32))
    """
    return _running(lax.cummax, x, over, reverse)


def cummin(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """Return the cumulative minimum along one dim.

    Example:
      >>> md.cummin(md.arange("seq=3"), over="seq", reverse=True)
      NamedArray([seq=3], Array([0, 1, 2], dtype=int32))
    """
    return _running(lax.cummin, x, over, reverse)


def cumlogsumexp(x: Any, over: DimsLike, reverse: bool = False) -> Tensor:
    """Return the cumulative logarithm of the sum of exponentials along one dim.

    Example:
      >>> md.cumlogsumexp(md.zeros("batch=2 seq=3"), over="seq").shape
      dims('batch=2 seq=3')
    """
    return _running(lax.cumlogsumexp, x, over, reverse)


def _running(fn: Callable[..., Any], x: Any, over: DimsLike, reverse: bool) -> Tensor:
    x = named_operand(x)
    return computed(fn(x.array, axis=axis(x, over), reverse=reverse), x.dims)


# ---- Contraction -----------------------------------------------------------------------------------------------------
# ``dot``: the product of tensors, summed over named dims.
#
#     md.dot(x, w, over="embed")                    x[batch seq embed] w[embed hidden] -> [batch seq hidden]
#     md.dot(q, k, over="head")                     q[batch query heads head] k[batch key heads head]
#                                                       -> [batch heads query key]
#
# Dims that several operands share and that are not summed are batch dims. Two operands are one ``lax.dot_general``, and
# the result keeps its order of dims, so nothing is transposed: batch dims first, then those of the first operand, then
# those of the second.


def dot(
    *operands: Any,
    over: DimsLike,
    precision: Any = None,
    dtype: Any = None,
    dot_general: Callable[..., Any] = lax.dot_general,
) -> Tensor:
    """Return the product of the operands, summed over dims; an einsum with names for letters.

    Args:
      *operands: two or more named tensors.
      over: the dims to sum over, each in at least two operands; ``""`` for an outer product.
      precision: as in ``jax.numpy.einsum``.
      dtype: dtype of the sums and of the result, as ``preferred_element_type``.
      dot_general: multiplies two operands in place of ``jax.lax.dot_general``, with its arguments.

    Returns:
      A tensor with all other dims: those that both operands share, then those of the first operand, then the rest.

    Raises:
      DimError: fewer than two operands have a summed dim, or a dim has two sizes.

    Example:
      >>> hidden = md.dot(x, w, over="embed")     # x[batch seq embed] w[embed hidden] -> [batch seq hidden]
    """
    tensors = [named_operand(x) for x in operands]
    summed = read_names(over)
    _check(tensors, summed)
    if len(tensors) == 2:
        return _dot_general(tensors[0], tensors[1], summed, precision, dtype, dot_general)
    return _einsum(tensors, summed, precision, dtype)


def _dot_general(
    x: NamedArray, y: NamedArray, summed: Names, precision: Any, dtype: Any, multiply: Callable[..., Any]
) -> Tensor:
    shared = tuple(name for name in x.dims if name in y.dims and name not in summed)
    contracted = [tuple(z.dims.index(name) for name in summed) for z in (x, y)]
    batch = [tuple(z.dims.index(name) for name in shared) for z in (x, y)]
    left, right = promoted(x.array, y.array)
    numbers = ((contracted[0], contracted[1]), (batch[0], batch[1]))
    made = multiply(left, right, numbers, precision=precision, preferred_element_type=dtype or left.dtype)
    free = (name for z in (x, y) for name in z.dims if name not in summed and name not in shared)
    return computed(made, (*shared, *free))


def _einsum(operands: Sequence[NamedArray], summed: Names, precision: Any, dtype: Any) -> Tensor:
    """Return an einsum in the cheapest order of pairs; the result has the merged order of the operands' dims."""
    number = {name: i for i, name in enumerate(common_order(x.dims for x in operands))}
    kept = tuple(name for name in number if name not in summed)
    spelled = [part for x in operands for part in (x.array, [number[name] for name in x.dims])]
    out = [number[name] for name in kept]
    made = jnp.einsum(*spelled, out, precision=precision, preferred_element_type=dtype)
    return computed(made, kept)


def _check(operands: Sequence[NamedArray], summed: Names) -> None:
    if len(operands) < 2:
        raise fail("dot takes at least two operands; to sum one, use md.sum(x, over=...)")
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
        return [
            f"dim {name!r} is only in {called[i]}{described(operands[i])}; dot sums over dims of at least two operands"
        ]
    return []


# ---- Losses ----------------------------------------------------------------------------------------------------------


def cross_entropy(logits: Any, labels: Any, over: DimsLike) -> Tensor:
    """Return the negative log-likelihood of each label.

    Args:
      logits: with the dim of classes, ``[batch seq vocab]``.
      labels: integers without that dim, ``[batch seq]``.
      over: the dim of classes.

    Returns:
      One value per label, with the other dims of the logits and their dtype.

    Raises:
      DimError: the logits lack the dim, the labels have it or are not integers, or a shared dim has two sizes.

    Example:
      >>> loss = md.mean(md.cross_entropy(logits, tokens, over="vocab"))
    """
    return logsumexp(logits, over) - take(logits, labels, over)
