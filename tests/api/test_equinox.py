"""Modules of equinox as arguments and results: what is no array in them is static and comes back unchanged."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.errors import TraceError
from meshdsl.trace.static_leaves import Static, hide, reveal
from tests.api.framework_steps import BATCH, MESH, X, proved


class Net(eqx.Module):
    """Functions, text, numbers and objects beside the arrays; no field is declared static."""

    layers: list
    activation: Callable
    pooling: str
    scale: float
    deep: bool
    nothing: None
    tag: object

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(8, 16, key=first), eqx.nn.LayerNorm(16), eqx.nn.Linear(16, 4, key=second)]
        self.activation, self.pooling, self.scale, self.deep, self.nothing = jax.nn.gelu, "mean", 0.5, True, None
        self.tag = object()

    def __call__(self, x):
        x = self.layers[1](self.activation(self.layers[0](x)))
        if self.deep:
            x = x + 1
        return self.layers[2](x) * (self.scale if self.pooling == "mean" else 1.0)


def mlp():
    return eqx.nn.MLP(8, 4, 16, 1, activation=jnp.tanh, key=jax.random.key(0))


def loss(model, batch):
    logits = jax.vmap(model)(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


ADAM = optax.adam(1e-2)


def train(model, opt, batch):
    value, grads = eqx.filter_value_and_grad(loss)(model, batch)
    updates, opt = ADAM.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt, value


def with_state(model):
    return model, ADAM.init(eqx.filter(model, eqx.is_inexact_array))


@pytest.mark.parametrize("make", [mlp, lambda: Net(jax.random.key(1))], ids=["MLP", "own"])
def test_a_module_is_argument_and_result(make):
    model, opt = with_state(make())
    if make is mlp:
        sharded = proved(train, model, opt, BATCH, plain=eqx.filter_jit, steps=2)
    else:  # the quick compiler merges two of its gathers, of equal values, so that it is not verified
        sharded = md.parallelize(train, MESH, {"batch/**": "data=S(0)"})
        sharded.check(model, opt, BATCH)
    trained, *_ = sharded(model, opt, BATCH)
    assert type(trained) is type(model)
    assert jax.tree.structure(trained) == jax.tree.structure(model)
    before, after = (eqx.partition(m, eqx.is_array)[1] for m in (model, trained))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert a is b


def test_results_follow_the_arguments_that_they_replace():
    model, opt = with_state(Net(jax.random.key(1)))
    plan = md.parallelize(train, MESH, {"model/layers/0/weight": "data=B model=S(0)"}).plan(model, opt, BATCH)
    assert str(plan.layout("model/layers/0/weight")) == "data=B model=S(0)"
    assert {x.path: x.follows for x in plan.outputs}["0/layers/0/weight"] == "model/layers/0/weight"
    assert not any("activation" in x.path or "scale" in x.path for x in plan.inputs)


def test_shapes_of_a_module_can_be_planned():
    shapes = eqx.filter_eval_shape(mlp)
    state = eqx.filter_eval_shape(lambda: with_state(mlp())[1])
    assert md.parallelize(train, MESH).plan(shapes, state, BATCH).seconds > 0


class Everything(NamedTuple):
    step: Any
    models: dict
    opt: Any


def test_modules_deep_in_other_trees():
    model, opt = with_state(mlp())
    state = Everything(jnp.int32(0), {"net": model, "target": [model]}, opt)

    def step(state, batch):
        model, opt, value = train(state.models["net"], state.opt, batch)
        target = eqx.combine(
            optax.incremental_update(
                eqx.filter(model, eqx.is_array), eqx.filter(state.models["target"][0], eqx.is_array), 0.1
            ),
            model,
        )
        return Everything(state.step + 1, {"net": model, "target": [target]}, opt), value

    sharded = proved(step, state, BATCH, plain=eqx.filter_jit)
    assert sharded(state, BATCH)[0].models["target"][0].activation is jnp.tanh


def test_a_partitioned_module():
    arrays, static = eqx.partition(mlp(), eqx.is_array)
    opt = ADAM.init(arrays)

    def step(arrays, opt, static, batch):
        value, grads = jax.value_and_grad(lambda a: loss(eqx.combine(a, static), batch))(arrays)
        updates, opt = ADAM.update(grads, opt, arrays)
        return optax.apply_updates(arrays, updates), opt, value

    sharded = md.parallelize(step, MESH, {"batch/**": "data=S(0)"})
    sharded.check(arrays, opt, static, BATCH)
    sharded.verify(arrays, opt, static, BATCH)
    as_keyword = md.parallelize(step, MESH, {"batch/**": "data=S(0)"})
    as_keyword.check(arrays, opt, static=static, batch=BATCH)


def test_another_activation_is_another_program(caplog):
    sharded = md.parallelize(lambda model, x: jax.vmap(model)(x), MESH, {"x": "data=S(0)"})
    tanh = mlp()
    relu = eqx.tree_at(lambda m: m.activation, tanh, jax.nn.relu)
    for model in (tanh, relu, tanh):
        np.testing.assert_allclose(sharded(model, X), jax.vmap(model)(X), rtol=1e-5, atol=1e-5)
    assert [r.getMessage() for r in caplog.records] == [
        "planning step again between the same layouts: what the tree of its arguments holds beside arrays changed"
    ]


def test_batch_norm_state_and_dropout():
    class Model(eqx.Module):
        first: eqx.nn.Linear
        norm: eqx.nn.BatchNorm
        drop: eqx.nn.Dropout
        second: eqx.nn.Linear

        def __init__(self, key):
            self.first, self.second = eqx.nn.Linear(8, 16, use_bias=False, key=key), eqx.nn.Linear(16, 4, key=key)
            self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
            self.drop = eqx.nn.Dropout(0.3)

        def __call__(self, x, state, key):
            x, state = self.norm(self.first(x), state)
            return self.second(self.drop(jax.nn.relu(x), key=key)), state

    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    opt = ADAM.init(eqx.filter(model, eqx.is_inexact_array))

    def objective(model, state, key, batch):
        keys = jax.random.split(key, len(batch["x"]))
        logits, state = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))(
            batch["x"], state, keys
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), state

    def step(model, state, opt, key, batch):
        key, own = jax.random.split(key)
        (value, state), grads = eqx.filter_value_and_grad(objective, has_aux=True)(model, state, own, batch)
        updates, opt = ADAM.update(grads, opt, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, opt, key, value

    proved(step, model, state, opt, jax.random.key(3), BATCH, plain=eqx.filter_jit)

    def evaluate(model, state, batch):
        model = eqx.nn.inference_mode(model)
        logits, _ = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))(
            batch["x"], state, jax.random.key(0)
        )
        return jnp.mean(jnp.argmax(logits, -1) == batch["y"])

    proved(evaluate, model, state, BATCH, plain=eqx.filter_jit)


def test_inference_mode_is_static():
    model = eqx.nn.Sequential([eqx.nn.Linear(8, 4, key=jax.random.key(0)), eqx.nn.Dropout(0.5)])
    sharded = md.parallelize(lambda model, x: jax.vmap(model)(x), MESH, {"x": "data=S(0)"})
    quiet = eqx.nn.inference_mode(model)
    np.testing.assert_allclose(sharded(quiet, X), jax.vmap(quiet)(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="key"):
        sharded(model, X)


def test_layers_stacked_and_scanned():
    layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 8, key=key))(jax.random.split(jax.random.key(0), 3))
    opt = ADAM.init(eqx.filter(layers, eqx.is_inexact_array))

    def step(layers, opt, batch):
        def objective(layers):
            arrays, static = eqx.partition(layers, eqx.is_array)
            body = lambda x, own: (x + jax.vmap(eqx.combine(own, static))(jnp.tanh(x)), None)  # noqa: E731
            return jnp.mean(jax.lax.scan(body, batch["x"], arrays)[0] ** 2)

        value, grads = eqx.filter_value_and_grad(objective)(layers)
        updates, opt = ADAM.update(grads, opt, eqx.filter(layers, eqx.is_inexact_array))
        return eqx.apply_updates(layers, updates), opt, value

    proved(step, layers, opt, {"x": X}, plain=eqx.filter_jit)


def test_donated_modules():
    model, opt = with_state(mlp())
    sharded = md.parallelize(train, MESH, {"batch/**": "data=S(0)"}, donate_argnums=(0, 1))
    sharded.check(model, opt, BATCH)
    want = eqx.filter_jit(train)(model, opt, BATCH)
    first = model.layers[0].weight
    got = sharded(model, opt, BATCH)
    np.testing.assert_allclose(got[0].layers[0].weight, want[0].layers[0].weight, rtol=1e-5, atol=1e-6)
    assert first.is_deleted()


def test_a_module_made_where_it_is_planned():
    sharded = md.parallelize(train, MESH, {"batch/**": "data=S(0)", "model/layers/0/weight": "data=B model=S(0)"})
    opt = with_state(mlp())[1]
    model = sharded.init(mlp, opt, BATCH)
    assert model.activation is jnp.tanh
    assert model.layers[0].weight.sharding.spec == jax.sharding.PartitionSpec("model", None)
    both = sharded.init(lambda: with_state(mlp()), BATCH)
    assert jax.tree.structure(sharded(*both, BATCH)[0]) == jax.tree.structure(mlp())


def test_inside_jit():
    model, opt = with_state(mlp())
    sharded = md.parallelize(train, MESH, {"batch/**": "data=S(0)"})

    @eqx.filter_jit
    def twice(model, opt, batch):
        model, opt, _ = sharded(model, opt, batch)
        return sharded(model, opt, batch)

    want = train(*train(model, opt, BATCH)[:2], BATCH)
    np.testing.assert_allclose(twice(model, opt, BATCH)[2], want[2], rtol=1e-5)


def test_what_is_no_array_outside_of_a_module():
    """A text in a batch is a fault of the data, whatever else is in the call."""
    with pytest.raises(TraceError, match=r"batch/name: 'text' is a str, not an array"):
        md.parallelize(lambda model, batch: batch["x"], MESH).plan(mlp(), {"x": X, "name": "text"})


def test_steps_that_equinox_has_jitted_already():
    model, opt = with_state(mlp())
    sharded = md.parallelize(eqx.filter_jit(train), MESH, {"batch/**": "data=S(0)"})
    assert sharded.check(model, opt, BATCH).ok
    sharded.verify(model, opt, BATCH)


@eqx.internal.noinline
def apart(x, w):
    return jnp.tanh(x @ w)


@eqx.filter_custom_vjp
def tripled(x, w):
    return apart(x, w)


@tripled.def_fwd
def tripled_forward(perturbed, x, w):
    return apart(x, w), None


@tripled.def_bwd
def tripled_backward(residuals, g, perturbed, x, w):
    return 3 * g @ w.T


def looped(kind, x, w):
    def body(state):
        return state[0] + 1, apart(state[1], w)

    return eqx.internal.while_loop(lambda state: state[0] < 3, body, (0, x), max_steps=4, kind=kind)[1]


def scanned_apart(x, w):
    return jax.lax.scan(lambda x, _: (jax.vmap(lambda row: apart(row[None], w)[0])(x), None), x, None, 2)[0]


CALLS = {
    "noinline": scanned_apart,
    "checkpointed while": partial(looped, "checkpointed"),
    "bounded while": partial(looped, "bounded"),
    "checkpoint": lambda x, w: eqx.filter_checkpoint(apart)(x, w),
    "closure_convert": lambda x, w: eqx.filter_closure_convert(lambda x: apart(x, w), x)(x),
    "custom_vjp": tripled,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_equinox_are_read_into(name):
    wrt = 0 if name == "custom_vjp" else 1

    def step(x, w):
        return jax.value_and_grad(lambda x, w: jnp.mean(CALLS[name](x, w) ** 2), argnums=wrt)(x, w)

    sharded = proved(step, X, jnp.full((8, 8), 0.1), layouts={"x": "data=S(0)"})
    assert sharded.plan(X, jnp.ones((8, 8))).notes == ()


def test_a_function_that_is_found_at_run_time_is_named():
    def step(f, x):
        return f(x @ jnp.ones((8, 8)))

    plan = md.parallelize(step, MESH, {"x": "data=S(0)"}).plan(eqx.internal.noinline(jnp.tanh), X)
    assert plan.notes[0].startswith("replicated: no rule for noinline at test_equinox.py:")


def test_static_values_are_equal_by_value_or_identity():
    held = {1}
    for value in (jnp.tanh, "text", 0.5, True, held):
        assert Static(value) == Static(value) and hash(Static(value)) == hash(Static(value))
    assert Static(1) != Static(True) != Static(1.0) and Static({1}) != Static({1}) and Static("a") != "a"
    tree = {"module": mlp(), "other": [X, None]}
    assert reveal(hide(tree))["module"].activation is tree["module"].activation
    assert hide(hide(tree)) is not tree and jax.tree.structure(hide(hide(tree))) == jax.tree.structure(hide(tree))
    assert hide(tree["other"]) is tree["other"]
