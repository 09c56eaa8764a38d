"""ZeRO-1 and ZeRO-2: optimizer state and reduced gradients are sharded over the data axis, parameters replicated.

Rajbhandari et al., ZeRO, SC 2020, section 7: a reduce-scatter of gradients and an all-gather of parameters, the same
bytes as the all-reduce of data parallelism.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

WIDTH, HIDDEN, BATCH = 32, 64, 1024


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def step(params, momentum, batch):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, jax.grad(loss)(params, batch))
    return jax.tree.map(lambda w, m: w - 0.1 * m, params, momentum), momentum


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(
    step, (params, params, batch), layouts={"batch/*": "data=S(0)", "params/*": "data=B", "momentum/*": "data=S(0)"}
)

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"reduce-scatter over data": "n * (k - 1) / k", "all-gather over data": "n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
