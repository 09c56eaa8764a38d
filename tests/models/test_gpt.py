"""GPT in the DSL: one step is that of a plain JAX model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import gpt
from tests.models.values import quick, same_step, start

CONFIG = gpt.Config(layers=2, embed=16, heads=4, seq=8, vocab=64)
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 8, 8), np.int32)
BATCH = {name: md.named(part, "batch seq") for name, part in zip(("inputs", "targets"), TOKENS)}


def norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def block_by_hand(x, p, causal=True):
    def linear(name, x, spec):
        return jnp.einsum(spec, x, p[name]["kernel"]) + p[name]["bias"]

    y = norm(x, p["norm1"])
    q, k, v = (linear(name, y, "bse,ehd->bshd") for name in ("query", "key", "value"))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / 2.0
    seen = jnp.tril(jnp.ones(scores.shape[2:], bool)) | (not causal)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    x = x + linear("out", jnp.einsum("bhst,bthd->bshd", weights, v), "bshd,hde->bse")
    return x + linear("down", jax.nn.gelu(linear("up", norm(x, p["norm2"]), "bse,eh->bsh")), "bsh,he->bse")


def loss_by_hand(p, inputs, targets):
    x = p["embed"][inputs] + p["position"]
    for i in range(2):
        x = block_by_hand(x, jax.tree.map(lambda w: w[i], p["blocks"]["block"]))
    logits = norm(x, p["norm"]) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def plain(tree):
    """A state of variables as a dict of arrays."""
    if hasattr(tree, "items"):
        return {key: plain(value) for key, value in tree.items()}
    return tree.get_value().array


def test_a_step_is_that_of_the_plain_model():
    program = gpt.program(CONFIG, gpt.RULES["tensor"], batch=8)
    params, state = start(program)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(6e-4, b2=0.95, weight_decay=0.1))
    arrays = (BATCH["inputs"].array, BATCH["targets"].array)
    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), loss_by_hand, arrays, optimizer, plain)
