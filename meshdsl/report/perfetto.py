"""The predicted step as a trace that https://ui.perfetto.dev and chrome://tracing open (Trace Event Format, JSON)."""

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

from meshdsl.pipeline.timing import Timing
from meshdsl.plan.value import Plan
from meshdsl.report.timeline import events
from meshdsl.report.write import write_text


def perfetto_trace(plan: Plan) -> dict[str, Any]:
    """The timeline of a plan, with its memory as a counter and the ranks of a pipeline; times in microseconds."""
    return {"traceEvents": [*_names(plan), *_events(plan), *_memory(plan), *_ranks(plan)], "displayTimeUnit": "ms"}


def save_perfetto(plan: Plan, path: str | PathLike[str]) -> None:
    """Write the trace; ArgumentError for what is no path, MeshDSLError if it cannot be written."""
    write_text(path, json.dumps(perfetto_trace(plan)))


def _names(plan: Plan) -> Iterator[dict[str, Any]]:
    title = f"{plan.name} on {plan.mesh}, {plan.topology.name} (predicted)"
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    for lane, thread in _threads(plan).items():
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": lane}}


def _threads(plan: Plan) -> dict[str, int]:
    return {lane: i for i, lane in enumerate(dict.fromkeys(event.lane for event in events(plan)))}


def _events(plan: Plan) -> Iterator[dict[str, Any]]:
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


def _memory(plan: Plan) -> Iterator[dict[str, Any]]:
    now, sent = 0.0, iter(plan.collectives)
    for span in plan.spans:
        yield {"ph": "C", "pid": 0, "name": "memory", "ts": now * 1e6, "args": {"bytes": span.memory}}
        waited = (next(sent) for _ in range(span.collectives))
        now += sum(c.seconds * c.trips for c in waited) + span.seconds * span.trips


def _ranks(plan: Plan) -> Iterator[dict[str, Any]]:
    """The loops of a pipeline, a process for each prediction, a thread per rank."""
    if plan.pipeline is None or plan.pipeline.costs is None:
        return
    forecast = plan.pipeline.forecast
    yield from _predicted(1, f"{plan.pipeline.axis}, in lockstep", forecast.in_step)
    yield from _predicted(2, f"{plan.pipeline.axis}, asynchronous", forecast.as_soon)


def _predicted(process: int, title: str, timing: Timing) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}
    for rank, tasks in enumerate(timing.schedule.ranks):
        where = {"pid": process, "tid": rank}
        yield {"ph": "M", **where, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        for task in tasks:
            begin, end = timing.begin[task], timing.end[task]
            named = {"name": str(task), "cat": _CATEGORY[task.kind], "ts": begin * 1e6, "dur": (end - begin) * 1e6}
            yield {"ph": "X", **where, **named, "args": {"stage": task.stage, "microbatch": task.microbatch}}


_CATEGORY = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}
