"""The predicted step as a trace that https://ui.perfetto.dev and chrome://tracing open (Trace Event Format, JSON)."""

import json
from collections.abc import Iterator
from os import PathLike
from typing import Any

from meshdsl.plan.value import Plan
from meshdsl.report.timeline import events
from meshdsl.report.write import write_text


def perfetto_trace(plan: Plan) -> dict[str, Any]:
    """The timeline of a plan, with its memory as a counter; times in microseconds."""
    return {"traceEvents": [*_names(plan), *_events(plan), *_memory(plan)], "displayTimeUnit": "ms"}


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
