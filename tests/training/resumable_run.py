"""A tiny training run in a process of its own: ``python resumable_run.py FOLDER STEPS SECONDS_PER_STEP``.

It writes its final parameters to FOLDER/final.npy, so that a run killed and resumed can be
compared bit for bit with one that was not.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshdsl.training.batches import host_feed
from meshdsl.training.datasets.text import text_batches
from meshdsl.training.loop import Run, restore_newest, train

OPTIMIZER = optax.adamw(1e-2)
TOKENS = np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint16)


def loss(table, batch):
    return optax.softmax_cross_entropy_with_integer_labels(table[batch["inputs"]], batch["targets"]).mean()


@jax.jit
def step(table, opt_state, batch):
    value, gradient = jax.value_and_grad(loss)(table, batch)
    updates, opt_state = OPTIMIZER.update(gradient, opt_state, table)
    return optax.apply_updates(table, updates), opt_state, value


def main(folder: Path, steps: int, pause: float) -> None:
    def slow(*args):
        time.sleep(pause)
        return step(*args)

    table = jnp.zeros((64, 64))
    state = (table, OPTIMIZER.init(table))
    run = Run(steps, folder, save_every=5, evaluate_every=10)
    done, state = restore_newest(run, state) or (0, state)
    state, outcome = train(slow, state, host_feed(text_batches(TOKENS, 8, 16)), run, done)
    np.save(folder / "final.npy", np.asarray(state[0]))
    np.save(folder / "losses.npy", np.asarray(outcome.history.losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
