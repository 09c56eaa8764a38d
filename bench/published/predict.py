"""What our planner says a row takes.

A row without stages takes what its plan says: the simulated step if the system overlaps, else one thing after the
other. Of a row with stages, the planner plans the step of one stage: its layers, and embedding and head, for as many
microbatches and for twice as many, on the mesh without ``pipe``. The difference is what these take, the remainder what
is done once; which part of a microbatch is the layers' is read from how often operations run. When stages then run is
the row's own schedule (``meshdsl.schedules.simulate``), with the head on the last stage. The whole step as our own
program
runs it is not what was measured: its ticks copy what they keep into a stash, and pick chunks of weights from all of
them.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import meshdsl as md
from bench.published.case import Case
from meshdsl.layouts.collective_cost import price
from meshdsl.layouts.topology import Topology, topology
from meshdsl.plan import Plan
from meshdsl.schedules.schedule import make_schedule
from meshdsl.schedules.simulate import Durations, time_schedule


@dataclass(frozen=True)
class Prediction:
    """What is predicted of a row.

    Args:
      seconds: of the step. planned: one thing after the other; of one stage and its microbatches if the row has stages.
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
    plans = (
        [case.plan(topology)]
        if case.stages == 1
        else [case.stage(n * case.microbatches).plan(topology) for n in (1, 2)]
    )
    seconds = [plan.simulated_seconds if case.overlap else plan.seconds for plan in plans]
    found = seconds[0] if case.stages == 1 else _staged(case, topology, plans[0], seconds)
    sent = sum(c.seconds * c.trips for c in plans[0].collectives)
    return Prediction(found, plans[0].seconds, max(p.gap for p in plans), sent, time.process_time() - start)


def _staged(case: Case, topology: Topology, plan: Plan, seconds: Sequence[float]) -> float:
    """Seconds of a step of which one stage takes ``seconds`` for its microbatches, and for twice as many."""
    all_of_them, chunks = seconds[1] - seconds[0], case.chunks
    forward, backward, head = _shares(plan, case.microbatches)
    share = all_of_them / case.microbatches / (forward + backward + head) / chunks
    last = 1 + head * chunks / (forward + backward)
    shares = [(1.0, 1.0)] * (case.stages * chunks - 1) + [(last, last)]
    handed = price("collective-permute", ("pipe",), md.Mesh.parse(case.mesh, topology)).seconds(case.handed)
    schedule = make_schedule("interleaved" if chunks > 1 else "1f1b", case.stages, case.microbatches, chunks)
    timed = time_schedule(schedule, Durations(forward * share, backward * share, 0.0, handed, shares))
    return timed.seconds + seconds[0] - all_of_them


def _shares(plan: Plan, microbatches: int) -> tuple[float, float, float]:
    """Of a step in microbatches, seconds of the layers' forward and backward, and of what runs once per microbatch."""
    found = {"forward": 0.0, "backward": 0.0, "head": 0.0}
    spans = [(span.phase, span.trips, span.seconds) for span in plan.spans]
    for phase, trips, seconds in (*spans, *((c.phase, c.trips, c.seconds) for c in plan.collectives)):
        if trips >= microbatches:
            found["head" if trips == microbatches else phase] += trips * seconds
    return found["forward"], found["backward"], found["head"]


def predictions(cases: Iterable[Case], kept: Path | None) -> Iterator[tuple[Case, Prediction]]:
    """Every row with its prediction; those in the file ``kept`` are taken from there, others are added to it."""
    known = read_predictions(kept)
    for case in cases:
        if case.key not in known:
            known[case.key] = predict(case, topology(case.hardware))
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps([case.key, asdict(known[case.key])]) + "\n")
        yield case, known[case.key]


def read_predictions(file: Path | None) -> dict[str, Prediction]:
    """The predictions in a file, by the keys of their rows; none if there is no file yet."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {key: Prediction(**found) for key, found in map(json.loads, lines)}
