"""Seconds to trace and to plan the training steps of large models, each in a fresh process.

python -m bench.models

Layers are one loop; no devices are needed. Wall seconds, since planning partly uses a second thread: everything but
importing jax and flax counts (shapes of the parameters, tracing of forward pass, backward pass and update, the search,
and the lower bound).
"""

import time
from dataclasses import dataclass
from itertools import pairwise

from bench.fresh_process import measure_in_processes
from bench.report import table, versions
from meshdsl import models
from meshdsl.api import parallelize
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.mesh import Mesh
from meshdsl.schedules.spec import Pipeline
from meshdsl.util.text import bytes_text, percent_text, seconds_text

TOPOLOGY, STRATEGY, THREE = "dgx-h100", "fsdp+tensor", "pod=8,data=16,model=8"


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Args:
      model: its name in ``meshdsl.models``.
      batch: sequences per step.
      mesh: its axes; ``pipe``, if present, splits the layers into stages.
      microbatches: per step, if the mesh has ``pipe``.
    """

    model: str
    batch: int
    mesh: str = "data=128,model=8"
    microbatches: int = 0

    @property
    def rules(self) -> Rules:
        """The rules of the strategy, plus ``layers:pipe`` if there are stages."""
        rules = Rules.of(models.build(self.model, STRATEGY, batch=self.batch).rules)
        if self.microbatches:
            rules = Rules(f"{rules.table} layers:pipe", params=rules.params, optimizer=rules.optimizer)
        return rules


CASES = {
    "gpt3-175b": Case("gpt3-175b", 1536),
    "llama3-405b": Case("llama3-405b", 256),
    "gpt3-175b, three axes": Case("gpt3-175b", 1536, THREE),
    "llama3-405b, three axes": Case("llama3-405b", 256, THREE),
    "llama3-405b, 16 stages": Case("llama3-405b", 2048, "pipe=16,data=128,model=8", 16),
}
HEADER = ("step", "mesh", "operations", "trace, s", "stages, s", "plan, s", "predicted step", "gap", "memory", "sent")


def main() -> None:
    """Prints the table."""
    rows = measure_in_processes("bench.models", __doc__, CASES, measure)
    print(f"{STRATEGY}, {TOPOLOGY}\n{table(HEADER, rows)}\n{versions()}")


def measure(name: str) -> tuple[object, ...]:
    """Plans a case and returns its table row."""
    times, case = [time.perf_counter()], CASES[name]
    program = models.build(case.model, STRATEGY, batch=case.batch)
    pipeline = Pipeline(case.microbatches) if case.microbatches else None
    mesh = Mesh.parse(case.mesh, TOPOLOGY)
    stages = parallelize(program.step, mesh, rules=case.rules, pipeline=pipeline).stages(*program.args)
    times.append(time.perf_counter())
    _ = stages.program
    times.append(time.perf_counter())
    plan = stages.planned.plan
    times.append(time.perf_counter())
    seconds = (f"{b - a:.1f}" for a, b in pairwise(times))
    figures = seconds_text(plan.seconds), percent_text(plan.gap), bytes_text(plan.memory), bytes_text(plan.bytes)
    return case.model, mesh, sum(plan.operations.values()), *seconds, *figures


if __name__ == "__main__":
    main()
