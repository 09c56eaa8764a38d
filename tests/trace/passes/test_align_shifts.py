"""What is computed from a dim without an element at its end is computed on the whole dim, where that is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.ir.graph import walk
from meshdsl.trace import trace
from tests.trace.interpreter import run

X = jnp.cos(jnp.arange(48.0)).reshape(2, 8, 3) + 1.5


def prefixed(x):
    """Every element after the one before it; the first as it is."""
    return jnp.concatenate([x[:, :1], x[:, :-1] / x[:, 1:]], 1)


def contracted(x):
    mixed = jnp.einsum("bti,btj->btij", x[:, 1:], jnp.exp(x[:, :-1]))
    return jnp.concatenate([x[:, :1], jnp.max(mixed @ jnp.ones((3, 3)), -1).transpose(1, 0, 2).transpose(1, 0, 2)], 1)


def longer_source(x):
    """A slice that ends before its source does, behind an element of another array."""
    return jnp.concatenate([jnp.sin(x[:, 3:4]), x[:, 1:5] * jnp.cos(x[:, :5])[:, :4]], 1)


def padded(x):
    ahead = jnp.pad(jnp.exp(x[:, 1:]), ((0, 0), (0, 1), (0, 0)))
    return ahead + jax.lax.pad(x[:, :-1] * x[:, 1:], 7.0, ((0, 0, 0), (1, 0, 0), (0, 0, 0)))


def spread(x):
    return jax.lax.pad(jnp.sin(x[:, 1:]), 2.0, ((0, 0, 0), (2, 1, 1), (0, 0, 0)))


def affine(x):
    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(then, (jnp.tanh(x), x), axis=1)[1]


def matrices(x):
    return jax.lax.associative_scan(jnp.matmul, jnp.einsum("bti,btj->btij", x, x) / 9, axis=1)


def looped(x):
    return jax.lax.scan(lambda c, _: (prefixed(c), None), x, None, length=2)[0]


def summed(x):
    """Masked where it is reduced, multiplied along the dim, or summed up."""
    return (
        jnp.pad(jnp.cumsum(x[:, 1:] * x[:, :-1], 1), ((0, 0), (1, 0), (0, 0)))
        + jnp.max(x[:, 1:] - x[:, :-1], 1)[:, None]
    )


def counted(x):
    places = jnp.arange(7.0)[None, :, None]
    return x.at[:, 1:].add(jnp.sin(x[:, :-1] * places)).at[:, :-1].multiply(x[:, 1:] + places)


STEPS = {
    f.__name__: f
    for f in (prefixed, contracted, longer_source, padded, spread, affine, matrices, looped, summed, counted)
}


def equal(step, x):
    """The traced program of a step, which computes what the step does."""
    program = trace(step, (x,))
    np.testing.assert_allclose(jax.jit(lambda x: run(program, x))(x), jax.jit(step)(x), rtol=2e-6, atol=2e-6)
    return program.graph


def gradient_of(step):
    def weighed(x):
        made = step(x)
        return jnp.sum(made * jnp.sin(jnp.arange(1.0 * made.size)).reshape(made.shape))

    return jax.grad(weighed)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_computed_on_the_whole_dim(name, gradient):
    graph = equal(gradient_of(STEPS[name]) if gradient else STEPS[name], X)
    short = [op for _, op in walk(graph) for v in op.outputs if 7 in v.shape]
    assert not short


REDUCED = {
    "all but the first, all but the last": lambda x: (x[:, 1:].sum(1), x[:, :-1].sum(1)),
    "three windows": lambda x: (x[:, 2:].max(1), x[:, 1:-1].max(1), x[:, :-2].max(1)),
    "with the whole": lambda x: (x[:, 1:-1].sum(1), x.sum(1), x[:, :-1].sum(1)),
    "means": lambda x: x[:, 1:].mean(1) - x[:, :-1].mean(1),
}


@pytest.mark.parametrize("name", REDUCED)
def test_parts_of_one_array_are_masked_each_at_its_place(name):
    """On the grid they are the same array: what differs is where they are masked."""
    before = REDUCED[name]
    program = trace(before, (X,))
    for made, expected in zip(jax.tree.leaves(run(program, X)), jax.tree.leaves(before(X)), strict=True):
        np.testing.assert_allclose(made, expected, rtol=2e-6)


@pytest.mark.parametrize("length", [2, 5, 11])
def test_scans_of_any_length(length):
    equal(gradient_of(affine), jnp.sin(jnp.arange(2.0 * length)).reshape(1, length, 2))


OTHERS = {
    "returned": lambda x: x[:, 1:] - x[:, :-1],
    "keys": lambda x: jax.random.key_data(jnp.concatenate([jax.random.split(jax.random.key(0), 8)[:1]] * 2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_left_alone(name):
    assert "select_n" not in {op.name for _, op in walk(equal(OTHERS[name], X))}
