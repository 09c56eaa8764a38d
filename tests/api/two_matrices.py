"""A small training step that many tests of calls share."""

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.layouts import Mesh

MESH = Mesh(data=4, model=2)
LAYOUTS = {"batch": "data=S(0)", "params/w1": "model=S(1)"}


def step(params, batch):
    def loss(p):
        return jnp.mean((jnp.tanh(batch @ p["w1"]) @ p["w2"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments(rows=16):
    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(size=(8, 16)), "w2": rng.normal(size=(16, 8))}
    return jax.tree.map(np.float32, params), np.float32(rng.normal(size=(rows, 8)))


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def close(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), a, b)
