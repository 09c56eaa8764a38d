"""Values for arguments that are known by shape, so that no initialiser is compiled, and the comparison of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.trials import fast_options


def quick(fn):
    """``fn`` compiled fast, not well."""
    return jax.jit(fn, compiler_options=fast_options())


def filled(shapes, size=0.3):
    """Every array with normal values, integers with zeros."""
    draw = np.random.default_rng(0)

    def one(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return (size * draw.normal(size=x.shape) if floating else np.zeros(x.shape)).astype(x.dtype)

    return jax.tree.map(one, shapes)


def start(program):
    """Parameters with values, all other state of zeros."""
    params, *state, _ = program.args
    return filled(params), *jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)


def same_step(made, before, loss, batch, optimizer, plain):
    """Compare ``params, state, loss`` of a step with what a plain loss and the optimizer make of ``before``.

    Adam's first step is the sign of the gradient, which rounding turns near 0: such elements are left out. How large
    the gradients are is seen in the optimizer state.
    """

    @quick
    def by_hand(params):
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradient, optimizer.init(params), params)
        return optax.apply_updates(params, updates), value, gradient, state

    want, value, gradient, state = jax.tree.map(np.asarray, by_hand(before))
    got = plain(made[0])
    np.testing.assert_allclose(made[2], value, rtol=1e-4)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    least = 1e-4 * max(np.abs(g).max() for g in jax.tree.leaves(gradient))
    compared = []
    for x, y, g in zip(*map(jax.tree.leaves, (got, want, gradient))):
        moved = np.abs(g) > least
        compared.append(moved.any())
        np.testing.assert_allclose(np.asarray(x)[moved], y[moved], rtol=1e-5, atol=2e-5)
    assert compared.count(False) <= 1  # the bias of attention's keys, which softmax cancels
    for x, y in zip(jax.tree.leaves(made[1]), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-9 + 1e-5 * np.abs(y).max())
