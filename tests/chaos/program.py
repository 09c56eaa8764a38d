"""The program that the chaos harness trains: a linear model, whose records wait, fail or end their process as told.

Each process writes its number to CHAOS_FOLDER/process-I. It waits in its input while CHAOS_FOLDER/wait-I exists, raises
there while CHAOS_FOLDER/raise-I does, and does not start if CHAOS_FOLDER/devices says that it has no device.
"""

import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import meshdsl as md
from meshdsl.training.batches import ArrayRecords, Batches, shuffled
from tests.chaos import BATCH

FOLDER = Path(os.environ["CHAOS_FOLDER"])
INDEX = int(os.environ.get("JAX_PROCESS_ID", "0"))
PAUSE = float(os.environ.get("CHAOS_PAUSE", "0.05"))  # seconds for which a batch waits, so that faults meet a run
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(240, 16)).astype(np.float32)
Y = X @ DRAW.normal(size=(16, 8)).astype(np.float32)


class Slow(ArrayRecords):
    """Records that do to their process what the folder says."""

    def take(self, positions):
        time.sleep(PAUSE)
        while (FOLDER / f"wait-{INDEX}").exists():
            time.sleep(0.1)
        if (FOLDER / f"raise-{INDEX}").exists():
            raise OSError("the input is lost")
        return super().take(positions)


def loss(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def step(w, m, key, batch):
    """SGD with momentum and noise: a state whose every part the losses depend on."""
    value, gradient = jax.value_and_grad(loss)(w, batch)
    key, now = jax.random.split(key)
    m = 0.9 * m + gradient + 1e-2 * jax.random.normal(now, w.shape)
    return w - 0.05 * m, m, key, value


def batches():
    (FOLDER / f"process-{INDEX}").write_text(str(os.getpid()))
    return Batches(shuffled(Slow({"x": X, "y": Y})), BATCH)


if int((FOLDER / "devices").read_text()) <= INDEX:
    raise OSError(f"process {INDEX} finds no device")

program = md.Program(
    step,
    (
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        jax.eval_shape(lambda: jax.random.key(0)),
        {"x": jax.ShapeDtypeStruct((BATCH, 16), jnp.float32), "y": jax.ShapeDtypeStruct((BATCH, 8), jnp.float32)},
    ),
    layouts={"batch/*": "data=S(0)"},
    init=lambda: (jnp.zeros((16, 8)), jnp.zeros((16, 8)), jax.random.key(1)),
    batches=batches,
)
