"""A strand: dims of one operation, and of its bodies, that are padded together."""

from dataclasses import dataclass
from typing import Any

Port = tuple[int, int]  # an operand, or beyond them a result, and its dim
InnerPort = tuple[int, Port]  # a body, and what it takes, or beyond that what it returns


@dataclass(frozen=True)
class Strand:
    """Dims of one operation that are padded together.

    Args:
      size: their length.
      ports: where they are.
      fill: what the padding of the operands has to hold; None if that does not matter.
      column: of the indices of a gather or scatter, the one whose positions lie in this dim.
      inside: where the bodies of a loop or conditional have them.
    """

    size: int
    ports: tuple[Port, ...]
    fill: Any = None
    column: int | None = None
    inside: tuple[InnerPort, ...] = ()
