"""Row-wise parallel embeddings with a sparse optimizer: rows are looked up and updated where they are.

Ivchenko et al., TorchRec: a PyTorch Domain Library for Recommendation Systems, RecSys 2022: in row-wise sharding every
device looks up the rows that it owns for the whole batch; the partial results are reduce-scattered to the examples, and
their gradients gathered in the backward pass. The gradient of the table is never made: row-wise Adagrad (Mudigere et
al., Software-Hardware Co-design for Fast and Scalable Training of Deep Learning Recommendation Models, ISCA 2022) reads
and writes the rows that the batch touches, each once, whatever the skew of the ids. Weights are updated as in ZeRO.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

ROWS, EMBED, BATCH, FEATURES, HIDDEN = 65536, 16, 512, 4, 128


def loss(rows, weights, y):
    made = jnp.tanh(rows.reshape(BATCH, FEATURES * EMBED) @ weights["in"]) @ weights["out"]
    return jnp.mean((made - y) ** 2)


def step(params, state, batch):
    ids = batch["ids"].reshape(-1)
    rows = params["table"][ids]
    row_gradients, weight_gradients = jax.grad(loss, (0, 1))(rows, params["weights"], batch["y"])
    touched, place = jnp.unique(ids, return_inverse=True, size=ids.size, fill_value=ROWS)
    summed = jax.ops.segment_sum(row_gradients, place, ids.size)
    squares = state.at[touched].add(jnp.mean(summed**2, 1), mode="drop")
    scale = 0.1 / jnp.sqrt(squares.at[touched].get(mode="fill", fill_value=1.0) + 1e-8)
    table = params["table"].at[touched].add(-scale[:, None] * summed, mode="drop")
    weights = jax.tree.map(lambda w, g: w - 0.1 * g, params["weights"], weight_gradients)
    return {"table": table, "weights": weights}, squares


array = jax.ShapeDtypeStruct
params = {
    "table": array((ROWS, EMBED), jnp.float32),
    "weights": {
        "in": array((FEATURES * EMBED, HIDDEN), jnp.float32),
        "out": array((HIDDEN, 1), jnp.float32),
    },
}
state = array((ROWS,), jnp.float32)
batch = {"ids": array((BATCH, FEATURES), jnp.int32), "y": array((BATCH, 1), jnp.float32)}

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e9, 1e9, 1e10, 4e9, 0.0, links))
layouts = {"batch/*": "data=S(0)", "params/table": "data=S(0)", "params/weights/*": "data=B", "state": "data=S(0)"}
program = md.Program(step, (params, state, batch), layouts=layouts)

r = 4 * BATCH * FEATURES * EMBED  # bytes of the rows of a batch
i = 4 * BATCH * FEATURES  # bytes of its ids, and of the step sizes of its rows
m, o = 4 * FEATURES * EMBED * HIDDEN, 4 * HIDDEN  # bytes of the weights
sizes = {"r": r, "i": i, "m": m, "o": o, "k": 8}
published = {
    "reduce-scatter over data": "(r + m) * (k - 1) / k",
    "all-gather over data": "(r + i + m) * (k - 1) / k",
    "all-reduce over data": "2 * (o + i) * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
