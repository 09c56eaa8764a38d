"""Convolutions split by height, found by the planner for few large images: neighbours exchange halo rows.

Jia et al., OptCNN, ICML 2018 (hidden dimensions), and FlexFlow, 2019; Dryden et al., 2019: a kernel of 3 needs one
row from either side, forward and backward; the gradient with respect to the images is not needed. Kernels are data
parallel.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

IMAGES, SIDE, CHANNELS = 2, 64, 8


def loss(params, batch):
    x = batch["x"]
    for kernel in params:
        dims = ("NHWC", "HWIO", "NHWC")
        x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims))
    return jnp.mean((x - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = [jax.ShapeDtypeStruct((3, 3, CHANNELS, CHANNELS), jnp.float32)] * 2
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((IMAGES, SIDE, SIDE, CHANNELS), jnp.float32))

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(model=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch))

row = 4 * IMAGES * SIDE * CHANNELS  # bytes of one row of all images
n = 4 * 2 * 9 * CHANNELS**2  # bytes of parameters
sizes = {"row": row, "n": n, "k": 8}
published = {"collective-permute over model": "2 * row * (2 + 1)", "all-reduce over model": "2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh).plan(*program.args))
