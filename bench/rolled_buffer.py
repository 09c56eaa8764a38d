"""Pipelining by a rolled buffer of stage inputs, differentiated by autodiff: the peer of ``bench.pipeline``.

This is one round of MaxText's circular pipeline, handwritten with jax.jit and shardings. A forward loop runs all stages
at once (vmap over the stage axis) and rolls the buffer of their inputs by one stage per iteration; autodiff
differentiates the whole loop, with each stage recomputed. The module also has the plain step of the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import meshdsl as md
from meshdsl.lowering.shardings import device_mesh

STAGES, DATA, RATE = 4, 2, 0.1
Params = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch; ``each`` is the number of sequences per microbatch."""

    layers: int = 8
    embed: int = 256
    hidden: int = 1024
    words: int = 1024
    seq: int = 32
    microbatches: int = 16
    each: int = 4

    @property
    def batch(self) -> int:
        """Sequences per step."""
        return self.microbatches * self.each


def arguments(sizes: Sizes) -> tuple[Params, dict[str, Any]]:
    """Returns random parameters and a batch of random words."""
    rng = np.random.default_rng(0)
    shapes = {"mix": (sizes.embed, sizes.embed), "up": (sizes.embed, sizes.hidden), "down": (sizes.hidden, sizes.embed)}
    layers = {name: rng.normal(size=(sizes.layers, *shape)) / shape[0] ** 0.5 / 4 for name, shape in shapes.items()}
    params = {"embed": 0.05 * rng.normal(size=(sizes.words, sizes.embed)), "layers": layers}
    batch = {name: rng.integers(0, sizes.words, (sizes.batch, sizes.seq), np.int32) for name in ("inputs", "targets")}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), jax.tree.map(jnp.asarray, batch)


def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
    """Returns ``x`` after causal mixing over earlier positions and a GELU perceptron; the scan carries it."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    scores = jnp.einsum("...se,...te->...st", y @ weights["mix"], y) / x.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
    x = x + jnp.einsum("...st,...te->...se", jax.nn.softmax(jnp.where(causal, scores, -1e9)), y)
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def loss_of(params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy; logits use the embedding's transpose."""
    logits = x @ params["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def step(params: Params, batch: dict[str, Any]) -> tuple[Params, jax.Array]:
    """Takes one step of gradient descent on the plain model."""

    def loss(params: Params) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(layer), params["embed"][batch["inputs"]], params["layers"])
        return loss_of(params, x, batch["targets"])

    return descend(params, loss)


def descend(params: Params, loss: Callable[[Params], jax.Array]) -> tuple[Params, jax.Array]:
    """Returns the parameters after a step of gradient descent, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value


class Peer:
    """The step with a rolled buffer, jitted with shardings."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.devices = sizes, device_mesh(md.Mesh(pipe=STAGES, data=DATA))
        replicated, over_stages = self.sharding(), self.sharding("pipe")
        weights = {"embed": replicated, "layers": dict.fromkeys(("mix", "up", "down"), over_stages)}
        batch = dict.fromkeys(("inputs", "targets"), self.sharding("data"))
        self.shardings = weights, batch
        self.jitted = jax.jit(
            self.step, in_shardings=self.shardings, out_shardings=(weights, replicated), donate_argnums=0
        )

    def sharding(self, *axes: str | None) -> NamedSharding:
        """Returns the sharding whose leading dims are split over ``axes``."""
        return NamedSharding(self.devices, PartitionSpec(*axes))

    def step(self, params: Params, batch: dict[str, Any]) -> tuple[Params, jax.Array]:
        """Takes the same step as the module's ``step``, through the pipeline loop."""
        m = self.sizes.microbatches

        def loss(params: Params) -> jax.Array:
            inputs, targets = (batch[name].reshape(m, -1, self.sizes.seq) for name in ("inputs", "targets"))
            outputs = self.pipeline(params["layers"], self.constrain(params["embed"][inputs], None, "data"))
            return loss_of(params, outputs, targets)

        return descend(params, loss)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Returns ``x`` constrained to a sharding."""
        return lax.with_sharding_constraint(x, self.sharding(*axes))

    def pipeline(self, layers: Params, inputs: jax.Array) -> jax.Array:
        """Returns the last stage's outputs of all microbatches, ``[microbatch sequence seq embed]``."""
        stages = jax.tree.map(lambda w: self.constrain(w.reshape(STAGES, -1, *w.shape[1:]), "pipe"), layers)
        stage = jax.vmap(jax.checkpoint(lambda x, own: lax.scan(layer, x, own)[0]))

        def tick(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = inputs[jnp.minimum(t, len(inputs) - 1)]
            first = jnp.arange(STAGES).reshape(-1, 1, 1, 1) == 0
            state = self.constrain(jnp.where(first, start[None], jnp.roll(state, 1, 0)), "pipe", "data")
            state = self.constrain(stage(state, stages), "pipe", "data")
            return state, state  # the last stage's outputs are sliced once, after the loop

        state = self.constrain(jnp.zeros((STAGES, *inputs.shape[1:]), inputs.dtype), "pipe", "data")
        _, outputs = lax.scan(tick, state, jnp.arange(len(inputs) + STAGES - 1))
        return outputs[STAGES - 1 :, -1]
