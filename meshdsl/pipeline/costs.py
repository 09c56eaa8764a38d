"""What the parts of a pipeline cost, as the plan has them; and the two predictions that follow.

A step of a pipeline is ticks, in which stages go forward and backward, hand on what they made, and begin the backward
of a microbatch (the head); before and after them comes what is done once. What embedding, head and loss take is shared
by all ranks, as they are planned over all axes.

    lockstep       every tick takes as long as what is done in it, bubbles included: what the executor does, and the
                   seconds of the plan
    asynchronous   every rank begins a task as soon as what it needs has arrived, and handing on takes nobody's time
"""

from dataclasses import dataclass

FORWARD, BACKWARD, WEIGHTS, HEAD, HANDING, STASH = "forward", "backward", "weights", "head", "handing", "stash"
_MARK = "meshdsl-part-"


def part_scope(part: str) -> str:
    """The name scope under which a part of a tick is traced."""
    return f"{_MARK}{part}"


def part_of(scope: str) -> str:
    """The part of a tick that a name scope speaks of, the innermost; empty if it is outside of all."""
    return scope.rpartition(_MARK)[2].partition("/")[0].rstrip(")") if _MARK in scope else ""


@dataclass(frozen=True)
class Load:
    """What the work of one stage on one microbatch takes, on a device that has all of it.

    Args:
      forward: seconds. backward: likewise, what is computed again included.
      room: bytes that it needs while it runs, beside what it is given and makes.
    """

    forward: float
    backward: float
    room: int


@dataclass(frozen=True)
class Costs:
    """Predicted costs of a pipeline, per device and step.

    Args:
      forward: seconds of all forwards, embedding included. backward, weights, head, handing: likewise; ``weights`` are
        gradients in ticks of their own, ``handing`` is what the permutes between stages take.
      others: seconds of the rest of the step.
      kept: bytes of one microbatch in the stash.
      memory: bytes at the fullest point, with room for all that the first rank keeps.
      room: bytes among them for the work of the largest stage, where stages are not alike.
      exchanges: collectives by which a device hands on, mostly permutes. sent: bytes of them.
    """

    forward: float
    backward: float
    weights: float
    head: float
    handing: float
    others: float
    kept: int
    memory: int
    exchanges: int
    sent: int
    room: int = 0
