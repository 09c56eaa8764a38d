"""Shared by the models: training steps, rules of standard strategies, programs and batches as shapes."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshdsl as md

Strategies: TypeAlias = dict[str, str | md.Rules]


def standard_strategies(split: str) -> Strategies:
    """Returns layout rules by strategy for a model with a dim ``embed``: data, tensor, FSDP, ZeRO-1, FSDP with tensor.

    Args:
      split: layout rules of the dims that tensor parallelism splits.
    """
    return {
        "data": "batch:data",
        "tensor": f"batch:data {split}",
        "fsdp": md.Rules("batch:data", params="embed:data", optimizer="embed:data"),
        "zero": md.Rules("batch:data", optimizer="embed:data"),
        "fsdp+tensor": md.Rules(f"batch:data {split}", params="embed:data", optimizer="embed:data"),
    }


def train_step(loss: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
    """Returns ``step(params, opt_state, batch) -> (params, opt_state, loss)``."""

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def model_function(make: Callable[[nnx.Rngs], nnx.Module]) -> Callable[..., Any]:
    """Returns a function from parameters to the model that ``make`` builds, with those parameters."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return lambda *states: nnx.merge(graph, *states)


def flax_program(
    make: Callable[[nnx.Rngs], nnx.Module],
    loss: Callable[[Any, Any], Any],
    batch: Any,
    rules: md.Rules | str,
    optimizer: Any,
    dtype: str = "float32",
) -> md.Program:
    """Returns the training step of a flax model, as shapes: ``step(params, opt_state, batch)``.

    Args:
      make: builds the model from random streams.
      loss: ``(model, batch) -> scalar``.
      batch: the shapes of a batch.
      rules: layout rules.
      optimizer: an optax optimizer.
      dtype: compute dtype; parameters are float32 and cast once per step, and gradients are float32.
    """
    graph, params = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def init() -> Any:
        params = nnx.state(make(nnx.Rngs(0)))
        return params, optimizer.init(params)

    def loss_of(params: Any, batch: Any) -> Any:
        return loss(nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), params)), batch)

    step = train_step(loss_of, optimizer)
    return md.Program(step, (params, jax.eval_shape(optimizer.init, params), batch), rules=rules, init=init)


def adamw(rate: float) -> Any:
    """Returns AdamW with gradient clipping at a constant learning rate (Brown et al. 2020, appendix B)."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))


def image_batch(batch: int, side: int, channels: int) -> dict[str, md.Tensor]:
    """Returns the shapes of square images, ``[batch height width channels]``, and labels, ``[batch]``."""
    images = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.float32)
    return {
        "images": md.named(images, "batch height width channels"),
        "labels": md.named(jax.ShapeDtypeStruct((batch,), jnp.int32), "batch"),
    }


def token_batch(batch: int, seq: int) -> dict[str, md.Tensor]:
    """Returns the shapes of input and target tokens, ``[batch seq]``."""
    return dict.fromkeys(("inputs", "targets"), md.named(jax.ShapeDtypeStruct((batch, seq), jnp.int32), "batch seq"))


def next_token_loss(model: Any, batch: Any) -> Any:
    """Returns the mean cross-entropy of a language model's logits ``[batch seq vocab]``."""
    logits = model(batch["inputs"]).astype("float32")
    return md.mean(md.cross_entropy(logits, batch["targets"], over="vocab"))


def label_loss(model: Any, batch: Any) -> Any:
    """Returns the mean cross-entropy of an image classifier's logits ``[batch classes]``."""
    return md.mean(md.cross_entropy(model(batch["images"]), batch["labels"], over="classes"))
