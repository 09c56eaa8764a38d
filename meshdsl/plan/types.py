"""The lines of a program, and what its operations take."""

from typing import NamedTuple


class Line(NamedTuple):
    """A line of the user's source, as it was when the plan was made.

    Args:
      source: as collectives name it, ``file.py:12``; the file with its folder where two have one name.
      function: that its operations come from; empty for a line around them.
      text: of the line, without its end; empty if it could not be read.
    """

    source: str
    function: str
    text: str


class Span(NamedTuple):
    """An operation that costs something, or several alike that follow each other.

    Args:
      line: position of its line in the plan's lines.
      name: of the operation.
      phase: forward, backward or optimizer.
      trips: how often it runs in a step.
      operations: how many there are.
      seconds: predicted, per trip, of computing and of moves within a device.
      memory: predicted bytes per device, at the fullest point from here to the next span.
      collectives: how many of the plan's collectives, in their order, it waits for.
    """

    line: int
    name: str
    phase: str
    trips: int
    operations: int
    seconds: float
    memory: int
    collectives: int


class Timing(NamedTuple):
    """What a step takes, operation by operation, and all of it if what nobody waits for is sent meanwhile."""

    spans: tuple[Span, ...] = ()
    simulated_seconds: float = 0.0
