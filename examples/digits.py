"""A convolutional network on scikit-learn's 1,797 scanned digits: ``meshdsl train examples/digits.py``.

Accuracy on the last 357 digits, which are held out, is at least 0.95.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshdsl as md
from meshdsl.training.batches import Batches
from meshdsl.training.datasets.images import digits

BATCH, STEPS = 256, 200


class Network(nnx.Module):
    def __init__(self, rngs):
        self.fine = nnx.Conv(1, 32, (3, 3), rngs=rngs)
        self.coarse = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.hidden, self.out = nnx.Linear(1024, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.coarse(nnx.relu(self.fine(images))))
        return self.out(nnx.relu(self.hidden(x.reshape(len(x), -1))))


images = digits()
graph = nnx.graphdef(nnx.eval_shape(lambda: Network(nnx.Rngs(0))))
optimizer = optax.adamw(
    optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps=20, decay_steps=STEPS), weight_decay=0.01
)


def predict(params, images):
    return nnx.merge(graph, params)(images)


def loss(params, batch):
    scores = predict(params, batch["images"])
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()


def step(params, opt_state, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def init():
    params = nnx.to_pure_dict(nnx.state(Network(nnx.Rngs(0))))
    return params, optimizer.init(params)


def evaluate(params, _):
    held_out = images.held_out
    return {"accuracy": jnp.argmax(predict(params, held_out["images"]), -1) == held_out["labels"]}


def batches():
    return Batches(images.records(), BATCH, "images")


program = md.Program(
    step,
    (*jax.eval_shape(init), jax.eval_shape(lambda: {name: x[:BATCH] for name, x in images.train.items()})),
    layouts={"batch/*": "data=S(0)"},
    init=init,
    batches=batches,
    evaluate=evaluate,
    steps=STEPS,
)

if __name__ == "__main__":
    print(md.parallelize(step, md.Mesh(data=4, model=2), layouts=program.layouts).plan(*program.args))
