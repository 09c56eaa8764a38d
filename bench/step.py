"""Step time and bytes of the demo's GPT: our program, the XLA partitioner, and four handwritten shardings.

python -m bench.step --rounds 30
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.example_steps import load_example, random_batch
from bench.peers import SCHEMES, by_hand, partitioned
from bench.report import interleave, machine, ratio, table
from meshdsl.api import parallelize
from meshdsl.calibrate import calibrate
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.shardings import device_mesh
from meshdsl.util.text import percent_text

OURS, XLA = "meshdsl", "XLA partitioner, our layouts"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    program, shape = load_example("gpt").program, Mesh(data=4, model=2)
    mesh = Mesh(topology=calibrate(shape), **dict(shape))
    sharded = parallelize(program.step, mesh, program.layouts, donate_argnums=(0, 1))
    plan = sharded.plan(*program.args)
    print(f"predicted {plan.seconds:.3f} s per step, gap {percent_text(plan.gap)}, {plan.bytes / 1e6:.1f} MB\n")

    devices = device_mesh(mesh)
    peers = {XLA: partitioned(program, devices, plan)}
    peers |= {name: by_hand(devices, name) for name in SCHEMES}
    compiled = {OURS: sharded.lower(*program.args).compile()}
    compiled |= {name: jitted.lower(*program.args).compile() for name, (jitted, _) in peers.items()}
    sent = {name: bytes_sent(executable.as_text(), mesh) for name, executable in compiled.items()}
    args = (*program.init(), random_batch(program))
    steps = {OURS: stepper(sharded, args, sharded.input_shardings(*args)[0])}
    steps |= {name: stepper(compiled[name], args, shardings) for name, (_, shardings) in peers.items()}
    print(_report(interleave(steps, options.rounds), sent), f"\n{options.rounds} interleaved steps; {machine()}")


def bytes_sent(text: str, mesh: Mesh) -> float:
    """Returns bytes that one device sends per step of a compiled program; collectives in loops count per iteration."""
    return float(sum(c.bytes * c.trips for c in compiled_collectives(text, mesh)))


def stepper(step: Callable[..., Any], args: tuple[Any, ...], shardings: Any = None) -> Callable[[], Any]:
    """Returns a function that advances its own copy of the state by one step and returns the step's last result.

    Args:
      step: ``step(*state, batch) -> (*state, results)``.
      args: the initial state, then the batch; copied, since the step may donate them.
      shardings: initial shardings of ``args``; None leaves them where they are.
    """
    own = jax.tree.map(lambda x: jnp.array(x, copy=True), args)
    own = own if shardings is None else jax.device_put(own, shardings)
    run = {"state": own[:-1]}

    def advance() -> Any:
        *run["state"], results = step(*run["state"], own[-1])
        return results

    return advance


def _report(seconds: dict[str, Any], sent: dict[str, float]) -> str:
    rows = [
        (
            name,
            f"{sorted(times)[len(times) // 2]:.3f}",
            "" if name == OURS else str(ratio(seconds[OURS], times)),
            f"{sent[name] / 1e6:.1f}",
        )
        for name, times in seconds.items()
    ]
    return table(("program", "seconds per step", "meshdsl / it (95%)", "MB per device and step"), rows)


if __name__ == "__main__":
    main()
