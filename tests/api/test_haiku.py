"""Functions transformed by haiku: parameters, state and keys are trees of arrays whose names hold slashes."""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import optax
import pytest

import meshdsl as md
from meshdsl.errors import TraceError
from tests.api.framework_steps import BATCH, MESH, X, proved

ADAM = optax.adam(1e-2)


class State(NamedTuple):
    params: Any
    state: Any
    opt: Any
    key: jax.Array


def crossentropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def test_pairs_of_parameters_and_state():
    def forward(x, is_training):
        x = hk.Linear(16, with_bias=False)(x)  # a bias before a norm has a gradient of rounding alone
        x = hk.BatchNorm(True, True, 0.9)(x, is_training)
        x = hk.dropout(hk.next_rng_key(), 0.2, jax.nn.relu(x)) if is_training else jax.nn.relu(x)
        return hk.nets.MLP([16, 4], name="head")(x)

    net = hk.transform_with_state(forward)
    params, state = net.init(jax.random.PRNGKey(0), X, True)

    def step(s, batch):
        key, own = jax.random.split(s.key)

        def loss(params):
            logits, state = net.apply(params, s.state, own, batch["x"], True)
            return crossentropy(logits, batch), state

        (value, state), grads = jax.value_and_grad(loss, has_aux=True)(s.params)
        updates, opt = ADAM.update(grads, s.opt)
        return State(optax.apply_updates(s.params, updates), state, opt, key), value

    s = State(params, state, ADAM.init(params), jax.random.PRNGKey(1))
    proved(step, s, BATCH, steps=2)
    path = "s/params/'head/~/linear_0'/w"
    pinned = md.parallelize(step, MESH, {path: "data=B model=S(1)"})
    assert str(pinned.plan(s, BATCH).layout(path)) == "data=B model=S(1)"

    def evaluate(pair, batch):
        logits, _ = net.apply(*pair, None, batch["x"], False)
        return jnp.mean(jnp.argmax(logits, -1) == batch["y"])

    proved(evaluate, (params, state), BATCH)


def test_a_transformed_function_without_keys_and_with_layers_in_a_scan():
    net = hk.without_apply_rng(
        hk.transform(lambda x: hk.Linear(4)(hk.experimental.layer_stack(2)(lambda x: jax.nn.relu(hk.Linear(8)(x)))(x)))
    )
    params = net.init(jax.random.PRNGKey(0), X)

    def step(params, opt, batch):
        value, grads = jax.value_and_grad(lambda p: crossentropy(net.apply(p, batch["x"]), batch))(params)
        updates, opt = ADAM.update(grads, opt)
        return optax.apply_updates(params, updates), opt, value

    proved(step, params, ADAM.init(params), BATCH)


def test_precision_by_module():
    class Block(hk.Module):
        def __call__(self, x):
            return jax.nn.relu(hk.Linear(16)(x))

    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(Block()(x))))
    hk.mixed_precision.set_policy(Block, jmp.get_policy("params=float32,compute=bfloat16,output=float32"))
    params = net.init(jax.random.PRNGKey(0), X)

    def step(params, batch):
        value, grads = jax.value_and_grad(lambda p: crossentropy(net.apply(p, batch["x"]), batch))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    sharded = proved(step, params, BATCH, tolerance=0.02, steps=2)
    assert "bfloat16" in str(sharded.stages(params, BATCH).traced.graph)


def test_a_transformed_function_as_static_argument():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
    params = net.init(jax.random.PRNGKey(0), X)

    def step(params, net, batch):
        value, grads = jax.value_and_grad(lambda p: crossentropy(net.apply(p, batch["x"]), batch))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    sharded = md.parallelize(step, MESH, {"batch/**": "data=S(0)"}, static_argnames="net")
    sharded.check(params, net, BATCH)
    with pytest.raises(TraceError, match="static_argnames"):
        md.parallelize(step, MESH).plan(params, net, BATCH)


def test_a_sequence_of_keys_is_no_array():
    with pytest.raises(TraceError, match=r"key: .* is a haiku\.PRNGSequence, not an array"):
        md.parallelize(lambda key, x: x, MESH).plan(hk.PRNGSequence(0), X)
