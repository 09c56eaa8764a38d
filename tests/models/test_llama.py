"""Llama in the DSL: one step is that of a plain JAX model."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import llama
from tests.models.test_gpt import plain
from tests.models.values import quick, same_step, start

CONFIG = llama.Config(layers=2, embed=16, hidden=24, heads=4, groups=2, head=8, seq=8, vocab=64, remat="dots")
TOKENS = np.random.default_rng(1).integers(0, 64, (2, 8, 8), np.int32)
BATCH = {name: md.named(part, "batch seq") for name, part in zip(("inputs", "targets"), TOKENS)}


def norm(x, p):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def turned(x, theta):
    """Pairs of the two halves as complex numbers, multiplied by those of the positions; x is [b s ... h]."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    turn = np.exp(1j * angle).reshape(x.shape[1], *[1] * (x.ndim - 3), half)
    made = jax.lax.complex(x[..., :half], x[..., half:]) * turn.astype(np.complex64)
    return jnp.concatenate([made.real, made.imag], axis=-1)


def attention(x, p, theta):
    heads, queries = p["query"]["kernel"].shape[1:3]
    q, k, v = (jnp.einsum("bse,e...->bs...", x, p[name]["kernel"]) for name in ("query", "key", "value"))
    q = turned(q.reshape(*q.shape[:2], heads * queries, -1), theta)
    k, v = (jnp.repeat(part, queries, axis=2) for part in (turned(k, theta), v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf))
    made = jnp.einsum("bhst,bthd->bshd", weights, v)
    return made.reshape(*x.shape[:2], -1) @ p["out"]["kernel"].reshape(-1, x.shape[-1])


def perceptron(x, p):
    return (jax.nn.silu(x @ p["gate"]["kernel"]) * (x @ p["up"]["kernel"])) @ p["down"]["kernel"]


def loss_by_hand(p, inputs, targets):
    x = p["embed"][inputs]
    for i in range(CONFIG.layers):
        layer = jax.tree.map(lambda w: w[i], p["blocks"]["block"])
        x = x + attention(norm(x, layer["norm1"]), layer["attention"], CONFIG.theta)
        x = x + perceptron(norm(x, layer["norm2"]), layer["mlp"])
    logits = norm(x, p["norm"]) @ p["head"]["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def test_a_step_is_that_of_the_plain_model():
    program = llama.program(CONFIG, llama.RULES["tensor"], batch=8)
    params, state = start(program)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
    arrays = (BATCH["inputs"].array, BATCH["targets"].array)
    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), loss_by_hand, arrays, optimizer, plain)


def test_named_values_are_kept_not_computed_again():
    def products(keep):
        program = llama.program(replace(CONFIG, remat="all", keep=keep), "", batch=2)
        return str(jax.make_jaxpr(program.step)(*program.args)).count("dot_general")

    projections = "query_proj key_proj value_proj"
    full, some, most = map(products, ("", projections, f"{projections} out_proj mlpwi_0 mlpwi_1"))
    assert full - some == 3 and some - most == 3
