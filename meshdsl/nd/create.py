"""Random tensors by dims with sizes, and dropout; keys are those of ``jax.random``."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.nd.diagnostics import fail
from meshdsl.nd.named_array import NamedArray, Tensor, axes, axis, given, named_operand, number, positions_of, wrap
from meshdsl.nd.named_dims import DimsLike, read_dims

# ---- Random ----------------------------------------------------------------------------------------------------------


def normal(key: Any, dims: DimsLike, std: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Normal with mean 0: ``md.normal(key, "vocab=50257 embed=768", std=0.02)``."""
    made = read_dims(dims)
    return wrap(_scaled(jax.random.normal(_key(key), made.sizes, dtype), std), made.names)


def truncated_normal(key: Any, dims: DimsLike, std: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Normal, cut at two deviations on either side, before ``std`` is multiplied on."""
    made = read_dims(dims)
    return wrap(_scaled(jax.random.truncated_normal(_key(key), -2.0, 2.0, made.sizes, dtype), std), made.names)


def uniform(key: Any, dims: DimsLike, low: float = 0.0, high: float = 1.0, dtype: Any = jnp.float32) -> Tensor:
    """Uniform from ``low`` up to ``high``."""
    made = read_dims(dims)
    return wrap(jax.random.uniform(_key(key), made.sizes, dtype, number(low, "low"), number(high, "high")), made.names)


def fan_in(key: Any, dims: DimsLike, over: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Normal with variance 1/n, n the elements of the dims that :func:`dot` will sum over (LeCun's initialisation)."""
    made = read_dims(dims)
    return normal(key, made, prod(made(over).sizes) ** -0.5, dtype)


def bernoulli(key: Any, probability: float, dims: DimsLike) -> Tensor:
    """True with this probability, bool."""
    made = read_dims(dims)
    return wrap(jax.random.bernoulli(_key(key), number(probability, "probability"), made.sizes), made.names)


def categorical(key: Any, logits: Any, over: DimsLike) -> Tensor:
    """A position along one dim, drawn with the probabilities of the softmax over it; int32."""
    x = named_operand(logits)
    at = axis(x, over, first=1)
    return wrap(jax.random.categorical(_key(key), x.array, axis=at), x.dims[:at] + x.dims[at + 1 :])


def dropout(key: Any, x: Any, rate: float, over: DimsLike | None = None) -> Tensor:
    """``x`` with elements set to zero, the others divided by ``1 - rate``.

    Args:
      key: a random key.
      x: a named tensor.
      rate: the probability of zero, at least 0 and less than 1.
      over: the dims along which elements are drawn one by one; along the others they go together. Default: all.
    """
    x = named_operand(x)
    if not 0 <= number(rate, "rate") < 1:
        raise fail(f"rate={rate} of dropout is not at least 0 and less than 1")
    if rate == 0:
        return x
    alone = axes(x, over, first=1)
    shape = [size if i in alone else 1 for i, size in enumerate(x.array.shape)]
    kept = jax.random.bernoulli(_key(key), 1 - rate, shape)
    return wrap(jnp.where(kept, x.array / (1 - rate), jnp.zeros((), x.dtype)), x.dims)


def _key(key: Any) -> Any:
    if isinstance(key, NamedArray) or not hasattr(key, "dtype"):
        raise fail(f"{given(key)}, not a random key; jax.random.key(0) makes one, rngs.params() of nnx.Rngs too")
    return key


def _scaled(array: Any, std: float) -> Any:
    std = number(std, "std")
    return array if std == 1.0 else array * jnp.asarray(std, array.dtype)


# ---- Make ------------------------------------------------------------------------------------------------------------
# Tensors made from dims with sizes, ``"query=128 key=128"``, and from positions.


def zeros(dims: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Zeros: ``md.zeros("heads=8 head=64")``."""
    return full(dims, 0, dtype)


def ones(dims: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """Ones."""
    return full(dims, 1, dtype)


def full(dims: DimsLike, value: Any, dtype: Any = None) -> Tensor:
    """The same value everywhere; without ``dtype`` that of the value."""
    made = read_dims(dims)
    return wrap(jnp.full(made.sizes, number(value, "value"), dtype), made.names)


def arange(dim: DimsLike, dtype: Any = jnp.int32) -> Tensor:
    """0, 1, 2, ... along one dim: ``md.arange("seq=128")``."""
    made = read_dims(dim)
    if len(made) != 1:
        raise fail(f"arange makes one dim, not {len(made)}: [{made}]")
    return wrap(jnp.arange(made.size, dtype=dtype), made.names)


def one_hot(positions: Any, dim: DimsLike, dtype: Any = jnp.float32) -> Tensor:
    """1 at the position, 0 elsewhere, along a new last dim: ``md.one_hot(tokens, "vocab=50257")``."""
    read_in, new = positions_of(positions), read_dims(dim)
    if len(new) != 1:
        raise fail(f"one_hot makes one dim, not {len(new)}: [{new}]")
    array, dims = (read_in.array, read_in.shape) if isinstance(read_in, NamedArray) else (read_in, read_dims(""))
    return wrap(jax.nn.one_hot(array, new.size, dtype=dtype), (dims + new).names)


def causal(dims: DimsLike) -> Tensor:
    """Where a query may look: at keys up to its own position. ``md.causal("query=128 key=128")`` is bool.

    Where there are more keys than queries, the queries are the last ones, as with a cache.
    """
    made = read_dims(dims)
    if len(made) != 2:
        raise fail(f"causal takes the dims of queries and keys, not {len(made)}: [{made}]")
    queries, keys = made.sizes
    rows, columns = (lax.broadcasted_iota(jnp.int32, made.sizes, i) for i in (0, 1))
    return wrap((rows if keys == queries else rows + (keys - queries)) >= columns, made.names)
