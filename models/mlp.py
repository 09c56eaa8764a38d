"""A multilayer perceptron, the smallest model on named dims.

inputs [batch features] -> relu(inputs up + bias), layer by layer, [batch hidden] -> logits [batch classes]
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import meshdsl as md
from meshdsl.models.training import Strategies, train_step

RULES: Strategies = {
    "data": "batch:data",
    "tensor": "batch:data hidden:model",
    "fsdp": md.Rules("batch:data", params="hidden:data", optimizer="hidden:data"),
    "zero": md.Rules("batch:data", optimizer="hidden:data"),
}


def init(key: jax.Array, sizes: md.Dims) -> dict[str, Any]:
    """Returns initial parameters.

    Args:
      key: a random key.
      sizes: sizes of ``features``, ``hidden``, ``classes`` and, for more than one hidden layer, ``layers``.
    """
    keys = jax.random.split(key, 3)
    more = (sizes.size_of("layers") or 1) - 1
    params = {"up": _linear(keys[0], sizes("features hidden"), "features")}
    if more:
        square = sizes("hidden") + f"out={sizes['hidden']}"
        params["more"] = md.vmap(lambda key: _linear(key, square, "hidden"), over="layers")(
            md.named(jax.random.split(keys[1], more), "layers")
        )
    return params | {"down": _linear(keys[2], sizes("hidden classes"), "hidden")}


def predict(params: dict[str, Any], inputs: md.Tensor) -> md.Tensor:
    """Returns logits ``[batch classes]`` of inputs ``[batch features]``."""
    hidden = md.relu(_apply(params["up"], inputs, over="features"))
    if "more" in params:
        hidden, _ = md.scan(_layer, hidden, params["more"], over="layers")
    return _apply(params["down"], hidden, over="hidden")


def loss(params: dict[str, Any], batch: dict[str, md.Tensor]) -> md.Tensor:
    """Returns the mean cross-entropy of ``labels [batch]``."""
    return md.mean(md.cross_entropy(predict(params, batch["inputs"]), batch["labels"], over="classes"))


def program(
    sizes: md.DimsLike = "features=784 hidden=1024 classes=10",
    rules: md.Rules | str = RULES["tensor"],
    batch: int = 512,
) -> md.Program:
    """Returns a training step with Adam, as shapes: ``step(params, opt_state, batch)``.

    Args:
      sizes: as ``init`` takes them.
      rules: layout rules, such as one of ``RULES``.
      batch: examples per step.
    """
    sizes = md.dims(sizes)
    optimizer = optax.adam(1e-3)

    def start() -> Any:
        params = init(jax.random.key(0), sizes)
        return params, optimizer.init(params)

    inputs = md.named(jax.ShapeDtypeStruct((batch, sizes["features"]), jnp.float32), "batch features")
    labels = md.named(jax.ShapeDtypeStruct((batch,), jnp.int32), "batch")
    args = (*jax.eval_shape(start), {"inputs": inputs, "labels": labels})
    return md.Program(train_step(loss, optimizer), args, rules=rules, init=start)


def _linear(key: jax.Array, dims: md.Dims, over: str) -> dict[str, md.Tensor]:
    _, made = dims
    return {"kernel": md.fan_in(key, dims, over=over), "bias": md.zeros(dims(made))}


def _apply(layer: dict[str, md.Tensor], x: md.Tensor, over: str) -> md.Tensor:
    return md.dot(x, layer["kernel"], over=over) + layer["bias"]


def _layer(hidden: md.Tensor, layer: dict[str, md.Tensor]) -> tuple[md.Tensor, None]:
    return md.rename(md.relu(_apply(layer, hidden, over="hidden")), out="hidden"), None
