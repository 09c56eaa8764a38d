"""Text from a trained model, one token at a time."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tokenizers import Tokenizer

# ---- Sample ----------------------------------------------------------------------------------------------------------


Logits = Callable[[Any, Any], Any]


def sample_text(
    logits: Logits,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    window: int,
    tokens: int = 150,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """``prompt`` and ``tokens`` tokens that the model continues it with.

    Args:
      logits: ``(params, tokens [1, window]) -> [1, window, vocabulary]``, causal.
    """
    rng = np.random.default_rng(seed)
    ids = list(tokenizer.encode(prompt).ids)
    run = jax.jit(logits)
    for _ in range(tokens):
        ids.append(_next(run, params, ids[-window:], window, temperature, rng))
    return str(tokenizer.decode(ids))


def _next(
    logits: Logits, params: Any, recent: list[int], window: int, temperature: float, rng: np.random.Generator
) -> int:
    """Draw the token after ``recent``; zeros fill the window, which a causal model does not see."""
    padded = np.zeros((1, window), np.int32)
    padded[0, : len(recent)] = recent
    scores = np.asarray(logits(params, padded))[0, len(recent) - 1] / temperature
    odds = np.exp(scores - scores.max(), dtype=np.float64)
    return int(rng.choice(len(odds), p=odds / odds.sum()))


# ---- Measure ---------------------------------------------------------------------------------------------------------
# What evaluation needs of trained arrays that lie split over devices.


def gathered(tree: Any) -> Any:
    """Every array whole, on one device of this process: what is measured is computed once, not once per device."""
    return jax.tree.map(_whole, tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return x
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec())).addressable_data(0)
