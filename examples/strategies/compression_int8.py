"""Gradients in int8 with error feedback in both directions: rounding errors are added to the next gradient.

Dettmers, 8-Bit Approximations for Parallelism, 2016; error feedback both ways as in Tang et al., 1-bit Adam, 2021.
Each row has a scale in float32. Shards are exchanged, averaged, rounded again and gathered: a quarter of the bytes of
data parallelism, plus the scales. Replicas are a dim of the gradients; the constraint in ``send`` shards their sum.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

REPLICAS, WIDTH, HIDDEN, BATCH = 8, 32, 64, 128


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def rounded(x):
    """[... a b] as int8, and the scale of each row [... a 1]."""
    scale = jnp.abs(x).max(-1, keepdims=True) / 127 + 1e-30
    return jnp.round(x / scale).astype(jnp.int8), scale


def exact(small, scale):
    return small.astype(jnp.float32) * scale


def send(gradient, lost):
    """Returns the mean over replicas, gathered, and the rounding errors of each replica and of the mean."""
    mine = gradient + lost["replica"]
    small, scale = rounded(mine)
    parts = exact(md.constrain(small, "data=S(1)"), md.constrain(scale, "data=S(1)"))
    mean = parts.mean(0) + lost["mean"]
    again = rounded(mean)
    back = exact(*(md.constrain(x, "data=B") for x in again))
    return back, {"replica": mine - exact(small, scale), "mean": mean - exact(*again)}


def step(params, lost, batch):
    gradients = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    sent = {name: send(gradients[name], lost[name]) for name in params}
    return {name: params[name] - 0.1 * sent[name][0] for name in params}, {name: sent[name][1] for name in params}


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((REPLICAS, BATCH, WIDTH), jnp.float32))
lost = {name: {"replica": jax.ShapeDtypeStruct((REPLICAS, *w.shape), w.dtype), "mean": w} for name, w in params.items()}

links = (Link(latency=1e-6, bandwidth=1e7),)
mesh = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(
    step,
    (params, lost, batch),
    layouts={"batch/*": "data=S(0)", "lost/*/replica": "data=S(0)", "lost/*/mean": "data=S(0)", "params/*": "data=B"},
)

n, scales = 4 * 2 * WIDTH * HIDDEN, 4 * (WIDTH + HIDDEN)  # bytes of parameters, and of their rows' scales
sizes = {"n": n, "scales": scales, "k": 8}
half = "(n / 4 + scales) * (k - 1) / k"
published = {"all-to-all over data": half, "all-gather over data": half}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
