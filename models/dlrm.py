"""Recommendation models DLRM and Wide and Deep: click prediction from numeric and categorical features.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019), with its
sizes for the Criteo data; Cheng et al., "Wide & Deep Learning for Recommender Systems" (2016), figure 4, on the same
categories (its own are not published).

    dense [batch dense], sparse [batch feature]
    dlrm           rows = table[sparse], plus bottom(dense) as one more row; inner products of all pairs; top -> click
    wide and deep  deep(dense, rows) + sum of weight[sparse] -> click

The tables of all features are concatenated into one, ``[vocab embed]``. With ``vocab`` split over devices, a lookup
gathers from the local rows and the update scatter-adds into them: pull and push of a parameter server. The table is
padded to a multiple of ``ROUND`` rows, so that it divides over many devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshdsl as md
from meshdsl.models.layers import Linear
from meshdsl.models.training import Strategies, flax_program

ROUND = 1024
CRITEO = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652),
    *(2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)

RULES: Strategies = {
    "data": "batch:data",
    "tensor": "batch:data vocab:model",
    "everywhere": "batch:(data,model) vocab:(data,model)",
    "columns": "batch:data embed:model",
    "zero": md.Rules("batch:data", optimizer="vocab:data"),
}


@dataclass(frozen=True)
class Config:
    """Sizes of one model.

    Args:
      features: vocabulary size of each categorical feature.
      dense: numeric features per example.
      embed: width of an embedding row.
      bottom: layer widths of the bottom perceptron, ending with ``embed``; empty in Wide and Deep.
      top: layer widths of the top (or deep) perceptron, without the final 1.
      wide: whether the model is Wide and Deep.
    """

    features: tuple[int, ...]
    dense: int
    embed: int
    bottom: tuple[int, ...] = ()
    top: tuple[int, ...] = ()
    wide: bool = False

    @property
    def table(self) -> md.Dims:
        """Dims of the embedding table."""
        return md.dims(f"vocab={-(-sum(self.features) // ROUND) * ROUND} embed={self.embed}")


CONFIGS = {
    "dlrm": Config(CRITEO, dense=13, embed=16, bottom=(512, 256, 64, 16), top=(512, 256)),
    "wide-and-deep": Config(CRITEO, dense=13, embed=32, top=(1024, 512, 256), wide=True),
}


class Perceptron(nnx.Module):
    """Linear layers with ReLU between them, ``[batch inputs]`` to ``[batch inputs]`` of another width."""

    def __init__(self, widths: Sequence[int], rngs: nnx.Rngs) -> None:
        sizes = [md.dims(f"inputs={n} hidden={m}") for n, m in pairwise(widths)]
        self.layers = nnx.List(Linear(s, "inputs", "hidden", (2 / s["inputs"]) ** 0.5, rngs) for s in sizes)

    def __call__(self, x: md.Tensor) -> md.Tensor:
        """Returns the last layer's output, without ReLU."""
        for i, layer in enumerate(self.layers):
            x = md.rename(layer(x if i == 0 else md.relu(x)), hidden="inputs")
        return x


class DLRM(nnx.Module):
    """DLRM: inner products of all pairs among embedding rows and the bottom perceptron's output."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        vectors = len(config.features) + 1
        self.features = config.features
        self.table = nnx.Param(md.normal(rngs.params(), config.table, std=config.embed**-0.5))
        self.bottom = Perceptron((config.dense, *config.bottom), rngs)
        self.top = Perceptron((config.embed + vectors * (vectors - 1) // 2, *config.top, 1), rngs)

    def __call__(self, dense: md.Tensor, sparse: md.Tensor) -> md.Tensor:
        """Returns log-odds ``[batch]`` for numbers ``[batch dense]`` and categories ``[batch feature]``."""
        rows = lookup(self.table, self.features, sparse)
        numbers = md.relu(self.bottom(md.rename(dense, dense="inputs")))
        pairs = pairwise_products(md.concat([md.split(numbers, inputs="feature=1 embed"), rows], over="feature"))
        return md.index(self.top(md.concat([numbers, pairs], over="inputs")), inputs=0)


class WideAndDeep(nnx.Module):
    """Wide and Deep: a linear model over categories, plus a perceptron over numbers and embedding rows."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.features = config.features
        self.table = nnx.Param(md.normal(rngs.params(), config.table, std=config.embed**-0.5))
        self.weight = nnx.Param(md.zeros(config.table("vocab")))
        self.deep = Perceptron((config.dense + len(config.features) * config.embed, *config.top, 1), rngs)

    def __call__(self, dense: md.Tensor, sparse: md.Tensor) -> md.Tensor:
        """Returns log-odds ``[batch]`` for numbers ``[batch dense]`` and categories ``[batch feature]``."""
        rows = md.merge(lookup(self.table, self.features, sparse), inputs="feature embed")
        deep = md.index(self.deep(md.concat([md.rename(dense, dense="inputs"), rows], over="inputs")), inputs=0)
        return deep + md.sum(lookup(self.weight, self.features, sparse), over="feature")


def lookup(table: Any, features: Sequence[int], sparse: md.Tensor) -> md.Tensor:
    """Returns the rows of categories ``[batch feature]``, which count from the first row of their feature."""
    starts = md.named(np.array([0, *accumulate(features)][:-1], np.int32), "feature")
    return md.take(table, sparse + starts, over="vocab")


def pairwise_products(vectors: md.Tensor) -> md.Tensor:
    """Returns the inner products of all pairs, ``[batch feature embed]`` to ``[batch inputs]``."""
    count = vectors.shape["feature"]
    square = md.dot(vectors, md.rename(vectors, feature="other"), over="embed")
    pairs = md.named(np.ravel_multi_index(np.tril_indices(count, -1), (count, count)).astype(np.int32), "inputs")
    return md.take(md.merge(square, pair="feature other"), pairs, over="pair")


def click_loss(model: Any, batch: Any) -> Any:
    """Returns the mean binary cross-entropy of log-odds and labels, both ``[batch]``."""
    odds = model(batch["dense"], batch["sparse"])
    return md.mean(md.softplus(odds) - odds * batch["labels"])


def program(config: Config | str, rules: md.Rules | str, batch: int = 2048, optimizer: Any = None) -> md.Program:
    """Returns a training step, as shapes: ``step(params, opt_state, batch)``.

    Args:
      config: a name in ``CONFIGS``, or a ``Config``.
      rules: layout rules, such as one of ``RULES``.
      batch: examples per step.
      optimizer: an optax optimizer; default: Adagrad, which both papers use.
    """
    sizes = CONFIGS[config] if isinstance(config, str) else config
    kind = WideAndDeep if sizes.wide else DLRM
    shapes = {
        "dense": md.named(jax.ShapeDtypeStruct((batch, sizes.dense), jnp.float32), "batch dense"),
        "sparse": md.named(jax.ShapeDtypeStruct((batch, len(sizes.features)), jnp.int32), "batch feature"),
        "labels": md.named(jax.ShapeDtypeStruct((batch,), jnp.float32), "batch"),
    }
    return flax_program(lambda rngs: kind(sizes, rngs), click_loss, shapes, rules, optimizer or optax.adagrad(0.01))
