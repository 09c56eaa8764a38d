"""Communication in fewer bits: nothing is lost for good, a quarter of the bytes, and the unsharded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.layouts.topology import Link
from meshdsl.models.low_bits import FORMATS, IN_FULL, coarsest, compressed, replica_gradients, rounding_error, sent
from tests.models.values import filled

NORMAL = jax.random.normal(jax.random.key(0), (16, 300), jnp.float32)  # the last block is not full
LINKS = (Link(latency=1e-6, bandwidth=1e7),)
MESH = md.Mesh(data=8, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, LINKS))


@pytest.mark.parametrize(("to", "lost"), [("bfloat16", 0.0017), ("float8_e4m3fn", 0.026), ("int8", 0.0065)])
def test_rounding_loses_little(to, lost):
    assert np.isclose(rounding_error(NORMAL, to), lost, rtol=0.1)
    made = sent(NORMAL, "data=B", to)
    assert made.shape == NORMAL.shape and made.dtype == NORMAL.dtype
    assert np.abs(made - NORMAL).max() <= np.abs(NORMAL).max() * {"int8": 0.5 / 127}.get(to, 2**-4)
    assert sent(jnp.zeros((3, 4), jnp.bfloat16), "data=B", to).tolist() == [[0] * 4] * 3
    assert jax.grad(lambda x: jnp.sum(sent(x, "data=B", to) * NORMAL))(NORMAL).tolist() == NORMAL.tolist()


@pytest.mark.parametrize("to", FORMATS)
def test_not_a_number_stays_none_in_large_arrays(to):
    x = jnp.zeros((1024, 128)).at[0, 5].set(jnp.nan)
    assert np.isnan(jax.jit(lambda x: sent(x, "data=B", to))(x)[0, 5])


def test_the_coarsest_format_within_a_budget():
    assert [coarsest({"w": NORMAL, "step": 3}, error) for error in (0.1, 0.01, 0.002)] == ["int8", "int8", "bfloat16"]
    assert coarsest({"w": NORMAL**9}, 0.1, block=300) == "float8_e4m3fn"  # it keeps small numbers beside large ones
    with pytest.raises(ArgumentError, match=r"error=0.0001: no format rounds so little: bfloat16 loses 0.0017, .*full"):
        coarsest(NORMAL, 1e-4)


def test_what_rounding_loses_is_sent_later():
    params = {"w": jnp.zeros((16, 300)), "b": jnp.zeros(3)}
    optimizer = compressed(optax.sgd(1.0), 4, "data", "float8_e4m3fn")
    state, applied, total = optimizer.init(params), 0.0, 0.0
    assert state.lost["b"] == IN_FULL
    for i in range(5):
        gradients = {"w": jax.random.normal(jax.random.key(i), (4, 16, 300)), "b": jnp.full((4, 3), float(i))}
        updates, state = optimizer.update(gradients, state, params)
        applied, total = applied + updates["w"], total + gradients["w"].mean(0)
        assert updates["b"].tolist() == [-i] * 3
    kept = total - state.lost["w"].gradient.mean(0)
    assert np.abs(applied + total).max() > 1e-3
    np.testing.assert_allclose(applied + state.lost["w"].update, -kept, atol=1e-5)


def test_a_compressed_step_sends_a_quarter_and_is_the_unsharded_one():
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] + params["bias"] - batch) ** 2)

    def program(optimizer, gradients):
        def step(params, state, batch):
            value, gradient = gradients(params, batch)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        array = jax.ShapeDtypeStruct
        params = {"up": array((32, 128), jnp.float32), "down": array((128, 32), jnp.float32)}
        params["bias"] = array((32,), jnp.float32)
        args = params, jax.eval_shape(optimizer.init, params), array((256, 32), jnp.float32)
        layouts = {"batch": "data=S(0)", "params/*": "data=B"}
        return md.parallelize(step, MESH, layouts), args

    full, args = program(optax.sgd(0.5), jax.value_and_grad(loss))
    whole = full.plan(*args).bytes
    sharded, args = program(compressed(optax.sgd(0.5), 8, "data"), replica_gradients(loss, 8))
    args = filled(args)
    assert sharded.plan(*args).bytes < 0.3 * whole
    sharded.verify(*args)
    sharded.check(*args)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sent(NORMAL, "data=B", "int4"), r"to='int4': no such format; did you mean 'int8'"),
        (lambda: sent(NORMAL, "data=B", block=0), r"block=0: must be an int of at least 1"),
        (lambda: sent(jnp.arange(3), "data=B"), r"int32\[3\] has no block of floats"),
        (lambda: compressed(optax.sgd(1.0), 8, ""), r"axis='': must be the name of the mesh axis"),
        (lambda: compressed(optax.sgd(1.0), 2.5, "data"), r"replicas=2.5: must be an int"),
        (
            lambda: replica_gradients(jnp.sum, 3)(1.0, {"x": jnp.ones(8)}),
            r"replicas=3: the first dim of x \[8\]",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_gradients_have_to_be_those_of_replicas():
    optimizer = compressed(optax.sgd(1.0), 8, "data")
    params = {"w": jnp.ones((8, 4))}
    with pytest.raises(ArgumentError, match=r"float32\[16, 4\] is not float\[8 ...\].*replica_gradients\(loss, 8\)"):
        optimizer.update({"w": jnp.ones((16, 4))}, optimizer.init(params), params)


def test_every_format_is_a_dtype():
    assert [jnp.dtype(to).itemsize for to in FORMATS] == [2, 1, 1]


def test_a_small_weight_is_gathered_in_few_bits_if_it_is_held_split():
    array = jax.ShapeDtypeStruct
    args = array((16, 128), jnp.float32), array((256, 16), jnp.float32)

    def plan(held):
        def step(w, x):
            return x @ sent(w, "data=B", block=16, held=held)

        return md.parallelize(step, MESH, {"w": "data=S(1)", "x": "data=S(0)"}).plan(*args)

    gathered = [c for c in plan("data=S(1)").collectives if c.kind == "all-gather"]
    assert sum(c.bytes for c in gathered) == (16 * 128 + 4 * 16 * 8) * 7 // 8


def test_numbers_that_are_not_finite_pass_once():
    params = {"w": jnp.zeros((8, 16))}
    optimizer = compressed(optax.sgd(1.0), 8, "data")
    state, gradients = optimizer.init(params), jnp.ones((8, 8, 16))
    updates, state = optimizer.update({"w": gradients.at[0, 0, 0].set(jnp.nan)}, state, params)
    assert jnp.isnan(updates["w"]).any()
    updates, state = optimizer.update({"w": gradients}, state, params)
    assert jnp.isfinite(updates["w"]).all()
    with pytest.raises(ArgumentError, match="bfloat16 loses nan"):
        coarsest({"a": NORMAL, "b": NORMAL.at[0, 0].set(jnp.nan)}, 0.1)
    for factor in (1e-18, 1e20):
        assert np.isclose(rounding_error(NORMAL * factor), 0.0065, rtol=0.1)
