"""One weird trick: convolutions are data parallel and dense layers model parallel, found by the planner.

Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014: activations are exchanged after
the convolutions, and the many weights of dense layers are never sent. The output is reduce-scattered to the layout of
the labels.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

BATCH, SIDE, CHANNELS, MADE, HIDDEN = 64, 8, 4, 8, 512


def loss(params, batch):
    dims = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(batch["x"], params["conv"], (1, 1), "SAME", dimension_numbers=dims)
    x = jnp.tanh(jnp.tanh(x).reshape(BATCH, -1) @ params["dense"]) @ params["head"]
    return jnp.mean((x - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "conv": jax.ShapeDtypeStruct((3, 3, CHANNELS, MADE), jnp.float32),
    "dense": jax.ShapeDtypeStruct((SIDE**2 * MADE, HIDDEN), jnp.float32),
    "head": jax.ShapeDtypeStruct((HIDDEN, HIDDEN), jnp.float32),
}
batch = {
    "x": jax.ShapeDtypeStruct((BATCH, SIDE, SIDE, CHANNELS), jnp.float32),
    "y": jax.ShapeDtypeStruct((BATCH, HIDDEN), jnp.float32),
}

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "data=S(0)"})

a = 4 * BATCH * SIDE**2 * MADE  # bytes of the convolution's output
y = 4 * BATCH * HIDDEN  # bytes of the result
n = 4 * 9 * CHANNELS * MADE  # bytes of the kernel
sizes = {"a": a, "y": y, "n": n, "k": 8}
published = {
    "all-gather over data": "(a + y) * (k - 1) / k",
    "reduce-scatter over data": "(a + y) * (k - 1) / k",
    "all-reduce over data": "2 * n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
