"""The demo's GPT with the products of its layers in float8 and in full, by FSDP on 8 devices: bytes, and all losses.

python -m bench.fp8 --embed 64 --batch 16 --steps 400 trains both side by side, from the same parameters and on the same
batches; the layers are those of flax, given ``meshdsl.models.fp8.dot_general``.
"""

import argparse
import time
from types import ModuleType

import jax
import numpy as np
import optax
from flax import nnx

from bench.example_steps import small_demo
from bench.report import versions
from meshdsl.api import parallelize
from meshdsl.models.fp8 import dot_general
from meshdsl.pins.strategies import fsdp

DEVICES, RATE, WARMUP, EVERY = 8, 3e-3, 20, 50


def main() -> None:
    """Plans and trains both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)

    demos = {"in full": small_demo(options.embed, options.batch), "float8": small_demo(options.embed, options.batch)}
    in_float8(demos["float8"])
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, max(options.steps, 2 * WARMUP))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))

    def step_of(demo):
        def step(params, state, batch):
            loss, gradient = jax.value_and_grad(demo.loss)(params, batch)
            updates, state = optimizer.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, loss

        return parallelize(step, f"data={DEVICES}", fsdp())

    params = demos["in full"].init()[0]
    states = {name: (params, optimizer.init(params)) for name in demos}
    steps = {name: step_of(demo) for name, demo in demos.items()}
    batches = demos["in full"].program.batches()
    losses: dict[str, list[float]] = {name: [] for name in steps}
    start = time.process_time()
    for number, batch in zip(range(1, options.steps + 1), batches, strict=False):
        if number == 1:
            print("bytes", {name: sharded.plan(*states[name], batch).bytes for name, sharded in steps.items()})
        for name, sharded in steps.items():
            *state, loss = sharded(*states[name], batch)
            states[name] = tuple(state)
            losses[name].append(float(loss))
        if number % EVERY == 0 or number == options.steps:
            text = ", ".join(f"{name} {np.mean(each[-EVERY:]):.4f}" for name, each in losses.items())
            print(f"step {number}: {text}, {time.process_time() - start:.0f} s", flush=True)
    for name, (params, _) in states.items():
        found = demos[name].program.evaluate(jax.device_get(params), None)["held-out loss"]
        print(f"{name}: held-out loss {np.mean([float(x) for x in found]):.4f}")
    print(versions())


def in_float8(demo: ModuleType) -> None:
    """Gives the linear layers of the demo's model products in float8."""
    model = nnx.eval_shape(lambda: demo.GPT(nnx.Rngs(0)))
    for _, layer in nnx.iter_graph(model):
        if isinstance(layer, nnx.Linear | nnx.LinearGeneral):
            layer.dot_general = dot_general
    demo.graph = nnx.graphdef(model)


if __name__ == "__main__":
    main()
