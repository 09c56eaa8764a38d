"""Seconds and memory of planning, and of replanning under another pin, in a process that has planned before.

python -m bench.planning

Wall seconds after tracing, since planning partly uses a second thread. The plan's spans, simulated seconds and
fingerprint are computed when first read and are not included. The other pin splits the first parameter matrix, or
replicates it if it is split; ``Sharded.with_pins`` replans under it.
"""

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from bench import deep_steps, unrolled
from bench.example_steps import deep_gpt, load_example
from bench.fresh_process import measure_in_processes
from bench.report import table, versions
from meshdsl import models
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Split
from meshdsl.plan.plan import Plan
from meshdsl.util.text import percent_text


class Case(NamedTuple):
    """A step, its mesh, and a memory limit in bytes per device (default: the topology's)."""

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
    """Prints the table."""
    rows = measure_in_processes("bench.planning", __doc__, CASES, measure)
    print(table(HEADER, rows), f"\n{versions()}")


def measure(case: str) -> tuple[object, ...]:
    """Plans a case and returns its table row."""
    make, mesh, memory = CASES[case]
    example = load_example("mlp").program
    _plan(_sharded(example, mesh), example.args)
    program = make()
    sharded = _sharded(program, mesh, memory)
    first, seconds = _plan(sharded, program.args)
    path, layout = _another_pin(first)
    second, replanning = _plan(sharded.with_pins({path: layout}), program.args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    figures = f"{seconds:.2f}", percent_text(first.gap), f"{replanning:.2f}", percent_text(second.gap), f"{peak:.2f} GB"
    return case, mesh, sum(first.operations.values()), *figures


def _sharded(program: Program, mesh: Mesh, memory: float | None = None) -> Sharded[..., Any]:
    return parallelize(program.step, mesh, program.layouts, rules=program.rules, memory=memory)


def _plan(sharded: Sharded[..., Any], args: tuple[Any, ...]) -> tuple[Plan, float]:
    """Returns the plan and the seconds of planning after tracing."""
    stages = sharded.stages(*args)
    start = time.perf_counter()
    return stages.planned.plan, time.perf_counter() - start


def _another_pin(plan: Plan) -> tuple[str, Layout]:
    """Returns the path of the first parameter matrix and a layout other than its planned one."""
    array = next(array for array in plan.inputs if array.path.startswith("params") and len(array.shape) > 1)
    axis = plan.mesh.names[0]
    replicated = array.layout.on(axis) is B
    return array.path, Layout(**{axis: Split(len(array.shape) - 1) if replicated else B})


if __name__ == "__main__":
    main()
