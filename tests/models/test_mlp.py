"""The perceptron in the DSL: one step is that of a plain JAX model; its strategies run as planned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.models import mlp

SIZES = "features=8 hidden=16 classes=4 layers=3"
KEY = jax.random.key(0)
BATCH = {"inputs": md.normal(KEY, "batch=16 features=8"), "labels": md.arange("batch=16") % 4}


def loss_by_hand(p, x, labels):
    x = jax.nn.relu(x @ p["up"]["kernel"] + p["up"]["bias"])
    for i in range(2):
        x = jax.nn.relu(x @ p["more"]["kernel"][i] + p["more"]["bias"][i])
    logits = x @ p["down"]["kernel"] + p["down"]["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_a_step_is_that_of_the_plain_model():
    program = mlp.program(SIZES, batch=16)
    params, state = program.init()
    after, _, value = jax.jit(program.step)(params, state, BATCH)
    before = jax.tree.map(lambda x: x.array, params, is_leaf=lambda x: isinstance(x, md.NamedArray))
    arrays = BATCH["inputs"].array, BATCH["labels"].array
    expected, gradient = jax.jit(jax.value_and_grad(loss_by_hand))(before, *arrays)
    updates, _ = optax.adam(1e-3).update(gradient, optax.adam(1e-3).init(before), before)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for x, y, g in zip(*map(jax.tree.leaves, (after, optax.apply_updates(before, updates), gradient))):
        moved = jnp.abs(g) > 1e-5  # Adam's first step is the sign of the gradient, which rounding turns near 0
        np.testing.assert_allclose(jnp.where(moved, x, 0), jnp.where(moved, y, 0), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", ["tensor", "fsdp"])
def test_a_strategy_runs_as_planned(strategy):
    program = mlp.program(SIZES, mlp.RULES[strategy], batch=16)
    sharded = md.parallelize(program.step, "data=2,model=2", rules=program.rules)
    args = (*program.init(), BATCH)
    assert sharded.check(*args) and sharded.verify(*args)
