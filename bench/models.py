"""Seconds to trace and to plan the training steps of large models on 1,024 devices, each in a fresh process.

python -m bench.models

Layers are one loop, and no devices are needed. Importing jax and flax is not counted; everything else is: the
shapes of the parameters, tracing forward, backward and update, the search, and the certificate. Seconds are those
of the processor, which other programs on the machine do not change much; tracing and planning use one at a time.
"""

import time

from bench.apart import rows_apart
from bench.report import table, versions
from meshdsl import models
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topology import topology
from meshdsl.pad import plan_program
from meshdsl.pins import make_pins
from meshdsl.trace import trace
from meshdsl.units import bytes_text, seconds_text

MESH = Mesh(data=128, model=8, topology=topology("dgx-h100"))
CASES = {  # sequences per step
    "gpt3-175b": 1536,
    "llama3-405b": 256,
}
STRATEGY = "fsdp+tensor"
HEADER = ("step", "operations", "trace, s", "plan, s", "predicted step", "gap", "memory", "sent")


def main() -> None:
    """The command."""
    rows = rows_apart("bench.models", __doc__, CASES, measure)
    print(f"{STRATEGY} on {MESH}, {MESH.topology.name}\n{table(HEADER, rows)}\n{versions()}")


def measure(case: str) -> tuple[object, ...]:
    """A row of the table."""
    start = time.process_time()
    program = models.build(case, STRATEGY, batch=CASES[case])
    traced = trace(program.step, program.args)
    middle = time.process_time()
    _, plan = plan_program(traced, MESH, lambda padded: make_pins(padded, MESH, rules=program.rules))
    end = time.process_time()
    figures = seconds_text(plan.seconds), f"{plan.gap:.1%}", bytes_text(plan.memory), bytes_text(plan.bytes)
    return case, sum(plan.operations.values()), f"{middle - start:.1f}", f"{end - middle:.1f}", *figures


if __name__ == "__main__":
    main()
