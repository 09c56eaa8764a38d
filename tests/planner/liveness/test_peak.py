"""Predicted memory, against what is counted by hand and what XLA needs for the compiled step."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import meshdsl as md

N = 256
ONE = jax.ShapeDtypeStruct((N, N), jnp.float32)
STACK = jax.ShapeDtypeStruct((6, N, N), jnp.float32)


def chain(x):
    return jnp.tanh(x @ x) @ x


def kept_for_later(x):
    y = x @ x
    return jnp.tanh(y) @ y


def views(x):
    return ((x @ x).reshape(2, -1, N).reshape(N, N) @ x)[None]


def added_up(x):
    return lax.fori_loop(0, 5, lambda i, total: total + x @ (x + i), jnp.zeros_like(x))


def multiplied(x):
    return lax.fori_loop(0, 5, lambda i, y: y @ x, x + 1)


def start_needed_later(x):
    y = x @ x
    return lax.fori_loop(0, 5, lambda i, total: total + x @ (x + i), y) @ y


def stored(x):
    def store(stash, i):
        return lax.dynamic_update_index_in_dim(stash, x @ (x + i), i, 0), None

    return lax.scan(store, jnp.zeros((6, N, N)), jnp.arange(6))[0]


def stacked(xs):
    return lax.scan(lambda y, x: (y @ x, y), xs[0] + 1, xs)[1]


def one_loop_after_another(xs):  # XLA fills the stacks of both with zeros before the first
    y = lax.scan(lambda y, x: (y @ x, y), xs[0] + 1, xs)[1]
    return lax.scan(lambda y, x: (y @ x, y), jnp.sum(y, axis=0), xs)[1]


def scattered_behind_a_loop(xs):  # so it does with the zeros
    y = jnp.sum(lax.scan(lambda y, x: (y @ x, y), xs[0] + 1, xs)[1], axis=0)
    rows = jnp.argsort(y[0, :2])
    return jnp.max(jnp.zeros(xs.shape).at[rows].add(y @ y, mode="promise_in_bounds"), axis=0)


def branches(x):
    return lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ x) @ x, lambda x: x - 1, x)


def updated(w):
    return w - 0.1 * jax.grad(lambda w: jnp.sum((w @ w) ** 2))(w)


# step, argument, what is donated -> how many of ONE
CASES = {
    chain: (ONE, (), 3),
    kept_for_later: (ONE, (), 4),
    views: (ONE, (), 3),
    added_up: (ONE, (), 4),
    multiplied: (ONE, (), 3),
    start_needed_later: (ONE, (), 5),
    stored: (ONE, (), 9),
    stacked: (STACK, (), 15),
    one_loop_after_another: (STACK, (), 21),
    scattered_behind_a_loop: (STACK, (), 21),
    branches: (ONE, (), 3),
    updated: (ONE, (0,), 4),
}


@pytest.mark.parametrize("step", CASES, ids=lambda step: step.__name__)
def test_memory_is_what_is_counted_and_compiled(step):
    argument, donated, units = CASES[step]
    sharded = md.parallelize(step, md.Mesh(x=1), donate_argnums=donated)
    assert sharded.plan(argument).memory == pytest.approx(units * N * N * 4, rel=0.01)
    found = sharded.lower(argument).compile().memory_analysis()
    outside = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    assert outside + found.temp_size_in_bytes == pytest.approx(units * N * N * 4, rel=0.01)


@md.rule("b s _, b _ _, b _ _ -> b s _")
def attention(query, key, value):
    scores = jnp.tanh(jnp.einsum("bsd,btd->bst", query, key))
    return jnp.einsum("bst,btd->bsd", scores, value)


@pytest.mark.parametrize("devices", [1, 4])
def test_functions_with_a_rule_need_what_their_operations_do(devices):
    def step(x):
        return jax.grad(lambda x: jnp.sum(attention(x, x, x) ** 2))(x)

    x = jax.ShapeDtypeStruct((8, 512, 32), jnp.float32)
    sharded = md.parallelize(step, md.Mesh(x=devices), {"x": "x=S(0)"})
    found = sharded.lower(x).compile().memory_analysis()
    compiled = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    assert sharded.plan(x).memory == pytest.approx(compiled, rel=0.01)
    assert compiled > 2 * 8 * 512**2 * 4 / devices  # two arrays of scores
