"""Convolutions split by height and width, found by the planner: halo rows, columns and corners are exchanged.

Jia et al., OptCNN, ICML 2018 (hidden dimensions), and FlexFlow, 2019; Dryden et al., IPDPS 2019: for a block of h by
w, a kernel of 3 needs 2 (h + w) + 4 remote pixels, forward and backward. Here corners are sent with the columns, after
the rows were exchanged. Kernels are data parallel.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

IMAGES, SIDE, CHANNELS = 1, 64, 8
ROWS, COLUMNS = 2, 4


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
mesh = md.Mesh(rows=ROWS, columns=COLUMNS, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch))

pixel = 4 * IMAGES * CHANNELS  # bytes of one place of all images
n = 4 * 2 * 9 * CHANNELS**2  # bytes of parameters
sizes = {"pixel": pixel, "h": SIDE // ROWS, "w": SIDE // COLUMNS, "n": n, "k": ROWS * COLUMNS}
published = {
    "collective-permute over rows": "2 * w * pixel * (2 + 1)",
    "collective-permute over columns": "(2 * h + 4) * pixel * (2 + 1)",
    "all-reduce over rows, columns": "2 * n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh).plan(*program.args))
