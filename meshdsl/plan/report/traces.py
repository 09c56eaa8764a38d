"""The predicted step in time: serial, as the planner counts it, and as a trace for Perfetto.

A loop is one event, as long as all its iterations. Nothing overlaps here; ``meshdsl.plan.simulate`` predicts the step
with overlap.
"""

import json
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any, NamedTuple

from meshdsl.plan.types import PlanData
from meshdsl.schedules.simulate import ScheduleTiming
from meshdsl.util.files import write_text

COMPUTE = "compute"  # the lane of computation
_MAX_POINTS = 3000  # events and memory points that a page shows
_CATEGORY = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}  # of the tasks of a pipeline


# ---- Timeline --------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One event on a lane, all its iterations together.

    Args:
      lane: ``compute``, or the mesh axes that a collective runs over.
      name: name of the operation, or kind of the collective.
      phase: forward, backward or optimizer.
      line: index into the plan's lines.
      start: seconds from the beginning of the step.
      seconds: duration.
      trips: iterations per step.
      number: events that it is merged from.
    """

    lane: str
    name: str
    phase: str
    line: int
    start: float
    seconds: float
    trips: int
    number: int = 1

    @property
    def end(self) -> float:
        """Seconds from the beginning of the step at which it is over."""
        return self.start + self.seconds


def events(plan: PlanData) -> Iterator[Event]:
    """Every event of a step, in order."""
    now, waiting = 0.0, iter(plan.collectives)
    line_of = {line.source: i for i, line in enumerate(plan.lines)}
    for span in plan.spans:
        found = [
            Event(",".join(c.axes), c.kind, c.phase, line_of[c.source], 0.0, c.seconds * c.trips, c.trips)
            for c in (next(waiting) for _ in range(span.collectives))
        ]
        found.append(Event(COMPUTE, span.name, span.phase, span.line, 0.0, span.seconds * span.trips, span.trips))
        for event in found:
            if event.seconds:
                yield event._replace(start=now)
            now += event.seconds


def fit_events(timeline: Sequence[Event]) -> list[Any]:
    """The events as rows, lane by lane in order; neighbours too short to be told apart are merged."""
    shortest = (timeline[-1].end if timeline else 0.0) / _MAX_POINTS
    lanes: dict[str, list[Event]] = {}
    for event in timeline:
        lane = lanes.setdefault(event.lane, [])
        if lane and event.end - lane[-1].start < shortest:
            lane[-1] = _merged(lane[-1], event)
        else:
            lane.append(event)
    return [[*event] for lane in lanes.values() for event in lane]


def _merged(a: Event, b: Event) -> Event:
    """Two events as one, with the name of the longer one."""
    longer = max(a, b, key=lambda event: event.seconds / event.number)
    number = a.number + b.number
    return longer._replace(start=a.start, seconds=b.end - a.start, number=number)


def memory_points(plan: PlanData) -> list[list[Any]]:
    """Bytes, line, name and phase in program order: the largest of every stretch of equally many spans."""
    spans = plan.spans
    step = max(1, -(-len(spans) // _MAX_POINTS))
    stretches = (spans[i : i + step] for i in range(0, len(spans), step))
    fullest = (max(stretch, key=lambda span: span.memory) for stretch in stretches)
    return [[span.memory, span.line, span.name, span.phase] for span in fullest]


# ---- Trace Event Format ----------------------------------------------------------------------------------------------


def perfetto_trace(plan: PlanData) -> dict[str, Any]:
    """The timeline of a plan, with memory as a counter and the ranks of a pipeline, in microseconds.

    https://ui.perfetto.dev and chrome://tracing open it (Trace Event Format, JSON).
    """
    return {"traceEvents": [*_names(plan), *_events(plan), *_memory(plan), *_ranks(plan)], "displayTimeUnit": "ms"}


def save_perfetto(plan: PlanData, path: str | PathLike[str]) -> None:
    """Writes the trace; ArgumentError if ``path`` is not a path, MeshDSLError if the file cannot be written."""
    write_text(path, json.dumps(perfetto_trace(plan)))


def _names(plan: PlanData) -> Iterator[dict[str, Any]]:
    title = f"{plan.name} on {plan.mesh}, {plan.topology.name} (predicted)"
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    for lane, thread in _threads(plan).items():
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": lane}}


def _threads(plan: PlanData) -> dict[str, int]:
    return {lane: i for i, lane in enumerate(dict.fromkeys(event.lane for event in events(plan)))}


def _events(plan: PlanData) -> Iterator[dict[str, Any]]:
    threads = _threads(plan)
    for event in events(plan):
        yield {
            "ph": "X",
            "pid": 0,
            "tid": threads[event.lane],
            "name": event.name,
            "cat": event.phase,
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
            "args": {"line": plan.lines[event.line].source, "trips": event.trips},
        }


def _memory(plan: PlanData) -> Iterator[dict[str, Any]]:
    now, sent = 0.0, iter(plan.collectives)
    for span in plan.spans:
        yield {"ph": "C", "pid": 0, "name": "memory", "ts": now * 1e6, "args": {"bytes": span.memory}}
        waited = (next(sent) for _ in range(span.collectives))
        now += sum(c.seconds * c.trips for c in waited) + span.seconds * span.trips


def _ranks(plan: PlanData) -> Iterator[dict[str, Any]]:
    """The tasks of a pipeline: a process for each prediction, a thread per rank."""
    if plan.pipeline is None or plan.pipeline.costs is None:
        return
    forecast = plan.pipeline.forecast
    yield from _predicted(1, f"{plan.pipeline.axis}, in lockstep", forecast.lockstep_timing)
    yield from _predicted(2, f"{plan.pipeline.axis}, asynchronous", forecast.asynchronous_timing)


def _predicted(process: int, title: str, timing: ScheduleTiming) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
    for rank, tasks in enumerate(timing.schedule.ranks):
        where = {"pid": process, "tid": rank}
        yield {"ph": "M", **where, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for task in tasks:
            begin, end = timing.begin[task], timing.end[task]
            named = {"name": str(task), "cat": _CATEGORY[task.kind], "ts": begin * 1e6, "dur": (end - begin) * 1e6}
            yield {"ph": "X", **where, **named, "args": {"stage": task.stage, "microbatch": task.microbatch}}
