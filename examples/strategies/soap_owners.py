"""SOAP with owners: every device runs Adam in the eigenbases of some of the packed matrices, and refreshes them.

Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024; Shi et al., A Distributed Data-Parallel PyTorch
Implementation of the Distributed Shampoo Optimizer, 2023, whose devices own matrices and all-gather the updates;
Rajbhandari et al., ZeRO, SC 2020, section 7, for the bytes with gradients reduce-scattered to their owners.
"""

import jax
import jax.numpy as jnp
import optax

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.matrix_optimizers import soap

LAYERS, EMBED, HIDDEN, BATCH = 12, 32, 64, 1024  # 24 matrices of one shape, up to transposition, on 8 devices

optimizer = soap(1e-2, lambda path, shape: (1, 1), multiple=8)


def block(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss(params, batch):
    return jnp.mean((jax.lax.scan(block, batch["x"], params)[0] - batch["y"]) ** 2)


def step(params, state, batch):
    updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
    return optax.apply_updates(params, updates), state


params = {
    "up": jax.ShapeDtypeStruct((LAYERS, EMBED, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((LAYERS, HIDDEN, EMBED), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32))

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(
    step,
    (params, jax.eval_shape(optimizer.init, params), batch),
    layouts={"batch/*": "data=S(0)", "params/*": "data=B"},
)

n = 4 * LAYERS * 2 * EMBED * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"reduce-scatter over data": "n * (k - 1) / k", "all-gather over data": "n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
