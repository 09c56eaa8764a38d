"""Seconds and memory of planning, after tracing, in a process that has planned something before.

python -m bench.planning
"""

import resource
import time
from collections.abc import Callable

from bench.apart import rows_apart
from bench.programs import deep_gpt, load_example
from bench.report import table, versions
from meshdsl.api import Program
from meshdsl.ir import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.pins import make_pins
from meshdsl.plan.build import build_plan
from meshdsl.planner.solve import solve
from meshdsl.trace import trace

CASES: dict[str, tuple[Callable[[], Program], Mesh]] = {
    "the demo's step": (lambda: load_example("gpt").program, Mesh(data=4, model=2)),
    "GPT of 12 layers": (lambda: deep_gpt(12), Mesh(data=8, model=8)),
}
HEADER = ("step", "mesh", "operations", "seconds", "gap", "peak memory of the process")


def main() -> None:
    rows = rows_apart("bench.planning", __doc__, CASES, measure)
    print(table(HEADER, rows), f"\n{versions()}")


def measure(case: str) -> tuple[object, ...]:
    """A row of the table."""
    make, mesh = CASES[case]
    _plan(load_example("mlp").program, mesh)
    operations, seconds, gap = _plan(make(), mesh)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return case, mesh, operations, f"{seconds:.2f}", f"{gap:.2%}", f"{peak:.2f} GB"


def _plan(program: Program, mesh: Mesh) -> tuple[int, float, float]:
    traced = trace(program.step, program.args)
    start = time.perf_counter()
    pins = make_pins(traced, mesh, program.layouts, {})
    plan = build_plan(traced, solve(traced, mesh, pins), pins)
    return sum(1 for _ in walk(traced.graph)), time.perf_counter() - start, plan.gap


if __name__ == "__main__":
    main()
