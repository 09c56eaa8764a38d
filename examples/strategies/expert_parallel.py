"""Expert parallelism: tokens are sent to their experts' devices and back, two all-to-alls per layer and direction.

Lepikhin et al., GShard, 2020, section 3.2; Fedus et al., Switch Transformers, 2021. Replicated parameters (here the
layer below and the router) are data parallel.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

GROUPS, TOKENS, EMBED, EXPERTS, HIDDEN, SLOTS = 8, 32, 32, 8, 128, 8


def mixture(params, x):
    """Routes each token to its best expert, up to the expert's capacity; x is [group token embed]."""
    chance = jax.nn.softmax(x @ params["router"])
    chosen = jax.nn.one_hot(jnp.argmax(chance, -1), EXPERTS)
    place = ((jnp.cumsum(chosen, axis=1) - 1) * chosen).sum(-1)
    seat = chosen[..., None] * jax.nn.one_hot(place.astype(jnp.int32), SLOTS)[:, :, None]
    sent = jnp.einsum("gte,gtxc->xgce", x, seat)
    made = jnp.einsum("xgcf,xfe->xgce", jnp.tanh(jnp.einsum("xgce,xef->xgcf", sent, params["up"])), params["down"])
    return jnp.einsum("xgce,gtxc,gtx->gte", made, seat, chance)


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
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((GROUPS, TOKENS, EMBED), jnp.float32))
whole = {"params/below": "data=B", "params/router": "data=B"}

links = (Link(latency=1e-4, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (params, batch), layouts={"**": "data=S(0)", **whole})

s = 4 * EXPERTS * GROUPS * SLOTS * EMBED  # bytes of all slots of all experts
n = 4 * (EMBED**2 + EMBED * EXPERTS)  # bytes of the data-parallel parameters
sizes = {"s": s, "n": n, "k": 8}
published = {"all-to-all over data": "2 * 2 * s / k * (k - 1) / k", "all-reduce over data": "2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
