"""The predicted step in time: one thing after the other, as the planner counts it.

A loop stands once, as long as all its trips. Nothing overlaps here; what the hardware overlaps
comes on top.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from meshdsl.plan.value import Plan

COMPUTE = "compute"
_MOST = 3000  # events and points that a page shows


class Event(NamedTuple):
    """Something on a lane.

    Args:
      lane: ``compute``, or the mesh axes that a collective runs over.
      name: of the operation, or the kind of the collective.
      line: position in the plan's lines.
      start, seconds: of all trips together.
      number: how many events it stands for.
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
        """When it is over."""
        return self.start + self.seconds


def events(plan: Plan) -> Iterator[Event]:
    """Every event of a step, in order."""
    now, waiting = 0.0, iter(plan.collectives)
    place = {line.source: i for i, line in enumerate(plan.lines)}
    for span in plan.spans:
        found = [
            Event(",".join(c.axes), c.kind, c.phase, place[c.source], 0.0, c.seconds * c.trips, c.trips)
            for c in (next(waiting) for _ in range(span.collectives))
        ]
        found.append(Event(COMPUTE, span.name, span.phase, span.line, 0.0, span.seconds * span.trips, span.trips))
        for event in found:
            if event.seconds:
                yield event._replace(start=now)
            now += event.seconds


def fit_events(happened: Sequence[Event]) -> list[Any]:
    """The events as rows, neighbours too short to be told apart in one; each lane's in order."""
    least = (happened[-1].end if happened else 0.0) / _MOST
    lanes: dict[str, list[Event]] = {}
    for event in happened:
        lane = lanes.setdefault(event.lane, [])
        if lane and event.end - lane[-1].start < least:
            lane[-1] = _merged(lane[-1], event)
        else:
            lane.append(event)
    return [[*event] for lane in lanes.values() for event in lane]


def _merged(a: Event, b: Event) -> Event:
    """Both, named as the longer one."""
    longer = max(a, b, key=lambda event: event.seconds / event.number)
    number = a.number + b.number
    return longer._replace(start=a.start, seconds=b.end - a.start, number=number)


def memory_points(plan: Plan) -> list[list[Any]]:
    """Bytes, line, name and phase over the program, the fullest of every stretch of equal length."""
    spans = plan.spans
    step = max(1, -(-len(spans) // _MOST))
    stretches = (spans[i : i + step] for i in range(0, len(spans), step))
    fullest = (max(stretch, key=lambda span: span.memory) for stretch in stretches)
    return [[span.memory, span.line, span.name, span.phase] for span in fullest]
