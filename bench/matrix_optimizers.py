"""The demo's GPT with an optimizer of packed matrices: as many steps on 8 devices as on one, with equal losses.

python -m bench.matrix_optimizers trains both side by side with Muon, or with --optimizer shampoo or soap, and prints
their losses and the largest difference so far. The step is the same; on one device it is jitted without a plan. Options
make the model smaller. On CPU, set OPENBLAS_NUM_THREADS=1: threads for decompositions of such small matrices cost more
than they save.

python -m bench.matrix_optimizers --plans plans a model of matrices with packed and with unpacked Muon instead, and
prints the table of bytes and predicted times of docs/howto/matrix_optimizers.md. Nothing is compiled.
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import meshdsl as md
from bench.example_steps import small_demo
from bench.report import versions
from meshdsl.api import parallelize
from meshdsl.models.matrix_optimizers import muon, shampoo, soap
from meshdsl.plan.plan import Plan

DEVICES, WARMUP, EVERY = 8, 20, 20
ROWS, EMBED, HIDDEN = 65_536, 1024, 4096  # of the planned model: a batch, and two matrices per layer
OPTIMIZERS = {make.__name__: make for make in (muon, shampoo, soap)}
PLANNED = ((8, True, 8), (12, True, 8), (61, True, 16), (12, False, 8))  # layers, whether stacked, devices


def matrices(path: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the view of the demo's kernels, ``[layers ...]``; all other parameters are AdamW's."""
    return (1, 2 if "/out/" in path else 1) if path.endswith("/kernel") else None


def planned(optimizer: optax.GradientTransformation, layers: int, stacked: bool, devices: int) -> Plan:
    """Returns the plan of a step of ``layers`` layers, stacked or in a list, on ``devices`` TPU v5e."""

    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    def loss(params, batch):
        x = batch["x"]
        if stacked:
            x = jax.lax.scan(block, x, params)[0]
        else:
            for w in params:
                x = block(x, w)[0]
        return jnp.mean((x - batch["y"]) ** 2)

    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    leading = (layers,) if stacked else ()
    array = jax.ShapeDtypeStruct
    layer = {
        "up": array((*leading, EMBED, HIDDEN), jnp.float32),
        "down": array((*leading, HIDDEN, EMBED), jnp.float32),
    }
    params = layer if stacked else [layer] * layers
    batch = dict.fromkeys("xy", array((ROWS, EMBED), jnp.float32))
    mesh = md.Mesh(data=devices, topology="tpu-v5e")
    sharded = parallelize(step, mesh, {"batch/*": "data=S(0)", "params/**": "data=B"})
    return sharded.plan(params, jax.eval_shape(optimizer.init, params), batch)


def print_plans() -> None:
    """Prints bytes, as multiples of ZeRO-1's, and predicted times of the planned cases."""
    print('| parameters | devices | busiest / mean | packed | packed, `owners="data"` | `optax.contrib.muon` |')
    print("| --- | --- | --- | --- | --- | --- |")
    for layers, stacked, devices in PLANNED:
        view = (1, 1) if stacked else (0, 1)
        dims = contrib.MuonDimensionNumbers(-2, -1)
        optimizers = (
            muon(1e-3, lambda path, shape, view=view: view, devices),
            muon(1e-3, lambda path, shape, view=view: view, devices, "data"),
            contrib.muon(
                1e-3, muon_weight_dimension_numbers=lambda params, dims=dims: jax.tree.map(lambda _: dims, params)
            ),
        )
        zero = 2 * 4 * 2 * layers * EMBED * HIDDEN * (devices - 1) / devices
        plans = [planned(optimizer, layers, stacked, devices) for optimizer in optimizers]
        cells = [f"{plan.bytes / zero:.2f}, {1e3 * plan.seconds:.1f} ms" for plan in plans]
        name = f"{layers} stacked layers" if stacked else f"a list of {layers} layers"
        balance = -(-2 * layers // devices) * devices / (2 * layers)
        print(f"| {name} | {devices} | {balance:.3g} | {' | '.join(cells)} |", flush=True)
    print(versions(), file=sys.stderr)


def main() -> None:
    """Trains on one device and on all, step by step; or plans."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="muon")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--plans", action="store_true", help="print the table of plans instead")
    options = parser.parse_args()
    if options.plans:
        return print_plans()
    jax.config.update("jax_num_cpu_devices", DEVICES)

    demo = small_demo(options.embed, options.batch)
    schedule = optax.warmup_cosine_decay_schedule(0.0, options.rate, WARMUP, max(options.steps, 2 * WARMUP))
    make = OPTIMIZERS[options.optimizer]
    demo.optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), make(schedule, matrices, DEVICES, "data", weight_decay=1e-4, adam={"b2": 0.95})
    )

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
