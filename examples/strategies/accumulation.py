"""Gradient accumulation: sequential microbatches with one all-reduce per step, found by the planner.

Horovod's backward_passes_per_step and DDP's no_sync (Li et al., PyTorch Distributed, VLDB 2020, section 3.2.4):
2 n (k - 1) / k for any number of microbatches.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

MICROBATCHES, WIDTH, HIDDEN, BATCH = 4, 32, 64, 256


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def step(params, batch):
    def accumulate(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

    total, _ = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, params), batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g / MICROBATCHES, params, total)


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((MICROBATCHES, BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-3, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "data=S(1)", "params/*": "data=B"})

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"all-reduce over data": "2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
