"""An image classifier on scikit-learn's 1,797 scanned digits: ``meshdsl train examples/digits.py``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import meshdsl as md
from meshdsl.training.batches import Batches, shuffled

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


def evaluate(params, _):
    return {"accuracy": jnp.argmax(predict(params, images[-HELD_OUT:]), -1) == digits[-HELD_OUT:]}


def batches():
    return Batches(shuffled({"images": images[:-HELD_OUT], "digits": digits[:-HELD_OUT]}), BATCH)


program = md.Program(
    step,
    (*jax.eval_shape(init), jax.eval_shape(lambda: {"images": images[:BATCH], "digits": digits[:BATCH]})),
    layouts={"batch/*": "data=S(0)"},
    init=init,
    batches=batches,
    evaluate=evaluate,
    steps=100,
)

if __name__ == "__main__":
    print(md.parallelize(step, md.Mesh(data=4, model=2), layouts=program.layouts).plan(*program.args))
