"""Cumulative operations along one dim, from the first element to the last or, ``reverse``, back."""

from collections.abc import Callable
from typing import Any

from jax import lax

from meshdsl.dsl.array import Tensor, computed
from meshdsl.dsl.dims import DimsLike
from meshdsl.dsl.operands import axis, named_operand


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
