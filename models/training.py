"""What all models share: the step that trains them, and rules for their usual strategies."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import optax

from meshdsl.layouts.rules import Rules

Strategies: TypeAlias = dict[str, str | Rules]


def train_step(loss: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """``step(params, opt_state, batch) -> params, opt_state, loss``."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step
