"""Sequence parallelism with tensor parallelism: between the matmuls, activations are split along the sequence.

Korthikanti et al., Reducing Activation Recomputation, 2022, section 4.2.2: each all-reduce of Megatron becomes an
all-gather and a reduce-scatter with the same bytes. If latency is negligible, the planner finds it.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

LAYERS, SEQ, BATCH, EMBED, HEADS, SIZE, HIDDEN = 2, 16, 4, 64, 4, 16, 256


def block(x, w):
    """Attention and perceptron; x is [seq batch embed]."""
    q, k, v = jnp.einsum("sbe,cehd->csbhd", x, w["qkv"])
    weights = jax.nn.softmax(jnp.einsum("sbhd,tbhd->bhst", q, k) / SIZE**0.5)
    x = x + jnp.einsum("bhst,tbhd,hde->sbe", weights, v, w["out"])
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss(params, batch):
    return jnp.mean((jax.lax.scan(block, batch["x"], params)[0] - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "qkv": jax.ShapeDtypeStruct((LAYERS, 3, EMBED, HEADS, SIZE), jnp.float32),
    "out": jax.ShapeDtypeStruct((LAYERS, HEADS, SIZE, EMBED), jnp.float32),
    "up": jax.ShapeDtypeStruct((LAYERS, EMBED, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, EMBED), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((SEQ, BATCH, EMBED), jnp.float32))
heads = {"params/qkv": "model=S(3)", "params/out": "model=S(1)", "params/up": "model=S(2)", "params/down": "model=S(1)"}

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(model=4, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={**heads, "batch/*": "model=B"})

a = 4 * SEQ * BATCH * EMBED  # bytes of activations
sizes = {"a": a, "layers": LAYERS, "k": 4}
published = {
    "all-gather over model": "2 * 2 * layers * a * (k - 1) / k",
    "reduce-scatter over model": "2 * 2 * layers * a * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
