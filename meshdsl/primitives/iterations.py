"""``md.expect_iterations``: how often a loop runs whose iterations depend on data.

    rounds = md.expect_iterations(jnp.max(counts) // slots, 0)      # normally none
    total = lax.while_loop(lambda carry: carry[0] < rounds, ...)

The primitive behind it is the identity.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from meshdsl.errors import ArgumentError, is_a

expect_iterations_p = Primitive("expect_iterations")


def expect_iterations(x: Any, about: int) -> jax.Array:
    """Return ``x``; a ``while`` whose condition reads it is planned as if it ran ``about`` times.

    Without this, the planner takes a loop to run 10 times, unless its bounds are literals. The data alone decides what
    runs. In the plan, such iterations are marked as an estimate. A loop that is expected not to run weighs 1/1024 of
    one run in predicted seconds, so that it is still laid out well; its collectives are listed with ``~0`` trips.

    Args:
      x: a scalar integer that the loop takes as it is, in the same function, such as a bound of ``jax.lax.fori_loop``.
        What is computed from the result, or in the condition of the loop, says nothing about it; a warning tells.
      about: expected iterations per run of the loop, not negative.

    Returns:
      ``x``, unchanged.

    Raises:
      ArgumentError: ``x`` is no scalar integer, or ``about`` is no integer or negative.

    Example:
      >>> jax.lax.fori_loop(0, md.expect_iterations(jnp.max(x), 3), lambda i, total: total + i, 0)
    """
    if not isinstance(about, int) or isinstance(about, bool) or about < 0:
        raise ArgumentError(
            f"expect_iterations: about={about!r} is not a number of iterations; give an integer from 0 on"
        )
    if jnp.ndim(x) or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise ArgumentError(f"expect_iterations: {is_a(x)}, not a scalar integer; give x.astype(int), of one element")
    made: jax.Array = expect_iterations_p.bind(jnp.asarray(x), about=about)
    return made


expect_iterations_p.def_impl(lambda x, about: x)
expect_iterations_p.def_abstract_eval(lambda x, about: x)
mlir.register_lowering(expect_iterations_p, lambda context, x, about: [x])
batching.primitive_batchers[expect_iterations_p] = lambda args, dims, about: (
    expect_iterations_p.bind(*args, about=about),
    dims[0],
)
