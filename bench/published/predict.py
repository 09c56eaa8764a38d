"""Predicts the step time of a row.

Without pipeline stages, the prediction is the plan's: simulated seconds if the system overlaps communication, else
sequential seconds. With stages, the step of one stage (its layers, embedding and head) is planned on the mesh without
``pipe``, for the row's microbatches and for twice as many. The difference is the time of the microbatches, the rest is
spent once per step; iteration counts of operations separate the layers from the rest of a microbatch. The stages are
then simulated under the row's own schedule (``meshdsl.schedules.simulate``), with the head on the last stage. Our own
pipelined program is not planned, since the measured systems do not run it: its ticks copy activations into a stash and
select chunks of weights.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import meshdsl as md
from bench.published.case import Case
from meshdsl.layouts.collective_cost import exchange_price
from meshdsl.layouts.topology import Topology, topology
from meshdsl.plan import Plan
from meshdsl.schedules.schedule import make_schedule
from meshdsl.schedules.simulate import Durations, time_schedule


@dataclass(frozen=True)
class Prediction:
    """The prediction of a row.

    Args:
      seconds: predicted seconds per step.
      planned: sequential seconds of the plan; with stages, of one stage and its microbatches.
      gap: relative optimality gap of the plan.
      sent: seconds of the plan's collectives.
      planning: processor seconds of planning.
    """

    seconds: float
    planned: float
    gap: float
    sent: float
    planning: float


def predict(case: Case, topology: Topology) -> Prediction:
    """Plans a row and predicts its step time."""
    start = time.process_time()
    plans = (
        [case.plan(topology)]
        if case.stages == 1
        else [case.stage(n * case.microbatches).plan(topology) for n in (1, 2)]
    )
    seconds = [plan.simulated_seconds if case.overlap else plan.seconds for plan in plans]
    total = seconds[0] if case.stages == 1 else _pipelined(case, topology, plans[0], seconds)
    sent = sum(c.seconds * c.trips for c in plans[0].collectives)
    return Prediction(total, plans[0].seconds, max(p.gap for p in plans), sent, time.process_time() - start)


def _pipelined(case: Case, topology: Topology, plan: Plan, seconds: Sequence[float]) -> float:
    """Returns seconds per pipelined step, given those of one stage for its microbatches and for twice as many."""
    microbatches, chunks = seconds[1] - seconds[0], case.chunks
    forward, backward, head = _shares(plan, case.microbatches)
    share = microbatches / case.microbatches / (forward + backward + head) / chunks
    last = 1 + head * chunks / (forward + backward)
    shares = [(1.0, 1.0)] * (case.stages * chunks - 1) + [(last, last)]
    permute = exchange_price("collective-permute", ("pipe",), md.Mesh.parse(case.mesh, topology)).seconds(
        case.stage_bytes
    )
    schedule = make_schedule("interleaved" if chunks > 1 else "1f1b", case.stages, case.microbatches, chunks)
    timed = time_schedule(schedule, Durations(forward * share, backward * share, 0.0, permute, shares))
    return timed.seconds + seconds[0] - microbatches


def _shares(plan: Plan, microbatches: int) -> tuple[float, float, float]:
    """Returns seconds per step of the layers' forward and backward passes, and of the rest of the microbatches."""
    total = {"forward": 0.0, "backward": 0.0, "head": 0.0}
    spans = [(span.phase, span.trips, span.seconds) for span in plan.spans]
    for phase, trips, seconds in (*spans, *((c.phase, c.trips, c.seconds) for c in plan.collectives)):
        if trips >= microbatches:
            total["head" if trips == microbatches else phase] += trips * seconds
    return total["forward"], total["backward"], total["head"]


def predictions(cases: Iterable[Case], cache: Path | None) -> Iterator[tuple[Case, Prediction]]:
    """Yields every row with its prediction, read from the file ``cache`` or computed and appended to it."""
    known = read_predictions(cache)
    for case in cases:
        if case.key not in known:
            known[case.key] = predict(case, topology(case.hardware))
            if cache:
                with cache.open("a") as file:
                    file.write(json.dumps([case.key, asdict(known[case.key])]) + "\n")
        yield case, known[case.key]


def read_predictions(file: Path | None) -> dict[str, Prediction]:
    """Returns the predictions in a file, by row key; empty if the file does not exist."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {key: Prediction(**fields) for key, fields in map(json.loads, lines)}
