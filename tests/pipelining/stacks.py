"""A small model of stacked layers, with everything that crosses its stages."""

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.pins import UserPins
from meshdsl.pipelining import to_microbatches
from meshdsl.trace import trace

WIDTH, HIDDEN, FEATURES = 8, 16, 4
LAYOUTS = {"params/layers/*": "pipe=S(0)"}


def arguments(layers=8, batch=16, dtype=np.float32):
    rng = np.random.default_rng(0)
    params = {
        "embed": rng.normal(size=(FEATURES, WIDTH)),
        "gain": np.ones(WIDTH),
        "layers": {
            "up": rng.normal(size=(layers, WIDTH, HIDDEN)) / 4,
            "down": rng.normal(size=(layers, HIDDEN, WIDTH)) / 4,
        },
    }
    given = {"x": rng.normal(size=(batch, FEATURES)), "y": rng.normal(size=(batch, FEATURES))}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), (params, {**given, "mask": rng.integers(0, 2, batch)}))


def loss(params, batch, penalty=0.01):
    """Tied embeddings; a mask and a gain that all layers share; a penalty that layers add up."""

    def layer(carry, weights):
        x, total = carry
        hidden = jnp.tanh(x @ weights["up"])
        made = x + jnp.where(batch["mask"][:, None] > 0, hidden, 2 * hidden) @ weights["down"]
        return (made * params["gain"], total + penalty * jnp.mean(hidden**2)), jnp.max(hidden)

    x = batch["x"] @ params["embed"]
    (x, total), largest = jax.lax.scan(layer, (x, jnp.zeros((), x.dtype)), params["layers"])
    return jnp.mean((x @ params["embed"].T - batch["y"]) ** 2) + total, largest


def step(params, batch):
    """Gradient descent with clipping; the largest activation of each layer besides."""
    (value, largest), gradient = jax.value_and_grad(loss, has_aux=True)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
    scale = 0.1 / jnp.maximum(norm, 1)
    return jax.tree.map(lambda p, g: p - scale * g, params, gradient), value, norm, largest


def plain_step(params, batch):
    """Gradient descent on layers alone."""

    def loss(params):
        x = batch["x"] @ params["embed"]
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, params["layers"])
        return jnp.mean((x @ params["embed"].T - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


def traced(pipeline, stages, *args, function=step, layouts=LAYOUTS):
    mesh = md.Mesh(pipe=stages)
    return to_microbatches(trace(function, args), pipeline, mesh, UserPins(layouts))
