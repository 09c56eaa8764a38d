"""New tensors from dims with sizes, ``"query=128 key=128"``: constants, positions, random numbers, dropout.

    mask = md.causal("query=128 key=128")
    w = md.fan_in(key, "embed=512 hidden=2048", over="embed")

Random keys are those of ``jax.random``. All raise NotationError for text that is not dims, and DimError for a dim whose
size is not given.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.nd.diagnostics import fail
from meshdsl.nd.named_array import NamedArray, Tensor, axes, axis, given, named_operand, number, positions_of, wrap
from meshdsl.nd.named_dims import DimsLike, read_dims

# ---- Random numbers --------------------------------------------------------------------------------------------------


def normal(key: Any, dims: DimsLike, std: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Return normally distributed values with mean 0: ``md.normal(key, "vocab=50257 embed=768", std=0.02)``.

    Example:
      >>> md.normal(jax.random.key(0), "vocab=50257 embed=768", std=0.02).shape
      dims('vocab=50257 embed=768')
    """
    made = read_dims(dims)
    return wrap(_scaled(jax.random.normal(_key(key), made.sizes, dtype), std), made.names)


def truncated_normal(key: Any, dims: DimsLike, std: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Return values of a normal distribution truncated at two standard deviations, then scaled by ``std``.

    Example:
      >>> md.max(md.truncated_normal(jax.random.key(0), "embed=512", std=0.1)) < 0.21
      Array(True, dtype=bool)
    """
    made = read_dims(dims)
    return wrap(_scaled(jax.random.truncated_normal(_key(key), -2.0, 2.0, made.sizes, dtype), std), made.names)


def uniform(key: Any, dims: DimsLike, low: float = 0.0, high: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Return values uniformly distributed in [``low``, ``high``).

    Example:
      >>> md.uniform(jax.random.key(0), "batch=32 embed=512", -1.0, 1.0).shape
      dims('batch=32 embed=512')
    """
    made = read_dims(dims)
    return wrap(jax.random.uniform(_key(key), made.sizes, dtype, number(low, "low"), number(high, "high")), made.names)


def fan_in(key: Any, dims: DimsLike, over: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Return normally distributed values with variance 1/n, n the elements of the dims ``over`` (LeCun et al. 1998).

    Args:
      key: a random key.
      dims: dims with sizes, ``"embed=512 hidden=2048"``.
      over: the dims that :func:`dot` will sum over, ``"embed"``.
      dtype: of the result.

    Example:
      >>> w = md.fan_in(key, "embed=512 hidden=2048", over="embed")
    """
    made = read_dims(dims)
    return normal(key, made, prod(made(over).sizes) ** -0.5, dtype)


def bernoulli(key: Any, probability: float, dims: DimsLike) -> Tensor:
    """Return bools that are true with this probability.

    Example:
      >>> md.bernoulli(jax.random.key(0), 0.9, "batch=32 seq=128").dtype
      dtype('bool')
    """
    made = read_dims(dims)
    return wrap(jax.random.bernoulli(_key(key), number(probability, "probability"), made.sizes), made.names)


def categorical(key: Any, logits: Any, over: DimsLike) -> Tensor:
    """Return positions along one dim, sampled with the probabilities of the softmax over it.

    Args:
      key: a random key.
      logits: unnormalised log-probabilities, with the dim.
      over: the dim of categories.

    Returns:
      One int32 position per element of the other dims.

    Example:
      >>> token = md.categorical(key, logits, over="vocab")     # [batch vocab] -> [batch]
    """
    x = named_operand(logits)
    at = axis(x, over, first=1)
    return wrap(jax.random.categorical(_key(key), x.array, axis=at), x.dims[:at] + x.dims[at + 1 :])


def dropout(key: Any, x: Any, rate: float, over: DimsLike | None = None) -> Tensor:
    """Return ``x`` with random elements set to zero and the others divided by ``1 - rate`` (Srivastava et al. 2014).

    Args:
      key: a random key.
      x: a named tensor.
      rate: the probability of zero, in [0, 1).
      over: the dims along which elements are sampled independently, all by default; along others they are zeroed
        together.

    Raises:
      DimError: ``rate`` is not in [0, 1), or ``x`` lacks a dim of ``over``.

    Example:
      >>> y = md.dropout(key, x, 0.1)
    """
    x = named_operand(x)
    if not 0 <= number(rate, "rate") < 1:
        raise fail(f"dropout rate={rate} is out of range; expected 0 <= rate < 1")
    if rate == 0:
        return x
    independent = axes(x, over, first=1)
    shape = [size if i in independent else 1 for i, size in enumerate(x.array.shape)]
    survives = jax.random.bernoulli(_key(key), 1 - rate, shape)
    return wrap(jnp.where(survives, x.array / (1 - rate), jnp.zeros((), x.dtype)), x.dims)


def _key(key: Any) -> Any:
    if isinstance(key, NamedArray) or not hasattr(key, "dtype"):
        raise fail(f"{given(key)}, not a random key; make one with jax.random.key(0), or rngs.params() of nnx.Rngs")
    return key


def _scaled(array: Any, std: float) -> Any:
    std = number(std, "std")
    return array if std == 1.0 else array * jnp.asarray(std, array.dtype)


# ---- Constants and positions -----------------------------------------------------------------------------------------


def zeros(dims: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Return zeros: ``md.zeros("heads=8 head=64")``.

    Example:
      >>> md.zeros("heads=8 head=64").shape
      dims('heads=8 head=64')
    """
    return full(dims, 0, dtype)


def ones(dims: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Return ones.

    Example:
      >>> md.ones("row=2")
      NamedArray([row=2], Array([1., 1.], dtype=float32))
    """
    return full(dims, 1, dtype)


def full(dims: DimsLike, value: Any, dtype: Any = None) -> Tensor:
    """Return a tensor of one value; without ``dtype``, of the value's dtype.

    Example:
      >>> md.full("row=2", 7, jnp.int32)
      NamedArray([row=2], Array([7, 7], dtype=int32))
    """
    made = read_dims(dims)
    return wrap(jnp.full(made.sizes, number(value, "value"), dtype), made.names)


def arange(dim: DimsLike, dtype: Any = jnp.int32) -> Tensor:
    """Return 0, 1, 2, ... along one dim: ``md.arange("seq=128")``.

    Example:
      >>> md.arange("seq=4")
      NamedArray([seq=4], Array([0, 1, 2, 3], dtype=int32))
    """
    made = read_dims(dim)
    if len(made) != 1:
        raise fail(f"arange takes one dim, not {len(made)}: [{made}]")
    return wrap(jnp.arange(made.size, dtype=dtype), made.names)


def one_hot(positions: Any, dim: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Return 1 at each position, 0 elsewhere, along a new last dim.

    Args:
      positions: integers, with or without dims.
      dim: the new dim with its size.
      dtype: of the result.

    Raises:
      DimError: positions are not integers or have the dim, or it has no size.

    Example:
      >>> md.one_hot(tokens, "vocab=50257")        # [batch seq] -> [batch seq vocab]
    """
    read_in, new = positions_of(positions), read_dims(dim)
    if len(new) != 1:
        raise fail(f"one_hot adds one dim, not {len(new)}: [{new}]")
    array, dims = (read_in.array, read_in.shape) if isinstance(read_in, NamedArray) else (read_in, read_dims(""))
    return wrap(jax.nn.one_hot(array, new.size, dtype=dtype), (dims + new).names)


def causal(dims: DimsLike) -> Tensor:
    """Return the causal mask: true where a query may attend to a key, that is, up to its own position.

    Args:
      dims: the dims of queries and keys with sizes, ``"query=128 key=128"``. With more keys than queries, the queries
        are the last ones, as with a cache.

    Example:
      >>> scores = md.where(md.causal("query=128 key=128"), scores, -jnp.inf)
    """
    made = read_dims(dims)
    if len(made) != 2:
        raise fail(f"causal takes two dims, queries and keys, not {len(made)}: [{made}]")
    queries, keys = made.sizes
    rows, columns = (lax.broadcasted_iota(jnp.int32, made.sizes, i) for i in (0, 1))
    return wrap((rows if keys == queries else rows + (keys - queries)) >= columns, made.names)
