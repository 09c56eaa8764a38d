"""What our planner says a row takes.

A row without stages takes what its plan says: the simulated step if the system overlaps, else one thing after the
other. Of a row with stages, the planner plans the whole step as 1f1b; how long
its tasks take comes from that plan, and when they run from the row's own schedule, every rank as soon as it can
(``Forecast.asynchronous``). Interleaved chunks are timed, not planned: in our program every tick picks its chunk's
weights from all of them, which the programs that were measured do not.
"""

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.published.case import Case
from meshdsl.layouts.topology import Topology, topology
from meshdsl.pipeline.generators import make_schedule
from meshdsl.pipeline.pipelined import Pipelined
from meshdsl.pipeline.timing import time_schedule
from meshdsl.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a row.

    Args:
      seconds: of the step. planned: what the plan says of one thing after the other, in lockstep if it has stages.
      gap: of the plan, how far from the optimum it can be. sent: seconds of its collectives.
      planning: seconds of processor time that it took.
    """

    seconds: float
    planned: float
    gap: float
    sent: float
    planning: float


def predict(case: Case, topology: Topology) -> Prediction:
    """Plan a row and time it."""
    start = time.process_time()
    plan = case.plan(topology)
    sent = sum(c.seconds * c.trips for c in plan.collectives)
    return Prediction(step_seconds(case, plan), plan.seconds, plan.gap, sent, time.process_time() - start)


def step_seconds(case: Case, plan: Plan) -> float:
    """Seconds of a step under its schedule."""
    pipeline = plan.pipeline
    if pipeline is not None and pipeline.axis:
        return _staged(pipeline, case.chunks)
    return plan.simulated_seconds if case.overlap else plan.seconds


def _staged(pipeline: Pipelined, chunks: int) -> float:
    forecast, costs = pipeline.forecast, pipeline.costs
    if chunks == 1 or costs is None:
        return forecast.asynchronous
    whole = forecast.durations
    each = replace(whole, forward=whole.forward / chunks, inputs=whole.inputs / chunks, weights=whole.weights / chunks)
    schedule = make_schedule("interleaved", pipeline.ranks, pipeline.microbatches, chunks)
    return time_schedule(schedule, each).seconds + costs.head + costs.others


def predictions(cases: Iterable[Case], kept: Path | None) -> Iterator[tuple[Case, Prediction]]:
    """Every row with its prediction; those in the file ``kept`` are taken from there, others are added to it."""
    known = _read(kept) if kept and kept.exists() else {}
    for case in cases:
        key = f"{case.table} {case.number}"
        if key not in known:
            known[key] = predict(case, topology(case.hardware))
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps([key, asdict(known[key])]) + "\n")
        yield case, known[key]


def _read(file: Path) -> dict[str, Prediction]:
    return {key: Prediction(**found) for key, found in map(json.loads, file.read_text().splitlines())}
