"""FSDP with weights gathered in int8, layer by layer, and again for the backward pass; gradients in full.

Wang et al., ZeRO++, 2023, section 4.1 (qwZ): blocks of a shard are rounded before it is gathered, a quarter of the
bytes of float32, and a scale per block, in both passes.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.low_bits import sent

LAYERS, WIDTH, BATCH, BLOCK = 4, 64, 128, 16
layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ sent(w, "data=B", "int8", BLOCK, held="data=S(0)")))


def loss(params, batch):
    x = batch["x"]
    for w in params:
        x = layer(x, w)
    return jnp.mean((x - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
memory = "80kB"
program = md.Program(step, (params, batch), layouts={"batch/*": "data=S(0)", "params/*": "data=S(0)"})

n = 4 * LAYERS * WIDTH**2  # bytes of parameters
sizes = {"n": n, "b": BLOCK, "k": 8}
published = {
    "all-gather over data": "2 * (n / 4 + n / b) * (k - 1) / k",
    "reduce-scatter over data": "n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts, memory=memory).plan(*program.args))
