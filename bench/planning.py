"""Seconds and memory of planning, and of planning again under another pin, in a process that has planned before.

python -m bench.planning

Seconds are those of the clock, after tracing; two threads take part in some of it. What is not planning, the plan's
spans, its simulated seconds and its fingerprint, is worked out when it is first read, and is not in them. The other pin
splits the first matrix of the parameters, or leaves it whole if it is split; the plan with it is made as
``Sharded.with_pins`` makes it.
"""

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import deep_steps, unrolled
from bench.fresh_process import measure_in_processes
from bench.programs import deep_gpt, load_example
from bench.report import table, versions
from meshdsl import models
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Split
from meshdsl.plan.plan import Plan


class Case(NamedTuple):
    """A step, its mesh, and the bytes of a device if not those of the topology."""

    make: Callable[[], Program]
    mesh: Mesh
    memory: float | None = None


TWO = Mesh(data=128, model=8, topology="dgx-h100")
SMALLER = Mesh(data=16, model=8, topology="dgx-h100")
THREE = Mesh(pod=8, data=16, model=8, topology="dgx-h100")
CASES: dict[str, Case] = {
    "the demo's step": Case(lambda: load_example("gpt").program, Mesh(data=4, model=2)),
    "GPT of 12 layers, unrolled": Case(lambda: deep_gpt(12), Mesh(data=8, model=8)),
    "GPT of 48 layers, unrolled": Case(lambda: deep_gpt(48), Mesh(data=8, model=8)),
    "GPT-3 175B": Case(lambda: models.build("gpt3-175b", "fsdp+tensor", batch=1536), TWO),
    "GPT-3 of 48 layers, unrolled": Case(lambda: unrolled.gpt3(48), TWO),
    "GPT-3 of 48 layers, unrolled, three axes": Case(lambda: unrolled.gpt3(48), THREE),
    "GPT-3 175B, unrolled, no limit of memory": Case(unrolled.gpt3, TWO, 1e15),
    "GPT-3 175B, unrolled": Case(unrolled.gpt3, TWO),
    "GPT-3 175B, unrolled, three axes": Case(unrolled.gpt3, THREE),
    "Llama 3 405B, unrolled": Case(unrolled.llama3, TWO),
    "Llama 3 405B, unrolled, three axes": Case(unrolled.llama3, THREE),
    "12 layers, 8 microbatches, unrolled": Case(deep_steps.gradient_accumulation, SMALLER),
    "encoder and decoder, 24 layers each, unrolled": Case(deep_steps.encoder_decoder, SMALLER),
    "80 layers with adapters, unrolled": Case(deep_steps.low_rank_adapters, SMALLER),
    "LSTM, 200 time steps, unrolled": Case(deep_steps.unrolled_lstm, SMALLER),
    "LSTM, 200 time steps, unrolled, three axes": Case(deep_steps.unrolled_lstm, THREE),
    "encoder and decoder, 24 layers each, unrolled, three axes": Case(deep_steps.encoder_decoder, THREE),
}
HEADER = ("step", "mesh", "operations", "seconds", "gap", "another pin", "gap", "peak memory of the process")


def main() -> None:
    rows = measure_in_processes("bench.planning", __doc__, CASES, measure)
    print(table(HEADER, rows), f"\n{versions()}")


def measure(case: str) -> tuple[object, ...]:
    """A row of the table."""
    make, mesh, memory = CASES[case]
    example = load_example("mlp").program
    _plan(_sharded(example, mesh), example.args)
    program = make()
    sharded = _sharded(program, mesh, memory)
    first, seconds = _plan(sharded, program.args)
    path, layout = _other(first)
    again, sooner = _plan(sharded.with_pins({path: layout}), program.args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    figures = f"{seconds:.2f}", f"{first.gap:.2%}", f"{sooner:.2f}", f"{again.gap:.2%}", f"{peak:.2f} GB"
    return case, mesh, sum(first.operations.values()), *figures


def _sharded(program: Program, mesh: Mesh, memory: float | None = None) -> Sharded[..., Any]:
    return parallelize(program.step, mesh, program.layouts, rules=program.rules, memory=memory)


def _plan(sharded: Sharded[..., Any], args: tuple[Any, ...]) -> tuple[Plan, float]:
    """The plan, and the seconds of planning after tracing."""
    stages = sharded.stages(*args)
    start = time.perf_counter()
    return stages.planned.plan, time.perf_counter() - start


def _other(plan: Plan) -> tuple[str, Layout]:
    """A matrix of the parameters and a layout that it does not have."""
    array = next(array for array in plan.inputs if array.path.startswith("params") and len(array.shape) > 1)
    axis = plan.mesh.names[0]
    whole = array.layout.on(axis) is B
    return array.path, Layout(**{axis: Split(len(array.shape) - 1) if whole else B})


if __name__ == "__main__":
    main()
