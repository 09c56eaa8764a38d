"""Residuals in the host's memory: time and memory of steps, predicted and measured on a device, or compiled for others.

python -m bench.host_memory [TARGET ...] [--width 4096] [--layers 16] [--rows 8192] [--shares 0.8 0.6 0.4]
python -m bench.host_memory --context 65536 --memory 72GB

A step of layers in a loop, of two products and two sines each, in bfloat16, is planned within shares of the memory of
the plan that keeps everything: with ``host="auto"`` and with ``remat="auto"``. Without targets it runs on the first
device at hand; for targets, such as ``dgx-h100:8`` or ``tpu-v5e:2x4``, it is compiled, each device with so many rows.

With a length of context, Llama 3 8B is planned instead, with one such sequence on each of eight H100 (FSDP), with
``remat="auto"`` alone and with ``host="auto"``.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu import compiled_memory, from_leaves, timed
from bench.report import machine, table, versions
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.aot_targets import parse_target
from meshdsl.models import llama
from meshdsl.plan import Plan
from meshdsl.util.text import bytes_text, percent_text, seconds_text

MEANS: tuple[dict[str, Any], ...] = ({"host": "auto"}, {"remat": "auto"})
STEPS = 8  # that are timed


def main() -> None:
    """Prints a table per target, or one for the first device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="such as dgx-h100:8; default: the first device")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8192, help="per device")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.8, 0.6, 0.4])
    parser.add_argument("--context", type=int, help="tokens per sequence of Llama 3 8B, which is planned instead")
    parser.add_argument("--memory", default="72GB", help="limit for it; default: 72GB")
    options = parser.parse_args()
    if options.context:
        print(table(LONG, _long(options.context, options.memory)), f"\n{versions()}")
        return
    sizes = options.width, options.layers, options.rows
    for target in options.targets:
        found = parse_target(target)
        mesh = Mesh(data=found.size, topology=found.preset)
        print(table(HEADER, _rows(mesh, sizes, options.shares, target)), f"\n{versions()}, compiled for {target}")
    if not options.targets:
        print(table(HEADER, _rows(Mesh(data=1), sizes, options.shares)))
        print(f"\n{machine()}, {jax.devices()[0].device_kind}")


HEADER = ("limit", "may", "residuals there", "computed again", "predicted", "measured", "planned memory", "compiled")


LONG = ("may", "step", "memory", "on the host", "computed again", "gap", "planning")


def _long(context: int, memory: str) -> Iterator[list[str]]:
    config = replace(llama.CONFIGS["llama3-8b"], attend="fused", dtype="bfloat16", seq=context, remat="none")
    made = llama.program(config, llama.RULES["fsdp"], batch=8)
    mesh = Mesh(data=8, topology="dgx-h100")
    for means in ({"remat": "auto"}, {"remat": "auto", "host": "auto"}):
        name, start = " and ".join(f'`{word}="auto"`' for word in means), time.process_time()
        step = parallelize(made.step, mesh, rules=made.rules, memory=memory, donate_argnums=(0, 1), **means)
        try:
            plan = step.plan(*made.args)
        except MemoryLimitError as error:
            yield [name, "none fits", f"{bytes_text(error.least)} at least", *[""] * 4]
            continue
        again = plan.recomputation.seconds if plan.recomputation else 0.0
        sizes = seconds_text(plan.seconds), bytes_text(plan.memory), bytes_text(plan.host_memory), seconds_text(again)
        yield [name, *sizes, percent_text(plan.gap), f"{time.process_time() - start:.0f} s"]


def step(weights: Any, batch: Any) -> Any:
    """Returns updated weights, and the loss."""

    def loss(weights: Any) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return jnp.tanh(jnp.sin(x @ w[0]) @ w[1]), None

        y, _ = jax.lax.scan(layer, batch["x"], weights)
        return jnp.mean((y - batch["y"]).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def program(devices: int, width: int, layers: int, rows: int) -> Program:
    """Returns the step with its arguments; the rows of all devices together."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    return Program(step, ((of(layers, width, width),) * 2, dict.fromkeys("xy", of(devices * rows, width))))


def _rows(
    mesh: Mesh, sizes: tuple[int, int, int], shares: Sequence[float], target: str | None = None
) -> Iterator[list[str]]:
    made = program(mesh.size, *sizes)
    pins = {"batch/**": "data=S(0)"}

    def within(memory: float | str, **means: Any) -> Sharded:
        return parallelize(made.step, mesh, pins, memory=memory, donate_argnums=0, **means)

    everything = within("10TB")
    most = everything.plan(*made.args).memory
    yield ["", "keep all", *_facts(everything, made, target)]
    for means in MEANS:
        for share in shares:
            sharded, (name,) = within(share * most, **means), means
            try:
                sharded.plan(*made.args)
            except MemoryLimitError:
                yield [percent_text(share), f'`{name}="auto"`', "none fits", *[""] * 5]
            else:
                yield [percent_text(share), f'`{name}="auto"`', *_facts(sharded, made, target)]


def _facts(sharded: Sharded, made: Program, target: str | None) -> list[str]:
    """Returns the cells of a row behind the first two."""
    plan: Plan = sharded.plan(*made.args)
    if target is None:
        compiled = sharded.lower(*made.args).compile()
        call = from_leaves(compiled, made)
        measured = seconds_text(timed(call, made, sharded.input_shardings(*made.args)[0], STEPS)["measured"])
        memory = compiled_memory(compiled)
    else:
        held = sharded.verify(*made.args, target=target).held
        measured, memory = "", held.compiled_memory if held else 0
    residuals = len(plan.host.residuals) if plan.host else 0
    again = len(plan.recomputation.values) if plan.recomputation else 0
    size = f"{bytes_text(plan.memory)}", f"{bytes_text(memory)} ({memory / plan.memory:.2f})"
    return [str(residuals), str(again), seconds_text(plan.seconds), measured, *size]


if __name__ == "__main__":
    main()
