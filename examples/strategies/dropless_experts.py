"""Experts without drops: routed tokens go to their experts' devices and back, in as many turns as routing needs.

Gale et al., MegaBlocks, 2022, section 5; DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.2: all-to-alls of
the routed tokens, there and back, forward and backward. Slots are exactly those of balanced routing here, so that
further turns, which the plan lists at no cost, run whenever it is not. A token's weight travels with it, and its
gradient back. The numbers of tokens per device and expert are gathered, from which each device knows what it receives,
and in how many turns.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link
from meshdsl.models.dropless import ExpertWeights, dropless

TOKENS, EMBED, EXPERTS, CHOICES, HIDDEN = 256, 32, 16, 2, 64


def mixture(params, x):
    chances, experts = jax.lax.top_k(jax.nn.softmax(x @ params["router"]), CHOICES)
    return dropless(x, experts, chances, ExpertWeights(params["up"], params["down"]), ranks=8, capacity=1.0)


def loss(params, batch):
    return jnp.mean((mixture(params, jnp.tanh(batch["x"] @ params["below"])) - batch["y"]) ** 2)


def step(params, batch):
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, batch))


params = {
    "below": jax.ShapeDtypeStruct((EMBED, EMBED), jnp.float32),
    "router": jax.ShapeDtypeStruct((EMBED, EXPERTS), jnp.float32),
    "up": jax.ShapeDtypeStruct((EXPERTS, EMBED, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((EXPERTS, HIDDEN, EMBED), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((TOKENS, EMBED), jnp.float32))
whole = {"params/below": "data=B", "params/router": "data=B"}

links = (Link(latency=1e-4, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"**": "data=S(0)", **whole})

t = 4 * TOKENS * CHOICES * EMBED  # bytes of all routed tokens
w = 4 * TOKENS * CHOICES  # bytes of their weights
c = 4 * 8 * EXPERTS  # bytes of the numbers of tokens per device and expert
n = 4 * (EMBED**2 + EMBED * EXPERTS)  # bytes of the data-parallel parameters
sizes = {"t": t, "w": w, "c": c, "n": n, "k": 8}
published = {
    "all-to-all over data": "2 * (2 * t + w) / k * (k - 1) / k",
    "all-gather over data": "c * (k - 1) / k",
    "all-reduce over data": "2 * n * (k - 1) / k",
}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
