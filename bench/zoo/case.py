"""A case: a loss, its parameters and a batch, as a training step that can be planned."""

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
    """What a builder returns.

    Args:
      loss: a scalar function of parameters and batch.
      dim: the batch's dim in every array of the batch.
      optimizer: of optax.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any
    dim: int = 0
    optimizer: optax.GradientTransformation = ADAMW

    def program(self) -> Program:
        """One step: parameters and optimizer state are replaced; loss and gradients are returned as well."""

        def step(params, state, batch):
            loss, gradients = jax.value_and_grad(self.loss)(params, batch)
            updates, state = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, (loss, gradients)

        state = self.optimizer.init(self.params)
        return Program(step, (self.params, state, self.batch), {"batch/**": f"data=S({self.dim})"})


def floats(seed: int, *shape: int) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def ids(seed: int, below: int, *shape: int) -> jax.Array:
    """Whole numbers from 0 on."""
    return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean over all labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
