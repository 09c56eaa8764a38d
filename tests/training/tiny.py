"""A program to train in a second: a linear model of random rows. What each process is goes to TINY_FOLDER, if set;
TINY_RATE is the learning rate. TINY_ENDS has the number of batches of each process, if set."""

import os
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.training.batches import Batches, shuffled

RATE = float(os.environ.get("TINY_RATE", "0.5"))
draw = np.random.default_rng(0)
X = draw.normal(size=(256, 16)).astype(np.float32)
Y = X @ draw.normal(size=(16, 8)).astype(np.float32)


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def step(w, key, batch):
    value, gradient = jax.value_and_grad(loss)(w, batch)
    key, now = jax.random.split(key)
    return w - RATE * gradient + 1e-3 * jax.random.normal(now, w.shape), key, value


class Failing:
    """Records of which the second process cannot read the batch at TINY_FAIL."""

    def __init__(self, records):
        self.records = records

    def __len__(self):
        return len(self.records)

    def take(self, positions):
        if jax.process_index() == 1 and positions[0] // 32 == int(os.environ["TINY_FAIL"]):
            raise OSError("the disk of the data is gone")
        return self.records.take(positions)


def batches():
    if "TINY_FOLDER" in os.environ:
        if Path(os.environ["TINY_FOLDER"], f"gone-{jax.process_index()}").exists():  # its device is
            os._exit(9)
        Path(os.environ["TINY_FOLDER"], f"process-{jax.process_index()}").write_text(str(os.getpid()))
    records = shuffled({"x": X, "y": Y})
    found = Batches(Failing(records) if "TINY_FAIL" in os.environ else records, 32)
    if "TINY_ENDS" in os.environ:
        return list(islice(found, int(os.environ["TINY_ENDS"].split(",")[jax.process_index()])))
    return found


def evaluate(w, key):
    return {"held-out loss": jax.jit(loss)(w, {"x": X, "y": Y})}


program = md.Program(
    step,
    (
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        jax.eval_shape(lambda: jax.random.key(0)),
        {"x": jax.ShapeDtypeStruct((32, 16), jnp.float32), "y": jax.ShapeDtypeStruct((32, 8), jnp.float32)},
    ),
    layouts={"batch/*": "data=S(0)", "w": "model=S(1)"},
    init=lambda: (jnp.zeros((16, 8)), jax.random.key(1)),
    batches=batches,
    evaluate=evaluate,
    steps=30,
)
