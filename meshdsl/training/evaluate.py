"""What evaluation needs of a trained state: whole arrays on one device, and sampled text."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tokenizers import Tokenizer

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
    """``prompt`` and its continuation by the model, sampled one token at a time.

    Args:
      logits: causal model, ``(params, tokens [1, window]) -> [1, window, vocabulary]``.
      params: its parameters.
      tokenizer: of the model.
      prompt: beginning of the text.
      window: tokens that the model sees.
      tokens: tokens to sample.
      temperature: divisor of the logits.
      seed: of the sampling.
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
    """Samples the token after ``recent``; the zeros that fill the window are invisible to a causal model."""
    padded = np.zeros((1, window), np.int32)
    padded[0, : len(recent)] = recent
    scores = np.asarray(logits(params, padded))[0, len(recent) - 1] / temperature
    odds = np.exp(scores - scores.max(), dtype=np.float64)
    return int(rng.choice(len(odds), p=odds / odds.sum()))


def gather(tree: Any) -> Any:
    """Every array whole on one device of this process, so that a metric is computed once, not once per device."""
    return jax.tree.map(_whole, tree)


def _whole(x: Any) -> Any:
    if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
        return x
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec())).addressable_data(0)
