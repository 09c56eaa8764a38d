"""Parameter servers colocated with workers: each device owns a shard of the parameters; all pull them, push gradients.

Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014. With as many servers as
workers, each pulls n (k - 1) / k bytes and pushes as many.
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

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "data=S(0)", "params/*": "data=S(0)"})

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"all-gather over data": "n * (k - 1) / k", "reduce-scatter over data": "n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
