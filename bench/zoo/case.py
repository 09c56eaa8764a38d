"""A case of the zoo: loss, parameters and batch, from which a training step is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshdsl.api import Program

ADAMW = optax.adamw(1e-3)


@dataclass(frozen=True)
class Case:
    """A loss with its parameters and batch.

    Args:
      loss: ``(params, batch) -> scalar``.
      params: initial parameters.
      batch: a pytree of arrays.
      dim: the batch dim of every array of ``batch``.
      optimizer: an optax optimizer.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    dim: int = 0
    optimizer: optax.GradientTransformation = ADAMW

    def program(self) -> Program:
        """Returns ``step(params, state, batch) -> (params, state, (loss, gradients))``."""

        def step(params, state, batch):
            loss, gradients = jax.value_and_grad(self.loss)(params, batch)
            updates, state = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, (loss, gradients)

        state = self.optimizer.init(self.params)
        return Program(step, (self.params, state, self.batch), {"batch/**": f"data=S({self.dim})"})


def floats(seed: int, *shape: int) -> jax.Array:
    """Returns standard normal float32 numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def ids(seed: int, below: int, *shape: int) -> jax.Array:
    """Returns uniform int32 numbers in ``[0, below)``."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
