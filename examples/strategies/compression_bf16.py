"""Gradients in bfloat16 with error feedback: rounding errors are added to the next gradient.

Seide et al., 1-Bit SGD, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019. Shards of the rounded
gradients are exchanged and averaged in float32, and the averages gathered, as in Tang et al., 1-bit Adam, 2021:
half of the bytes of data parallelism. Replicas are a dim of the gradients; the one constraint shards them for the
sum.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

REPLICAS, WIDTH, HIDDEN, BATCH = 8, 32, 64, 128


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def mean(rounded):
    """Averages over replicas, [replica a b] -> [a b], each device a shard."""
    parts = md.constrain(rounded, "data=S(1)")
    return parts.astype(jnp.float32).mean(0).astype(rounded.dtype)


def step(params, error, batch):
    exact = jax.tree.map(jnp.add, error, jax.vmap(jax.grad(loss), (None, 0))(params, batch))
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16), exact)
    error = jax.tree.map(lambda g, r: g - r.astype(jnp.float32), exact, rounded)
    return jax.tree.map(lambda w, r: w - 0.1 * mean(r).astype(jnp.float32), params, rounded), error


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((REPLICAS, BATCH, WIDTH), jnp.float32))
error = jax.tree.map(lambda w: jax.ShapeDtypeStruct((REPLICAS, *w.shape), w.dtype), params)

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(
    step, (params, error, batch), layouts={"batch/*": "data=S(0)", "error/*": "data=S(0)", "params/*": "data=B"}
)

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"all-to-all over data": "n / 2 * (k - 1) / k", "all-gather over data": "n / 2 * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
