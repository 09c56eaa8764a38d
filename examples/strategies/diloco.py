"""DiLoCo: replicas take local AdamW steps; their mean displacement is the outer gradient for Nesterov momentum.

Douillard et al., DiLoCo, 2023. Each replica has a local optimizer state that is never exchanged; parameters and the
outer momentum are replicated. One all-reduce after STEPS steps: 2 n (k - 1) / k.
"""

import jax
import jax.numpy as jnp
import optax

import meshdsl as md
from meshdsl.layouts.topology import Link

REPLICAS, STEPS, WIDTH, HIDDEN, BATCH = 8, 4, 32, 64, 128
INNER, OUTER = optax.adamw(1e-3), optax.sgd(0.7, momentum=0.9, nesterov=True)


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["up"]) @ params["down"] - batch["y"]) ** 2)


def alone(params, inner, batches):
    def local_step(state, batch):
        params, inner = state
        updates, inner = INNER.update(jax.grad(loss)(params, batch), inner, params)
        return (optax.apply_updates(params, updates), inner), None

    return jax.lax.scan(local_step, (params, inner), batches)[0]


def step(params, inner, outer, batch):
    replicas, inner = jax.vmap(alone, (None, 0, 1))(params, inner, batch)
    moved = jax.tree.map(lambda w, r: (w - r).mean(0), params, replicas)
    updates, outer = OUTER.update(moved, outer, params)
    return optax.apply_updates(params, updates), inner, outer


params = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
replicas = jax.tree.map(lambda w: jax.ShapeDtypeStruct((REPLICAS, *w.shape), w.dtype), params)
inner, outer = jax.eval_shape(jax.vmap(INNER.init), replicas), jax.eval_shape(OUTER.init, params)
batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((STEPS, REPLICAS, BATCH, WIDTH), jnp.float32))

links = (Link(latency=1e-3, bandwidth=1e7),)
mesh = md.Mesh(replica=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
layouts = {"params/*": "replica=B", "inner/**": "replica=S(0)", "outer/**": "replica=B", "batch/*": "replica=S(1)"}
program = md.Program(step, (params, inner, outer, batch), layouts=layouts)

n = 4 * 2 * WIDTH * HIDDEN  # bytes of parameters
sizes = {"n": n, "k": 8}
published = {"all-reduce over replica": "2 * n * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
