"""Steps to trace: name -> (step, arguments)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call


def key(i, *shape):
    return jnp.asarray(np.random.default_rng(i).normal(size=shape), jnp.float32)


def mlp(params, x):
    return jnp.mean((jax.nn.relu(x @ params["w1"] + params["b"]) @ params["w2"]) ** 2)


def sgd(params, x):
    loss, grads = jax.value_and_grad(mlp)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def norm(x, gain):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * gain


def block(x, p):
    y = norm(x, p["gain"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", y, p[name]) for name in ("wq", "wk", "wv"))
    scores = jnp.einsum("bshk,bthk->bhst", q, k) / jnp.sqrt(k.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    x = x + jnp.einsum("bhst,bthk,hkd->bsd", jax.nn.softmax(scores), v, p["wo"])
    return x + jax.nn.gelu(norm(x, p["gain"]) @ p["w1"]) @ p["w2"]


def gpt_params(layers, d=8, heads=2, vocab=16, seq=4, stacked=True):
    shapes = {"wq": (d, heads, 4), "wk": (d, heads, 4), "wv": (d, heads, 4), "wo": (heads, 4, d)}
    shapes |= {"w1": (d, 16), "w2": (16, d), "gain": (d,)}
    each = [{n: key(i, *s) for n, s in shapes.items()} for i in range(layers)]
    return {
        "embed": key(1, vocab, d),
        "position": key(2, seq, d),
        "layers": jax.tree.map(lambda *xs: jnp.stack(xs), *each) if stacked else each,
    }


def gpt_loss(params, batch, apply=block):
    x = params["embed"][batch["x"]] + params["position"]
    if isinstance(params["layers"], list):
        for p in params["layers"]:
            x = apply(x, p)
    else:
        x, _ = jax.lax.scan(lambda x, p: (apply(x, p), None), x, params["layers"])
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def gpt_step(params, state, batch, apply=block):
    loss, grads = jax.value_and_grad(gpt_loss)(params, batch, apply)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def gpt(layers=2, stacked=True):
    params = gpt_params(layers, stacked=stacked)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)
    return params, ADAMW.init(params), {"x": tokens % 16, "y": (tokens + 1) % 16}


def gpt_remat(params, state, batch):
    return gpt_step(params, state, batch, jax.checkpoint(block))


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))


@jax.custom_jvp
def doubled(x):
    return x * 2


doubled.defjvps(lambda t, out, x: 2 * t)


@jax.custom_vjp
def kept(x):
    return jnp.sin(x)


kept.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, g: (g * cosine,), optimize_remat=True)


@custom_vmap
def summed(x):
    return jnp.sum(x) * TABLE


@summed.def_vmap
def _(size, batched, x):
    return jnp.sum(x, 1)[:, None] * TABLE, True


@partial(jax.lax.composite, name="tests.scaled")
def scaled(x):
    return x * TABLE


def accumulate(params, xs):
    """Parameters carried unchanged beside the accumulator, as hand-written loops do."""

    def micro(carry, x):
        params, total, loss = carry
        value, grads = jax.value_and_grad(mlp)(params, x)
        return (params, jax.tree.map(lambda a, g: a + g / 3, total, grads), loss + value), None

    start = (params, jax.tree.map(jnp.zeros_like, params), 0.0)
    (_, grads, loss), _ = jax.lax.scan(micro, start, xs)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def counted(x):
    return jax.lax.fori_loop(2, 7, lambda i, c: c * 1.5 + i, x)


def halving(x):
    return jax.lax.while_loop(lambda c: c[1] > 0.1, lambda c: (c[0] + 1, c[1] / 2), (0, x))


def branching(i, x):
    y = jax.lax.switch(i, [jnp.sin, lambda x: x * TABLE, lambda x: x + TABLE[0]], x)
    return jax.lax.cond(x[0] > 0, lambda x, y: x - y, lambda x, y: y, x, y)


TABLE = np.linspace(0, 1, 4, dtype=np.float32)


def closing(x):
    """Closes over a table at the top, in a scan, in a while loop's condition and body."""
    y, _ = jax.lax.scan(lambda c, v: (c * TABLE + v, None), x * TABLE, TABLE[:3])
    return jax.lax.while_loop(lambda c: jnp.sum(c * TABLE) < 5, lambda c: c + TABLE + jnp.float32(0.25), jnp.abs(y))


def unused(x, w):
    """A scan with a carry, a const, a slice and an output that nobody reads."""

    def trip(c, s):
        a, dead = c
        return (a * s[0], dead + jnp.sum(w) + s[1]), (a, dead)

    (a, _), (ys, _) = jax.lax.scan(trip, (x, x), (jnp.arange(3.0), jnp.ones(3)))
    return a, ys


PARAMS = {"w1": key(0, 4, 8), "b": key(1, 8), "w2": key(2, 8, 4)}
STEPS = {
    "sgd": (sgd, (PARAMS, key(3, 6, 4))),
    "gpt scan": (gpt_step, gpt()),
    "gpt list": (gpt_step, gpt(stacked=False)),
    "gpt remat": (gpt_remat, gpt()),
    "accumulate": (accumulate, (PARAMS, key(3, 3, 6, 4))),
    "custom vjp": (jax.grad(lambda x: jnp.sum(clipped(x) ** 2)), (key(0, 5),)),
    "custom jvp": (jax.value_and_grad(lambda x: jnp.sum(doubled(x) ** 3)), (key(0, 5),)),
    "remat of custom vjp": (jax.grad(lambda x: jnp.sum(kept(x) ** 2)), (key(0, 5),)),
    "custom vmap": (lambda x: summed(x) + x, (key(0, 4),)),
    "composite": (scaled, (key(0, 4),)),
    "linear call": (
        lambda x, y: linear_call(lambda r, x: r * x, lambda r, g: r * g, y, x),
        (key(0, 4), key(1, 4)),
    ),
    "solve": (jax.grad(lambda a, b: jnp.sum(jnp.linalg.solve(a, b) ** 2)), (key(0, 4, 4) + 4 * jnp.eye(4), key(1, 4))),
    "counted": (counted, (jnp.float32(1),)),
    "halving": (halving, (jnp.float32(3),)),
    "switch 0": (branching, (jnp.int32(0), key(0, 4))),
    "switch 1": (branching, (jnp.int32(1), key(0, 4))),
    "switch 2": (branching, (jnp.int32(2), key(1, 4))),
    "closing": (closing, (key(0, 4),)),
    "unused": (unused, (jnp.float32(2), key(0, 4))),
    "barrier": (lambda x, y: jax.lax.optimization_barrier((x, 2.0, y)), (key(0, 3), key(1, 2))),
    "random": (lambda k: jax.random.normal(jax.random.split(k)[0], (4,)), (jax.random.PRNGKey(0),)),
    "no operations": (lambda x: (x, 1, x), (key(0, 2),)),
    "grad of cond": (jax.grad(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x)), (jnp.float32(1),)),
    "platform": (lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), (key(0, 3),)),
    "vmap scan": (jax.vmap(lambda x: jax.lax.scan(lambda c, s: (c + s, c), x[0], x)), (key(0, 3, 4),)),
}
