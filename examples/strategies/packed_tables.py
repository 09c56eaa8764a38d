"""Table-wise parallel embeddings: whole tables on their owners, packed by load; only rows of the batch are updated.

Ivchenko et al., TorchRec: a PyTorch Domain Library for Recommendation Systems, RecSys 2022, whose planner gives the
heaviest tables first, each to the device of the least load; Mudigere et al., Software-Hardware Co-design for Fast and
Scalable Training of Deep Learning Recommendation Models, ISCA 2022: ids go to the owners of their tables, sums of rows
to their examples, and their gradients back, each in an all-to-all; row-wise Adagrad; weights are updated as in ZeRO.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.embeddings import pack_tables

ROWS = [250 * (1 + 7 * i % 24) for i in range(24)]  # of 24 tables
LOADS = [1] * 8 + [2] * 8 + [5] * 8  # rows that an example looks up in each
EMBED, BATCH, HIDDEN = 16, 512, 64
TABLES = pack_tables(ROWS, LOADS, 8)


def loss(found, weights, y):
    made = jnp.tanh(found.reshape(BATCH, len(ROWS) * EMBED) @ weights["in"]) @ weights["out"]
    return jnp.mean((made - y) ** 2)


def step(params, state, batch):
    found = TABLES.lookup(params["tables"], batch["ids"])
    gradient, weight_gradients = jax.grad(loss, (0, 1))(found, params["weights"], batch["y"])
    tables, state = TABLES.adagrad(params["tables"], state, batch["ids"], gradient, 0.1)
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, params["weights"], weight_gradients)
    return {"tables": tables, "weights": weights}, state


array = jax.ShapeDtypeStruct
params = {
    "tables": array((8, TABLES.height, EMBED), jnp.float32),
    "weights": {
        "in": array((len(ROWS) * EMBED, HIDDEN), jnp.float32),
        "out": array((HIDDEN, 1), jnp.float32),
    },
}
state = array((8, TABLES.height), jnp.float32)
batch = {"ids": array((BATCH, sum(LOADS)), jnp.int32), "y": array((BATCH, 1), jnp.float32)}

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e9, 1e9, 1e10, 4e9, 0.0, links))
layouts = {"batch/*": "data=S(0)", "params/tables": "data=S(0)", "params/weights/*": "data=B", "state": "data=S(0)"}
program = md.Program(step, (params, state, batch), layouts=layouts)

i, e = 4 * BATCH * sum(LOADS), 4 * BATCH * len(ROWS) * EMBED  # bytes of ids, and of the sums of rows
m, o = 4 * len(ROWS) * EMBED * HIDDEN, 4 * HIDDEN  # bytes of the weights
sizes = {"i": i, "e": e, "m": m, "o": o, "k": 8}
published = {
    "all-to-all over data": "(i + 2 * e) / k * (k - 1) / k",
    "reduce-scatter over data": "m * (k - 1) / k",
    "all-gather over data": "m * (k - 1) / k",
    "all-reduce over data": "2 * o * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
