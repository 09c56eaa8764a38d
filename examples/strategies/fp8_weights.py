"""FSDP with products in float8, whose weights are gathered as such once and kept for the backward pass.

Scales are those of whole tensors (Micikevicius et al., FP8 Formats for Deep Learning, 2022). torchao's float8
all-gather for FSDP2 sends a weight's rounded shards, a quarter of the bytes of float32, once all devices know the
scale: a maximum per weight. Activations and gradients, split over the batch, have a maximum each. Gradients of weights
are in full.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.fp8 import dot_general

LAYERS, WIDTH, BATCH = 4, 64, 512


def loss(params, batch):
    x = batch["x"]
    for w in params:
        x = jnp.tanh(dot_general(x, w, (((1,), (0,)), ((), ()))))
    return jnp.mean((x - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "data=S(0)", "params/*": "data=S(0)"})

n = 4 * LAYERS * WIDTH**2  # bytes of parameters in float32
sizes = {"n": n, "layers": LAYERS, "k": 8}
published = {
    "all-gather over data": "n / 4 * (k - 1) / k",
    "reduce-scatter over data": "n * (k - 1) / k",
    "all-reduce over data": "3 * layers * 2 * 4 * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
