"""The demo's GPT on 8 devices, gradients sent in full and in few bits: bytes of the plans, and all losses.

python -m bench.low_bits --to int8 --steps 2000 trains three side by side: in full, with ``compressed``, and with what
the planner rounds within ``--low-bits``. Options make the model smaller. All start from the same parameters and see the
same batches; ``ratio`` is that of the mean losses of the last steps.
"""

import argparse
import time

import jax
import numpy as np
import optax

from bench.example_steps import small_demo
from bench.report import versions
from meshdsl.api import parallelize
from meshdsl.models.low_bits import FORMATS, compressed, replica_gradients

DEVICES, RATE, WARMUP, EVERY = 8, 3e-3, 20, 50


def main() -> None:
    """Plans and trains all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", default="int8", choices=FORMATS)
    parser.add_argument("--low-bits", default="0.01")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)

    demo = small_demo(options.embed, options.batch)
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, max(options.steps, 2 * WARMUP))
    full = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))
    planned, small = f"low_bits={options.low_bits}", compressed(full, DEVICES, "data", options.to, options.block)
    optimizers = {"in full": full, options.to: small, planned: full}
    gradients = dict.fromkeys(optimizers, jax.value_and_grad(demo.loss))
    gradients[options.to] = replica_gradients(demo.loss, DEVICES)

    def step_of(name):
        def step(params, state, batch):
            loss, gradient = gradients[name](params, batch)
            updates, state = optimizers[name].update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        low_bits, pins = options.low_bits if name == planned else None, {"batch/*": "data=S(0)", "params/**": "data=B"}
        return parallelize(step, f"data={DEVICES}", pins, low_bits=low_bits)

    params = demo.init()[0]
    states = {name: (params, optimizer.init(params)) for name, optimizer in optimizers.items()}
    steps = {name: step_of(name) for name in optimizers}
    batches = iter(demo.program.batches())
    batch = next(batches)
    sent = {name: steps[name].plan(*states[name], batch).bytes for name in steps}
    shares = ", ".join(f"{name} {size / sent['in full']:.3f}" for name, size in sent.items())
    print(f"bytes {sent}: {shares} of them")
    losses: dict[str, list[float]] = {name: [] for name in steps}
    start = time.process_time()
    for step in range(1, options.steps + 1):
        for name, sharded in steps.items():
            *state, loss = sharded(*states[name], batch)
            states[name] = tuple(state)
            losses[name].append(float(loss))
        batch = next(batches)
        if step % EVERY == 0 or step == options.steps:
            last = {name: np.mean(each[-EVERY:]) for name, each in losses.items()}
            text = ", ".join(f"{name} {loss:.4f} (ratio {loss / last['in full']:.5f})" for name, loss in last.items())
            print(f"step {step}: {text}, {time.process_time() - start:.0f} s", flush=True)
    for name, (params, _) in states.items():
        held_out = demo.program.evaluate(jax.device_get(params), None)["held-out loss"]
        print(f"{name}: held-out loss {np.mean([float(x) for x in held_out]):.5f}")
    print(versions())


if __name__ == "__main__":
    main()
