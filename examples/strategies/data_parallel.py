"""Synchronous data parallelism: each device takes a shard of the batch; gradients are all-reduced once per step.

Horovod (Sergeev and Del Balso, 2018); a ring sends 2 n (k - 1) / k of n bytes (Patarasuk and Yuan, 2009). If
latency matters, each gradient is one all-reduce; if not, the planner splits it into a reduce-scatter before the
update and an all-gather after it (see zero.py).
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

WIDTH, HIDDEN, BATCH = 32, 64, 1024


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-3, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "data=S(0)", "params/*": "data=B"})

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"all-reduce over data": "2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
