"""A multilayer perceptron in plain JAX, trained by gradient descent.

The step is single-device code. The batch is pinned to ``data``; the planner chooses all other layouts.
``python examples/mlp.py`` prints the plan, then trains.
"""

import argparse

import jax
import jax.numpy as jnp

import meshdsl as md

SIZES, BATCH = (64, 1024, 1024, 8), 512


def predict(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, batch):
    return jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)


def step(params, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient), value


def init():
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    shapes = zip(keys, SIZES[:-1], SIZES[1:])
    return ([{"w": jax.random.normal(k, (m, n)) / m**0.5, "b": jnp.zeros(n)} for k, m, n in shapes],)


def batches():
    """Yields random inputs with targets from a fixed random function."""
    teacher = jax.random.normal(jax.random.key(1), (SIZES[0], SIZES[-1])) / 8
    for number in range(10**9):
        x = jax.random.normal(jax.random.key(2 + number), (BATCH, SIZES[0]))
        yield {"x": x, "y": jnp.sin(x @ teacher)}


program = md.Program(
    step,
    (*jax.eval_shape(init), jax.eval_shape(lambda: next(batches()))),
    layouts={"batch/*": "data=S(0)"},
    init=init,
    batches=batches,
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=md.Mesh.parse, default="data=4,model=2")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.mesh.size)
    sharded = md.parallelize(step, options.mesh, layouts=program.layouts)
    print(sharded.plan(*program.args))
    state = init()
    for number, batch in zip(range(options.steps), batches()):
        *state, value = sharded(*state, batch)
        if number % 20 == 0:
            print(f"step {number:4d}   loss {value:.4f}")
