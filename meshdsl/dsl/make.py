"""Tensors made from dims with sizes, ``"query=128 key=128"``, and from positions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.dsl.array import NamedArray, Tensor, wrap
from meshdsl.dsl.blame import fail
from meshdsl.dsl.dims import DimsLike, read_dims
from meshdsl.dsl.operands import number, positions_of


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
