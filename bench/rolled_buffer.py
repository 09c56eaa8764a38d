"""The peers' way to run a pipeline: a buffer of stage inputs, rolled from stage to stage, and autodiff through it all.

As MaxText's pipelines do it (one round of its circular one): a loop over microbatches and stages, forward only, in
which every stage works at once; what is differentiated is that whole loop, the stage recomputed. Written by hand, with
jax.jit and shardings, beside the step of the same model as anybody writes it.
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
    """Of the model and its batch; ``each`` sequences make a microbatch."""

    layers: int = 8
    embed: int = 256
    hidden: int = 1024
    words: int = 1024
    seq: int = 32
    microbatches: int = 16
    each: int = 4

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.microbatches * self.each


def arguments(sizes: Sizes) -> tuple[Params, dict[str, Any]]:
    """Parameters and a batch of random words."""
    rng = np.random.default_rng(0)
    shapes = {"mix": (sizes.embed, sizes.embed), "up": (sizes.embed, sizes.hidden), "down": (sizes.hidden, sizes.embed)}
    layers = {name: rng.normal(size=(sizes.layers, *shape)) / shape[0] ** 0.5 / 4 for name, shape in shapes.items()}
    params = {"embed": 0.05 * rng.normal(size=(sizes.words, sizes.embed)), "layers": layers}
    batch = {name: rng.integers(0, sizes.words, (sizes.batch, sizes.seq), np.int32) for name in ("inputs", "targets")}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), jax.tree.map(jnp.asarray, batch)


def layer(x: jax.Array, weights: Params) -> tuple[jax.Array, None]:
    """Causal mixing of what came before, and a gated product."""
    y = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    scores = jnp.einsum("...se,...te->...st", y @ weights["mix"], y) / x.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
    x = x + jnp.einsum("...st,...te->...se", jax.nn.softmax(jnp.where(causal, scores, -1e9)), y)
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"], None


def loss_of(params: Params, x: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy; the embedding is tied."""
    logits = x @ params["embed"].T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def step(params: Params, batch: dict[str, Any]) -> tuple[Params, jax.Array]:
    """Gradient descent on the model as anybody writes it."""

    def loss(params: Params) -> jax.Array:
        x, _ = lax.scan(jax.checkpoint(layer), params["embed"][batch["inputs"]], params["layers"])
        return loss_of(params, x, batch["targets"])

    return descend(params, loss)


def descend(params: Params, loss: Callable[[Params], jax.Array]) -> tuple[Params, jax.Array]:
    """The parameters after a step, and the loss before it."""
    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value


class Peer:
    """The rolled buffer, with jax.jit and shardings."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.devices = sizes, device_mesh(md.Mesh(pipe=STAGES, data=DATA))
        self.stages, self.whole = self.at("pipe"), self.at()
        weights = {"embed": self.whole, "layers": dict.fromkeys(("mix", "up", "down"), self.stages)}
        batch = dict.fromkeys(("inputs", "targets"), self.at("data"))
        self.places = weights, batch
        self.jitted = jax.jit(
            self.step, in_shardings=self.places, out_shardings=(weights, self.whole), donate_argnums=0
        )

    def at(self, *axes: str | None) -> NamedSharding:
        """A sharding by the axes of its first dims."""
        return NamedSharding(self.devices, PartitionSpec(*axes))

    def step(self, params: Params, batch: dict[str, Any]) -> tuple[Params, jax.Array]:
        """The same step, through the loop."""
        m = self.sizes.microbatches

        def loss(params: Params) -> jax.Array:
            inputs, targets = (batch[name].reshape(m, -1, self.sizes.seq) for name in ("inputs", "targets"))
            made = self.piped(params["layers"], self.held(params["embed"][inputs], None, "data"))
            return loss_of(params, made, targets)

        return descend(params, loss)

    def held(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Held to a sharding."""
        return lax.with_sharding_constraint(x, self.at(*axes))

    def piped(self, layers: Params, given: jax.Array) -> jax.Array:
        """All microbatches through all stages."""
        dealt = jax.tree.map(lambda w: self.held(w.reshape(STAGES, -1, *w.shape[1:]), "pipe"), layers)
        stage = jax.vmap(jax.checkpoint(lambda x, own: lax.scan(layer, x, own)[0]))

        def tick(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            start = given[jnp.minimum(t, len(given) - 1)]
            first = jnp.arange(STAGES).reshape(-1, 1, 1, 1) == 0
            state = self.held(jnp.where(first, start[None], jnp.roll(state, 1, 0)), "pipe", "data")
            state = self.held(stage(state, dealt), "pipe", "data")
            return state, state  # what the last stage made is picked once, after the loop

        state = self.held(jnp.zeros((STAGES, *given.shape[1:]), given.dtype), "pipe", "data")
        _, made = lax.scan(tick, state, jnp.arange(len(given) + STAGES - 1))
        return made[STAGES - 1 :, -1]
