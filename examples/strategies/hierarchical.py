"""Hierarchical all-reduce, found by the planner: reduce-scatter in the node, all-reduce across, all-gather in the node.

BytePS (Jiang et al., OSDI 2020), NCCL and BlueConnect (Cho et al., 2019): each of the k devices of a node reduces
its shard over the m nodes, so the slow link carries 2 n / k (m - 1) / m. The update runs on that shard, before it is
gathered. If the slow link's latency were as small as the fast one's, shards would be split over the nodes as well.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

WIDTH, HIDDEN, BATCH = 32, 64, 1024


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))

links = (Link(1e-6, 1e8, devices=4), Link(1e-4, 1e7))
mesh = md.Mesh(node=2, data=4, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"batch/*": "node=S(0) data=S(0)", "params/*": "node=B data=B"})

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 4, "m": 2}
published = {
    "reduce-scatter over data": "n * (k - 1) / k",
    "all-reduce over node": "2 * n / k * (m - 1) / m",
    "all-gather over data": "n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
