"""Local SGD, or DiLoCo without outer momentum: replicas take local steps, then average their parameters.

Stich, Local SGD, 2018; Douillard et al., DiLoCo, 2023. Replicas are a dim of the parameters, so the average is one
all-reduce after STEPS steps: 2 n (k - 1) / k.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

REPLICAS, STEPS, WIDTH, HIDDEN, BATCH = 8, 4, 32, 64, 128


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def alone(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


def step(params, batch):
    params, _ = jax.lax.scan(lambda params, batch: (jax.vmap(alone)(params, batch), None), params, batch)
    return jax.tree.map(lambda w: jnp.broadcast_to(w.mean(0), w.shape), params)


params = {
    "up": jax.ShapeDtypeStruct((REPLICAS, WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((REPLICAS, HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((STEPS, REPLICAS, BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-3, bandwidth=1e7),)
mesh = md.Mesh(replica=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"params/*": "replica=S(0)", "batch/*": "replica=S(1)"})

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters of one replica
sizes = {"n": n, "k": 8}
published = {"all-reduce over replica": "2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
