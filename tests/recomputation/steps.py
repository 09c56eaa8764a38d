"""Steps with residuals: unrolled layers, a loop over layers, microbatches; with dropout, gathers and an inner loop."""

import jax
import jax.numpy as jnp

LAYERS, WIDTH, ROWS = 2, 8, 16


def layer(weights, x, key):
    up, down = weights
    hidden = jax.nn.gelu(x @ up)
    hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape)
    last, sums = jax.lax.scan(lambda c, row: (jnp.sin(c + row), c * row), hidden[0], hidden)
    return x + jnp.tanh((hidden + sums + last) @ down)


def updated(loss, weights):
    value, gradient = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient)


def unrolled(weights, x, key):
    def loss(weights):
        y = x
        for i in range(LAYERS):
            y = layer([w[i] for w in weights], y, jax.random.fold_in(key, i))
        return (y**2).mean()

    return updated(loss, weights)


def scanned(weights, x, key):
    def loss(weights):
        def body(y, slices):
            return layer(slices[0], y, slices[1]), y.sum()

        y, sums = jax.lax.scan(body, x, (weights, jax.random.split(key, LAYERS)))
        return (y**2).mean() + sums.sum()

    return updated(loss, weights)


def microbatched(weights, x, key, step=scanned):
    def add(total, rows):
        value, new = step(weights, rows, key)
        return jax.tree.map(lambda t, n, w: t + n - w, total, new, weights), value

    total, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), x.reshape(2, ROWS // 2, WIDTH))
    return values.sum(), jax.tree.map(jnp.add, weights, total)


def sines(weights, x):
    """A chain whose residuals take most of the memory."""

    def loss(weights):
        y = x
        for w in weights:
            y = jnp.tanh(jnp.sin(y @ w))
        return jnp.mean(y**2)

    return updated(loss, weights)


SINES = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((2048, 64), jnp.float32)


def arguments():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [0.3 * jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) for key in keys[:2]]
    return weights, jax.random.normal(keys[2], (ROWS, WIDTH)), keys[2]
