"""An image classifier on scikit-learn's 1,797 scanned digits: prints its plan, trains, prints its accuracy."""

import argparse

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import meshdsl as md

BATCH, HELD_OUT = 256, 357


class Network(nnx.Module):
    def __init__(self, rngs):
        self.fine = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.coarse = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.hidden, self.out = nnx.Linear(1024, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.coarse(nnx.relu(self.fine(images))))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


images, digits = load_digits(return_X_y=True)
images, digits = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16, digits.astype(np.int32)
graph = nnx.graphdef(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
optimizer = optax.adam(2e-3)


def predict(params, images):
    return nnx.merge(graph, params)(images)


def loss(params, batch):
    scores = predict(params, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["digits"]).mean()


def step(params, opt_state, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(gradient, opt_state)
    return optax.apply_updates(params, updates), opt_state, value


def init():
    params = nnx.to_pure_dict(nnx.state(Network(nnx.Rngs(0))))
    return params, optimizer.init(params)


def batches():
    rng = np.random.default_rng(0)
    while True:
        chosen = rng.choice(len(digits) - HELD_OUT, BATCH, replace=False)
        yield {"images": images[chosen], "digits": digits[chosen]}


example = jax.eval_shape(lambda: next(batches()))
program = md.Program(
    step, (*jax.eval_shape(init), example), layouts={"batch/*": "data=S(0)"}, init=init, batches=batches
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
    right = np.argmax(predict(jax.device_get(state[0]), images[-HELD_OUT:]), -1) == digits[-HELD_OUT:]
    print(f"accuracy on {HELD_OUT} held-out images: {np.mean(right):.3f}")
