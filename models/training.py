"""What models share: the step that trains them, rules for their usual strategies, batches by shapes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from meshdsl.dsl.array import Tensor
from meshdsl.dsl.operands import named
from meshdsl.layouts.rules import Rules

Strategies: TypeAlias = dict[str, str | Rules]


def train_step(loss: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """``step(params, opt_state, batch) -> params, opt_state, loss``."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def image_batch(batch: int, side: int, channels: int) -> dict[str, Tensor]:
    """The shapes of square images, ``[batch height width channels]``, and of their labels, ``[batch]``."""
    images = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
    return {
        "images": named(images, "batch height width channels"),
        "labels": named(jax.ShapeDtypeStruct((batch,), jnp.int32), "batch"),
    }
