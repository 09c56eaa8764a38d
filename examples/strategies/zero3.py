"""ZeRO-3, or FSDP: parameters are sharded too, gathered layer by layer, and again for the backward pass.

Rajbhandari et al., ZeRO, SC 2020, section 7: 3 n (k - 1) / k bytes. The backward pass starts with the last
layer, which is still gathered and not gathered again (as in Zhao et al., PyTorch FSDP, VLDB 2023, section 4).
Without the memory limit the planner keeps gathered parameters live, and sends 2 n (k - 1) / k.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

LAYERS, WIDTH, BATCH = 4, 64, 128
layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))


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
sizes = {"n": n, "layers": LAYERS, "k": 8}
published = {
    "all-gather over data": "(n + n * (layers - 1) / layers) * (k - 1) / k",
    "reduce-scatter over data": "n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts, memory=memory).plan(*program.args))
