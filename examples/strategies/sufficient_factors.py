"""Sufficient factor broadcasting: for a small batch, a gradient's factors are gathered instead of all-reducing it.

Xie et al., 2014; Poseidon (Zhang et al., ATC 2017, table 1): a gradient of m by n is the product of b rows of m and
b of n, so gathering these sends less for batches below 2 m n / (m + n). The planner switches there by itself:
build(batch) is the program.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

IN, OUT, BATCH = 64, 64, 32


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params) - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


def build(examples):
    """Returns the program for a batch of this many examples."""
    batch = {name: jax.ShapeDtypeStruct((examples, size), jnp.float32) for name, size in (("x", IN), ("y", OUT))}
    params = jax.ShapeDtypeStruct((IN, OUT), jnp.float32)
    return md.Program(step, (params, batch), layouts={"batch/*": "data=S(0)", "params": "data=B"})


links = (Link(latency=1e-9, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e12, 1e12, 1e9, 4e9, 0.0, links))
program = build(BATCH)

sizes = {"b": BATCH, "m": IN, "n": OUT, "k": 8}
published = {"all-gather over data": "4 * b * (m + n) * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
