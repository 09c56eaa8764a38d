"""The perceptron in the DSL: one step is that of a plain JAX model."""

import jax
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import mlp
from tests.models.values import quick, same_step, start

SIZES = "features=8 hidden=16 classes=4 layers=3"
INPUTS = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
BATCH = {"inputs": md.named(INPUTS, "batch features"), "labels": md.named(np.arange(16, dtype=np.int32) % 4, "batch")}


def loss_by_hand(p, x, labels):
    x = jax.nn.relu(x @ p["up"]["kernel"] + p["up"]["bias"])
    for i in range(2):
        x = jax.nn.relu(x @ p["more"]["kernel"][i] + p["more"]["bias"][i])
    logits = x @ p["down"]["kernel"] + p["down"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def plain(tree):
    return jax.tree.map(lambda x: x.array, tree, is_leaf=lambda x: isinstance(x, md.NamedArray))


def test_a_step_is_that_of_the_plain_model():
    program = mlp.program(SIZES, batch=16)
    params, state = start(program)
    arrays = BATCH["inputs"].array, BATCH["labels"].array
    same_step(
        quick(program.step)(params, state, BATCH),
        plain(params),
        loss_by_hand,
        arrays,
        optax.adam(1e-3),
        plain,
    )
