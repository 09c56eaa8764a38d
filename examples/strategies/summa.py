"""A matmul over a grid of devices: block rows of one matrix and block columns of the other are gathered.

Van de Geijn and Watts, SUMMA, 1997: each device of a grid of r by c receives the rest of its block row and of its
block column.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

SIDE = 256


def step(a, b):
    return {"product": a @ b}


a = b = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(x=4, y=2, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (a, b), layouts={"a": "x=S(0) y=S(1)", "b": "x=S(0) y=S(1)"})

n = 4 * SIDE**2  # bytes of one matrix
sizes = {"n": n, "r": 4, "c": 2}
published = {"all-gather over y": "n / r * (c - 1) / c", "all-gather over x": "n / c * (r - 1) / r"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
