"""T5 in the DSL: distances fall into the paper's buckets, and one step is that of a plain JAX model."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.models import t5
from tests.models.test_gpt import plain
from tests.models.test_llama import norm
from tests.models.values import quick, same_step, start

CONFIG = t5.Config(layers=2, embed=16, hidden=32, heads=4, head=8, vocab=64, remat="dots")
WORDS = np.random.default_rng(1).integers(0, 64, (8, 32), np.int32)
ARRAYS = {"source": WORDS[:, :16], "inputs": WORDS[:, 16:24], "targets": WORDS[:, 24:]}
BATCH = {name: md.named(x, "batch source" if name == "source" else "batch seq") for name, x in ARRAYS.items()}


def bucket(distance, both_ways):
    """One distance, as in the paper: exact up to a quarter of the buckets, or half of them, then by logarithm."""
    count = 16 if both_ways else 32
    first = count if both_ways and distance > 0 else 0
    far = abs(distance) if both_ways else max(-distance, 0)
    if far < count // 2:
        return first + far
    wide = math.floor(count // 2 * (1 + math.log(far / (count // 2)) / math.log(128 / (count // 2))) + 1e-6)
    return first + min(wide, count - 1)


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets(both_ways):
    distances = np.arange(-200, 201)
    made = t5.distance_bucket(md.named(distances, "seq"), both_ways).array
    assert made.tolist() == [bucket(int(d), both_ways) for d in distances]
    assert set(made.tolist()) == set(range(32)) - ({16} if both_ways else set())


def bias(table, n, both_ways):
    at = np.array([[bucket(key - query, both_ways) for key in range(n)] for query in range(n)])
    made = table[:, at]
    return made if both_ways else jnp.where(np.tril(np.ones((n, n), bool)), made, -jnp.inf)


def attention(x, seen, p, bias):
    query = norm(x, p["norm"])
    seen = query if seen is None else seen
    q = jnp.einsum("bse,ehd->bshd", query, p["query"]["kernel"])
    k, v = (jnp.einsum("bte,ehd->bthd", seen, p[name]["kernel"]) for name in ("key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) + bias)
    return x + jnp.einsum("bhst,bthd,hde->bse", weights, v, p["out"]["kernel"])


def perceptron(x, p):
    return x + jax.nn.relu(norm(x, p["norm"]) @ p["up"]["kernel"]) @ p["down"]["kernel"]


def loss_by_hand(p, source, inputs, targets):
    layers = {
        name: [jax.tree.map(lambda w, i=i: w[i], p[name]["block"]) for i in range(2)] for name in ("encoder", "decoder")
    }
    x = p["embed"][source]
    for layer in layers["encoder"]:
        x = perceptron(attention(x, None, layer["itself"], bias(p["around"]["table"], 16, True)), layer["mlp"])
    seen, x = norm(x, p["norm1"]), p["embed"][inputs]
    for layer in layers["decoder"]:
        x = attention(x, None, layer["itself"], bias(p["before"]["table"], 8, False))
        x = perceptron(attention(x, seen, layer["other"], 0.0), layer["mlp"])
    logits = norm(x, p["norm2"]) / 4 @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def test_a_step_is_that_of_the_plain_model():
    program = t5.program(CONFIG, t5.RULES["tensor"], batch=8, source=16, seq=8)
    params, state = start(program)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.95, weight_decay=0.1))
    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), loss_by_hand, ARRAYS.values(), optimizer, plain)
