"""Models on images and fields: convolutions, batch norm, Fourier transforms."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pdequinox
from equimo.models.convnext import ConvNeXt
from transformers import FlaxRegNetForImageClassification, RegNetConfig

from bench.zoo.case import Case, cross_entropy, floats, ids


def regnet() -> Case:
    """RegNet (transformers): grouped convolutions, squeeze and excite, batch norm over the whole batch."""
    sizes = {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "groups_width": 16}
    model = FlaxRegNetForImageClassification(
        RegNetConfig(**sizes, layer_type="y", num_labels=8), seed=1, input_shape=(1, 32, 32, 3)
    )
    averages = model.params["batch_stats"]

    def loss(params, batch):
        variables = {"params": params, "batch_stats": averages}
        output, _ = model.module.apply(variables, batch["image"], deterministic=False, mutable=["batch_stats"])
        return cross_entropy(output.logits, batch["kind"])

    batch = {"image": floats(0, 16, 32, 32, 3), "kind": ids(1, 8, 16)}
    return Case(loss, model.params["params"], batch, optimizer=optax.sgd(0.05, momentum=0.9))


def convnext() -> Case:
    """ConvNeXt (equimo): depthwise convolutions, layer norm, stochastic depth."""
    sizes = {"depths": [1, 1, 2, 1], "dims": [16, 16, 32, 32], "num_classes": 8, "drop_path_rate": 0.2}
    model = eqx.filter_jit(lambda key: ConvNeXt(3, **sizes, key=key))(jax.random.PRNGKey(1))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        keys = jax.random.split(jax.random.PRNGKey(2), len(batch["kind"]))
        model = eqx.combine(params, static)
        logits = jax.vmap(lambda image, key: model(image, key=key, inference=False))(batch["image"], keys)
        return cross_entropy(logits, batch["kind"])

    return Case(loss, params, {"image": floats(0, 16, 3, 32, 32), "kind": ids(1, 8, 16)})


def fourier() -> Case:
    """A Fourier neural operator in 1D (pdequinox): FFTs, complex weights for the lowest frequencies."""
    model = pdequinox.arch.ClassicFNO(1, 2, 1, hidden_channels=16, num_modes=6, num_blocks=3, key=jax.random.PRNGKey(1))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        predicted = jax.vmap(eqx.combine(params, static))(batch["before"])
        return jnp.mean(jnp.abs(predicted - batch["after"]) ** 2)

    return Case(loss, params, {"before": floats(0, 16, 2, 64), "after": floats(1, 16, 1, 64)})
