"""DLRM and Wide and Deep in the DSL: one step of each is that of a plain JAX model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.models import dlrm
from tests.models.test_gpt import plain
from tests.models.values import quick, same_step, start

DRAW = np.random.default_rng(1)
FEATURES = (5, 3, 9)
DENSE = DRAW.normal(size=(8, 4)).astype(np.float32)
SPARSE = np.stack([DRAW.integers(0, n, 8, np.int32) for n in FEATURES], axis=1)
LABELS = (np.arange(8) % 2).astype(np.float32)
BATCH = {
    "dense": md.named(DENSE, "batch dense"),
    "sparse": md.named(SPARSE, "batch feature"),
    "labels": md.named(LABELS, "batch"),
}
CONFIGS = {
    "dlrm": dlrm.Config(FEATURES, dense=4, embed=8, bottom=(8, 8), top=(6,)),
    "wide and deep": dlrm.Config(FEATURES, dense=4, embed=8, top=(6, 4), wide=True),
}


def perceptron(p, x):
    *layers, last = [p["layers"][i] for i in sorted(p["layers"])]
    for layer in layers:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def looked_up(table):
    """A feature at a time, from its own part of the table."""
    parts = [table[:5], table[5:8], table[8:17]]
    return jnp.stack([part[SPARSE[:, i]] for i, part in enumerate(parts)], axis=1)


def dlrm_by_hand(p):
    numbers = jax.nn.relu(perceptron(p["bottom"], DENSE))
    vectors = [numbers, *jnp.unstack(looked_up(p["table"]), axis=1)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(4) for j in range(i)]
    return perceptron(p["top"], jnp.concatenate([numbers, jnp.stack(pairs, axis=1)], axis=1))[:, 0]


def wide_and_deep_by_hand(p):
    deep = perceptron(p["deep"], jnp.concatenate([DENSE, looked_up(p["table"]).reshape(8, -1)], axis=1))
    return deep[:, 0] + looked_up(p["weight"]).sum(1)


BY_HAND = {"dlrm": dlrm_by_hand, "wide and deep": wide_and_deep_by_hand}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_that_of_the_plain_model(name):
    program = dlrm.program(CONFIGS[name], dlrm.RULES["tensor"], batch=8, optimizer=optax.adam(1e-3))
    params, state = start(program)

    def loss(p):
        return optax.sigmoid_binary_cross_entropy(BY_HAND[name](p), LABELS).mean()

    made = quick(program.step)(params, state, BATCH)
    same_step(made, plain(params), loss, (), optax.adam(1e-3), plain)


@pytest.mark.parametrize("strategy", ["tensor", "everywhere"])
def test_what_is_sent_does_not_grow_with_the_table(strategy):
    def sent(rows):
        config = dlrm.Config((rows, rows), dense=4, embed=16, bottom=(64, 16), top=(64,))
        program = dlrm.program(config, dlrm.RULES[strategy], batch=512)
        return md.parallelize(program.step, "data=4,model=2", rules=program.rules).plan(*program.args).bytes

    assert sent(1 << 20) == sent(1 << 22) < 1 << 20  # the larger table has 512 MiB
