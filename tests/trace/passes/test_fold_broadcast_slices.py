"""Pieces of what is the same everywhere."""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.trace import trace
from meshdsl.trace.passes.canonicalize import fold_broadcast_slices
from tests.trace.passes.test_cleanup_passes import X, cleaned, names


def test_pieces_of_a_broadcast_are_broadcasts():
    def step(x):
        wide = jnp.broadcast_to(x[:, None], (4, 6, 4))
        return jnp.split(wide, 3, 1), wide[:, 2:5], wide[1:], wide[:, ::2, :2]

    graph = cleaned(step, X, by=fold_broadcast_slices)
    assert names(graph).count("slice") == 2 and "split" not in names(graph)
    program = trace(step, (X,))
    assert [leaf.shape for leaf in program.outputs] == [*[(4, 2, 4)] * 3, (4, 3, 4), (3, 6, 4), (4, 3, 2)]
    assert md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)"}).check(jnp.arange(16.0).reshape(4, 4)).ok


def test_layers_of_a_broadcast_are_broadcasts():
    """The gradient of a sum of stacked arrays is one array, several times."""

    def step(x):
        layers = jnp.unstack(jax.lax.broadcast_in_dim(x, (4, 3, 4), (0, 2)), axis=1)
        rows = jnp.unstack(jnp.broadcast_to(x[:1], (4, 4)), axis=0)
        return *layers, *rows

    graph = cleaned(step, X, by=fold_broadcast_slices)
    assert names(graph).count("unstack") == 1
    assert md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)"}).check(jnp.arange(16.0).reshape(4, 4)).ok


def test_the_gradient_of_a_sum_of_pieces_is_made_once():
    """Compilers send equal pieces once."""

    def step(x, y):
        grads = jax.grad(lambda x: jnp.sum(jnp.concatenate([x, x]) @ y))(x)
        return x - grads

    sharded = md.parallelize(step, md.Mesh(x=2), {"x": "x=S(0)", "y": "x=S(1)"})
    assert sharded.verify(jnp.eye(4), jnp.eye(4)).equal and sharded.check(jnp.eye(4), jnp.eye(4)).ok
    graph = trace(lambda x: jax.grad(lambda x: jnp.concatenate([x, x]).sum() ** 2)(x), (X,)).graph
    assert "split" not in names(graph)
