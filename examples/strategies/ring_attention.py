"""Ring attention: blocks of keys and values visit split queries hop by hop, and their gradients come home with them.

Liu et al., Ring Attention with Blockwise Transformers, 2023, section 3: per layer, keys and values pass k - 1 hops in
the forward pass and again in the backward pass, where their gradients do, too. The causal sequence is in zig-zag order
(Llama Team, 2024, section 3.3.2): the batch is permuted once, by ``zigzag(SEQ, 8)``.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.ring_attention import ring_attention

BATCH, SEQ, EMBED, HEADS, SIZE = 2, 128, 16, 2, 8


def loss(params, batch):
    q, k, v = jnp.einsum("bse,cehd->cbshd", batch["x"], params["qkv"])
    mixed = ring_attention(q[:, :, :, None], k, v, blocks=8, layout="seq=S(1)")[:, :, :, 0]
    return jnp.mean((jnp.einsum("bshd,hde->bse", mixed, params["out"]) - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "qkv": jax.ShapeDtypeStruct((3, EMBED, HEADS, SIZE), jnp.float32),
    "out": jax.ShapeDtypeStruct((HEADS, SIZE, EMBED), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32))

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(seq=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "seq=S(1)", "params/*": "seq=B"})

c = 4 * BATCH * SEQ * HEADS * SIZE  # bytes of keys, and of values
n = 4 * 4 * EMBED * HEADS * SIZE  # bytes of parameters
sizes = {"c": c, "n": n, "k": 8}
published = {
    "collective-permute over seq": "(2 + 4) * c * (k - 1) / k",
    "all-reduce over seq": "2 * n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
