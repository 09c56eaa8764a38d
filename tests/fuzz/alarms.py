"""A program that is called wrong, on the devices at hand: is it?"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

TRIES = 12  # random arguments of a program that is called wrong
_SCALES = (1.0, 3.0, 10.0)  # of these: a gradient grows faster than the weight that it is subtracted from
_LARGE = 25  # bound of random integers, the longest dim of most cases


def is_wrong(
    program: Callable[..., Any],
    step: Callable[..., Any],
    args: Sequence[Any],
    shardings: Sequence[Any],
    rng: np.random.Generator,
    tolerance: float,
) -> bool:
    """Returns whether a program over devices computes something else than the step on one.

    Args:
      program: takes arguments that are placed by ``shardings``, as the step takes them, flat.
      args: are tried first, and then random ones of their shapes and dtypes.
      tolerance: relative to the largest number of a result.
    """
    given = list(args)
    for i in range(TRIES + 1):
        placed = [jax.device_put(x, at) for x, at in zip(given, shardings, strict=True)]
        if differs(program(*placed), step(*given), tolerance):
            return True
        given = [random_like(x, _SCALES[i % len(_SCALES)], rng) for x in args]
    return False


def random_like(x: Any, scale: float, rng: np.random.Generator) -> Any:
    """Returns floats in place of floats, integers that may be indices in place of integers; keys are left alone."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    like = np.asarray(x)
    if like.dtype.kind in "iub":
        return rng.integers(0, 2 if like.dtype.kind == "b" else _LARGE, like.shape).astype(like.dtype)
    return np.asarray(scale * rng.standard_normal(like.shape)).astype(like.dtype)


def differs(found: Any, expected: Any, tolerance: float) -> bool:
    """Returns whether numbers differ by more than rounding does."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = (
            np.asarray(jax.random.key_data(z) if jax.dtypes.issubdtype(z.dtype, jax.dtypes.prng_key) else z)
            for z in (a, b)
        )
        x, y = x.astype(np.complex128), y.astype(np.complex128)
        finite = np.isfinite(y)
        largest = np.abs(y[finite]).max(initial=0.0)
        if (np.abs(x - y)[finite] > tolerance * max(largest, 1e-6)).any():
            return True
    return False
