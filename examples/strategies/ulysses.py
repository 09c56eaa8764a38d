"""Ulysses: the sequence is split, but heads during attention, found by the planner: all-to-alls there and back.

Jacobs et al., DeepSpeed Ulysses, 2023, section 3.2: per layer and direction four all-to-alls of the size of queries,
keys, values and outputs. Weights are replicated, so their gradients are reduced as in data parallelism.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

BATCH, SEQ, EMBED, HEADS, SIZE = 2, 128, 16, 8, 2


def loss(params, batch):
    q, k, v = jnp.einsum("bse,cehd->cbshd", batch["x"], params["qkv"])
    scores = jnp.where(jnp.tri(SEQ, dtype=bool), jnp.einsum("bshd,bthd->bhst", q, k) / SIZE**0.5, -1e9)
    made = jnp.einsum("bhst,bthd,hde->bse", jax.nn.softmax(scores), v, params["out"])
    return jnp.mean((made - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "qkv": jax.ShapeDtypeStruct((3, EMBED, HEADS, SIZE), jnp.float32),
    "out": jax.ShapeDtypeStruct((HEADS, SIZE, EMBED), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32))

links = (Link(latency=1e-5, bandwidth=1e7),)
mesh = md.Mesh(seq=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "seq=S(1)", "params/*": "seq=B"})

c = 4 * BATCH * SEQ * HEADS * SIZE  # bytes of queries, keys, values, or outputs
n = 4 * 4 * EMBED * HEADS * SIZE  # bytes of parameters
sizes = {"c": c, "n": n, "k": 8}
published = {
    "all-to-all over seq": "2 * 4 * c / k * (k - 1) / k",
    "all-reduce over seq": "2 * n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
