"""What happened to a run, in ``events.jsonl``, and the time that every fault cost.

    {"time": 1764146830.2, "event": "fault", "what": "process 1 of 2 ended with status -9", "after": 0.05}
    {"time": 1764146830.3, "event": "launch", "mesh": "data=4,model=2", "processes": 2}
    {"time": 1764146834.0, "event": "joined", ...}     and then: planned, restored, compiled, first step

The file is only appended to, a line at a time: by the first process of a run, and by the supervisor that leads it. On
one machine, lines are whole and in order. On two, which are those of a run whose first process is not on the leader's
machine, times are by the clock of each, and a network file system may spoil lines that both write in the same instant:
those that are not whole are not read.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.training.saving.folder import EVENTS
from meshdsl.util.text import seconds_text

Event = dict[str, Any]
FAULT, STOP, LAUNCH, FIRST_STEP, LAST_STEP, PLANNED = "fault", "stop", "launch", "first step", "last step", "planned"
JOINED, RESTORED, COMPILED = "joined", "restored", "compiled"
STAGES = {  # of a start, by the event that ends each
    LAUNCH: "launch",
    JOINED: "start",
    PLANNED: "plan",
    RESTORED: "restore",
    COMPILED: "compile",
    FIRST_STEP: "first step",
}


def add_event(folder: Path, event: str, **facts: Any) -> None:
    """Appends one event."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
    file = os.open(folder / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(file, line.encode())  # in one piece, between those of other processes
    finally:
        os.close(file)


def read_events(folder: Path) -> list[Event]:
    """Returns the events of a run; none without the file. A line that is not whole is left out."""
    try:
        text = (folder / EVENTS).read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [event for line in text.split("\n") if (event := _parsed(line))]


def _parsed(line: str) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"time", "event"} <= event.keys() else None


@dataclass(frozen=True)
class Downtime:
    """The time from a fault, or a stop to start more processes, to the next step.

    Args:
      time: when the processes were last known to make steps, in seconds since 1970.
      what: the fault, or the reason of the stop.
      stages: seconds by stage: ``detection`` (for a stop: ``saving``), ``launch`` (ending the other processes, waiting
        for a plan), ``start`` (processes start and join), ``plan``, ``restore``, ``compile``, ``first step``. What
        another fault cut off is missing.
    """

    time: float
    what: str
    stages: dict[str, float]

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.stages.values())

    def __str__(self) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(self.time))
        parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in self.stages.items())
        return f"{at}  {self.what}: {seconds_text(self.seconds)} without steps ({parts})"


def downtimes(events: Sequence[Event]) -> list[Downtime]:
    """Returns what each fault, and each stop to go on with more processes, cost.

    A downtime ends with the next step, the next fault or the last event.
    """
    ends = [i for i, event in enumerate(events) if event["event"] in (FAULT, STOP)]
    bounds = zip(ends, [*ends, len(events)][1:], strict=True)
    found = [_downtime(events[i], events[i + 1 : end]) for i, end in bounds]
    return [each for i, each in zip(ends, found, strict=True) if events[i]["event"] == FAULT or len(each.stages) > 1]


def _downtime(end: Event, after: Iterable[Event]) -> Downtime:
    stages = {"detection" if end["event"] == FAULT else "saving": float(end["after"])}
    stages.update(_stages(float(end["time"]), after))
    return Downtime(end["time"] - end["after"], end["what"], stages)


def _stages(last: float, events: Iterable[Event]) -> Iterator[tuple[str, float]]:
    for event in events:
        if event["event"] in STAGES:
            yield STAGES[event["event"]], max(0.0, float(event["time"]) - last)
            last = float(event["time"])
        if event["event"] == FIRST_STEP:
            return
