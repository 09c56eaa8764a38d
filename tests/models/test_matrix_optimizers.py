"""Optimizers of whole matrices on packed parameters: the updates of unpacked ones, at the bytes of ZeRO-1."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.models.matrix_optimizers import muon, packed
from tests.models.values import filled, quick
from tests.trials import fast_options

PARAMS = {
    "up": jax.ShapeDtypeStruct((3, 4, 12), jnp.float32),
    "down": jax.ShapeDtypeStruct((3, 12, 4), jnp.float32),
    "out": jax.ShapeDtypeStruct((3, 2, 2, 4), jnp.float32),  # heads and elements of one head are rows
    "scale": jax.ShapeDtypeStruct((5,), jnp.float32),
}


def view(path, shape):
    return None if path == "scale" else (1, 2 if path == "out" else 1)


def test_packed_muon_is_muon_on_every_matrix():
    rows = {"up": 1, "down": 1, "out": (1, 2)}
    whole = {name: contrib.MuonDimensionNumbers(rows[name], -1) if name in rows else None for name in PARAMS}
    options = {"ns_steps": 3, "beta": 0.9, "nesterov": False}
    decays = {"weight_decay": 0.5, "adam_weight_decay": 0.5}
    apart = contrib.muon(0.1, muon_weight_dimension_numbers=whole, consistent_rms=0.2, adam_b2=0.9, **options, **decays)

    both = muon(0.1, view, 8, weight_decay=0.5, adam={"b2": 0.9, "nesterov": False}, **options), apart
    params = filled(PARAMS)
    ours, theirs = quick(lambda g: [x.update(g, x.init(params), params)[0] for x in both])(filled(PARAMS))
    for name in PARAMS:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    shapes = jax.eval_shape(both[0].init, PARAMS)
    stacks = {x.shape for x in jax.tree.leaves(shapes) if len(x.shape) == 3}
    assert stacks == {(8, 4, 12), (8, 4, 4)}  # 6 and 3 matrices


def test_matrices_of_another_dtype_have_their_own_stack():
    params = PARAMS | {"down": jax.ShapeDtypeStruct((3, 12, 4), jnp.bfloat16)}
    optimizer = muon(0.1, view, 8, weight_decay=0.1)
    state = jax.eval_shape(optimizer.init, params)
    updates, after = jax.eval_shape(optimizer.update, params, state, params)
    assert updates == params
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    momentum = state.inner_states["muon"].inner_state[0][0].mu
    assert sorted(momentum) == ["4x12_bfloat16", "4x12_float32", "4x4_float32"]
    mixed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)  # gradients
    assert jax.eval_shape(optimizer.update, mixed, state, params)[0] == mixed


def test_61_layers_on_16_owners_send_5_percent_more_than_zero_1():
    layers, devices = 61, 16
    params = {"w": jax.ShapeDtypeStruct((layers, 32, 32), jnp.float32)}
    optimizer = muon(0.1, lambda path, shape: (1, 1), devices, "data")

    def loss(params, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0])

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    args = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((1024, 32), jnp.float32)
    plan = md.parallelize(step, f"data={devices}", {"x": "data=S(0)", "params/*": "data=B"}).plan(*args)
    zero = 2 * 4 * layers * 32 * 32 * (devices - 1) // devices
    assert plan.bytes == zero * 64 // layers <= 1.05 * zero
    assert {c.kind for c in plan.collectives} == {"reduce-scatter", "all-gather"}
    assert str(plan.layout("state/inner_states/muon/inner_state/0/0/mu/32x32_float32")) == "data=S(0)"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"packed: down \[3, 12, 4\] is no matrix; give it to another optimizer"),
        ((1, 2), r"view: down \[3, 12, 4\] has 3 dims, which 1 stacked dims and 2 row dims"),
        (1, r"view: 1 for down \[3, 12, 4\] is not \(stacked dims, row dims\); return \(1, 1\) for"),
        ((1.0, 1), r"view: \(1.0, 1\) for down"),
    ],
)
def test_parameters_that_are_no_matrices_are_named(found, message):
    with pytest.raises(ArgumentError, match=message):
        packed(optax.sgd(0.1), lambda path, shape: found).init(PARAMS)


def test_arguments_are_checked_before_anything_is_traced():
    for multiple in (0, 4.0, True):
        with pytest.raises(ArgumentError, match=f"multiple={multiple}: must be the number of devices .* an int"):
            muon(0.1, view, multiple)
    with pytest.raises(ArgumentError, match="multiple=None with owners='data': give the number of devices along data"):
        muon(0.1, view, owners="data")
    with pytest.raises(ArgumentError, match="view=8: must be a function of path and shape"):
        muon(0.1, 8)


def test_matrices_split_along_their_rows_are_sent_to_their_owners():
    """One matrix per device, half of them transposed: XLA on CPU fails on such an exchange without a barrier."""

    def exchanged(stacks, _):
        rows = jax.tree.map(lambda x: md.constrain(x, "data=S(1)"), stacks)
        whole = jax.tree.map(lambda x: md.constrain(x, "data=S(0)"), rows)
        return jax.tree.map(lambda x: x / (1 + jnp.sum(x**2, (1, 2), keepdims=True)), whole)

    optimizer = packed(optax.stateless(exchanged), lambda path, shape: (0, 1), 8)

    def loss(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.sum(x)

    def step(params, x):
        return optimizer.update(jax.grad(loss)(params, x), optimizer.init(params))[0]

    up, down = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 1024), (1024, 256)))
    args = [{"up": up, "down": down}] * 4, jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    sharded = md.parallelize(step, "data=8", {"x": "data=S(0)", "params/**": "data=B"})
    assert [c.kind for c in sharded.plan(*args).collectives].count("all-to-all") == 1
    sharded.lower(*args).compile(fast_options())
