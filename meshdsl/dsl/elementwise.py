"""Elementwise functions: operands meet by name, as in arithmetic.

``apply`` runs any function that keeps the shape of what it gets; the others are those that models need most.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshdsl.dsl.array import Tensor, lift


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
