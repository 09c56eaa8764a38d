"""What verify returns: planned and compiled communication side by side, and what a device holds and computes."""

from dataclasses import dataclass
from fractions import Fraction

from meshdsl.units import bytes_text


@dataclass(frozen=True)
class Line:
    """One kind of collective over one set of axes: bytes per device and step on both sides.

    Args:
      slack: what may be rounding of the plan, to whole bytes where the formulas give fractions.
      made: what a target's compiler made of it, where the lowered program is what is compared; else None.
    """

    kind: str
    axes: str
    planned: Fraction
    compiled: Fraction
    slack: Fraction
    made: Fraction | None = None

    @property
    def equal(self) -> bool:
        """Whether both sides agree."""
        return abs(self.planned - self.compiled) <= self.slack


@dataclass(frozen=True)
class Held:
    """Memory of one device at its fullest point, and FLOPs of its products and convolutions per step.

    Args:
      memory, flops: as planned.
      compiled_memory: arguments, results and temporary values; results in donated arguments count once.
      compiled_flops: loops counted; those of unknown length once.
    """

    memory: int
    flops: float
    compiled_memory: int
    compiled_flops: int


@dataclass(frozen=True)
class VerifyReport:
    """Planned and compiled communication side by side.

    Args:
      held: memory and FLOPs; None where only texts were compared.
      target: the devices that were compiled for, and by what, if these are not there.
    """

    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    held: Held | None = None
    target: str = ""

    @property
    def equal(self) -> bool:
        """Whether every line agrees."""
        return all(line.equal for line in self.lines)

    def __str__(self) -> str:
        head = f"{'collective':20} {'axes':20} {'planned bytes':>16} {'compiled bytes':>16}"
        if self.target:
            head = f"{head.removesuffix('compiled bytes')} lowered bytes {'compiled bytes':>16}"
        rows = [head, *map(line_text, self.lines)] if self.lines else [f"{head}\nno collectives, as planned"]
        held = _held(self.held, bool(self.target)) if self.held else []
        first = [f"compiled for {self.target}"] if self.target else []
        return "\n".join([*first, *rows, *held, *(f"note: {note}" for note in self.notes)])


def line_text(line: Line) -> str:
    """A row of the table; of a difference it says how large it is."""
    mark = "" if line.equal else f"   differs by {_count(line.compiled - line.planned, '+')}"
    made = "" if line.made is None else f" {_count(line.made):>16}"
    return f"{line.kind:20} {line.axes:20} {_count(line.planned):>16} {_count(line.compiled):>16}{made}{mark}"


def _held(held: Held, lowered: bool) -> list[str]:
    """Rows under those of the collectives; of a program that is only lowered, nothing of this is known."""
    gap = " " * 17 if lowered else ""
    pairs = {
        "memory": (bytes_text(held.memory), bytes_text(held.compiled_memory)),
        "FLOPs of products": (f"{held.flops:.4g}", f"{held.compiled_flops:.4g}"),
    }
    return [f"{what + ' per device':41} {ours:>16} {gap}{theirs:>16}" for what, (ours, theirs) in pairs.items()]


def _count(number: Fraction, sign: str = "") -> str:
    return f"{int(number):{sign},}" if number.denominator == 1 else f"{float(number):{sign},.2f}"
