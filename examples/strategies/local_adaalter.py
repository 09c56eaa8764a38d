"""Local AdaAlter: replicas take local adaptive steps, then average parameters and squared gradients.

Xie et al., Local AdaAlter, 2019: the denominator is that of the last average, plus a constant per step since, so that
replicas agree on it. Twice the bytes of local SGD: 2 * 2 n (k - 1) / k after STEPS steps.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

REPLICAS, STEPS, WIDTH, HIDDEN, BATCH = 8, 4, 32, 64, 128
RATE, EPSILON = 0.1, 1.0


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def average(tree):
    return jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), tree)


def step(params, squares, batch):
    agreed = squares  # as of the last average

    def alone(state, inputs):
        (params, squares), (number, part) = state, inputs
        gradients = jax.vmap(jax.grad(loss))(params, part)

        def moved(w, g, b):
            return w - RATE * g / jnp.sqrt(b + (number + 1) * EPSILON**2)

        params = jax.tree.map(moved, params, gradients, agreed)
        return (params, jax.tree.map(lambda s, g: s + g * g, squares, gradients)), None

    (params, squares), _ = jax.lax.scan(alone, (params, squares), (jnp.arange(STEPS), batch))
    return average(params), average(squares)


params = {
    "up": jax.ShapeDtypeStruct((REPLICAS, WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((REPLICAS, HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((STEPS, REPLICAS, BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-3, bandwidth=1e7),)
mesh = md.Mesh(replica=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(
    step,
    (params, params, batch),
    layouts={"params/*": "replica=S(0)", "squares/*": "replica=S(0)", "batch/*": "replica=S(1)"},
)

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters of one replica
sizes = {"n": n, "k": 8}
published = {"all-reduce over replica": "2 * 2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
