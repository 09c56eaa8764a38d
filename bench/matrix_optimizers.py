"""The demo's GPT with Muon on packed matrices: as many steps on 8 devices as on one, with equal losses.

python -m bench.matrix_optimizers trains both side by side and prints their losses and the largest difference so far.
The step is the same; on one device it is jitted without a plan. Options make the model smaller.
"""

import argparse
import time

import jax
import numpy as np
import optax
from flax import nnx

from bench.example_steps import load_example
from bench.report import versions
from meshdsl.api import parallelize
from meshdsl.models.matrix_optimizers import muon

DEVICES, RATE, WARMUP, EVERY = 8, 3e-3, 20, 20


def matrices(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the view of the demo's kernels, ``[layers ...]``; all other parameters are AdamW's."""
    return (1, 2 if "/out/" in path else 1) if path.endswith("/kernel") else None


def main() -> None:
    """Trains on one device and on all, step by step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)

    demo = load_example("gpt")
    demo.EMBED, demo.WIDE, demo.BATCH = options.embed, 4 * options.embed, options.batch
    demo.graph = nnx.graphdef(nnx.eval_shape(lambda: demo.GPT(nnx.Rngs(0))))
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, max(options.steps, 2 * WARMUP))
    demo.optimizer = optax.chain(optax.clip_by_global_norm(1.0), muon(schedule, DEVICES, matrices, "data", b2=0.95))

    sharded = parallelize(demo.step, f"data={DEVICES}", {"batch/*": "data=S(0)", "params/**": "data=B"})
    alone = jax.jit(demo.step)
    one, split = demo.init(), demo.init()
    batches = iter(demo.program.batches())
    losses: list[tuple[float, float]] = []
    start = time.process_time()
    for step in range(1, options.steps + 1):
        batch = next(batches)
        *one, first = alone(*one, batch)
        *split, second = sharded(*split, batch)
        losses.append((float(first), float(second)))
        if step % EVERY == 0 or step == options.steps:
            furthest = np.abs(np.subtract(*np.transpose(losses))).max()
            print(
                f"step {step}: {losses[-1]}, furthest {furthest:.2e}, {time.process_time() - start:.0f} s", flush=True
            )
    for name, params in (("one device", one[0]), (f"{DEVICES} devices", split[0])):
        held_out = demo.program.evaluate(jax.device_get(params), None)["held-out loss"]
        print(f"{name}: held-out loss {np.mean([float(x) for x in held_out]):.5f}")
    print(versions())


if __name__ == "__main__":
    main()
