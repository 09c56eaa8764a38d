"""Verify: the compiled program communicates what the plan says, byte for byte.

Per kind of collective and set of mesh axes, the bytes that one device sends in one step are
summed over all trips, in the plan and in the compiled module, and have to be equal. Sums,
because XLA may combine several collectives into one instruction; sums of what is executed,
because the same collective costs more inside a loop than after it.

Three differences are not differences, and are noted instead: an all-reduce that was compiled
as the reduce-scatter and all-gather it consists of, floats that a backend sends in another
width (counted in the planned one), and loops whose trip count only the data decides (there
one trip is compared with one trip).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Protocol

from meshdsl.errors import VerifyError, faults
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo import CompiledCollective, compiled_collectives
from meshdsl.lowering.verify_report import Line, VerifyReport, line_text

Key = tuple[str, str]  # kind, axes


class PlannedCollective(Protocol):
    """What verify reads of a planned collective: ``bytes`` per device and trip."""

    @property
    def kind(self) -> str:
        """As the plan names it."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes, major first."""
        ...

    @property
    def bytes(self) -> int:
        """What one device sends per trip."""
        ...

    @property
    def trips(self) -> int:
        """Executions per step."""
        ...


def verify_compiled(planned: Sequence[PlannedCollective], text: str, mesh: Mesh) -> VerifyReport:
    """Compare planned collectives with the compiled HLO ``text`` of the step.

    Raises VerifyError, with both sides per kind and axes, if they differ.
    """
    return equal_or_error(compare(planned, compiled_collectives(text, mesh), mesh), "compiled")


def equal_or_error(report: VerifyReport, judged: str) -> VerifyReport:
    """The report, if both sides agree.

    Raises VerifyError, with both sides per kind and axes, if they differ.

    Args:
      judged: what is compared with the plan: the ``compiled`` or the ``lowered`` program.
    """
    if not report.equal:
        raise VerifyError(_difference(report, judged))
    return report


def compare(planned: Iterable[PlannedCollective], compiled: Iterable[CompiledCollective], mesh: Mesh) -> VerifyReport:
    """Both sides per kind and axes, with what was reconciled as notes."""
    planned, compiled = list(planned), list(compiled)
    guessed = {_key(c.kind, c.axes, c.group, mesh) for c in compiled if not c.known}
    left, slack = _planned_bytes(planned, guessed, mesh)
    right = _compiled_bytes(compiled, guessed, mesh)
    notes = [
        f"{kind} over {axes} runs in a loop of unknown length: one trip is compared" for kind, axes in sorted(guessed)
    ]
    notes += _recasts(compiled)
    notes += _join_halves(left, right)
    keys = sorted(key for key in left.keys() | right.keys() if left[key] or right[key])
    return VerifyReport(tuple(Line(*key, left[key], right[key], slack[key]) for key in keys), tuple(notes))


def _planned_bytes(
    planned: Iterable[PlannedCollective], guessed: set[Key], mesh: Mesh
) -> tuple[dict[Key, Fraction], dict[Key, Fraction]]:
    """Bytes per key, and how much of them may be rounding: half a byte per executed collective."""
    total, slack = defaultdict[Key, Fraction](Fraction), defaultdict[Key, Fraction](Fraction)
    for c in planned:
        key = _key(c.kind, c.axes, 0, mesh)
        trips = 1 if key in guessed else c.trips
        total[key] += c.bytes * trips
        slack[key] += Fraction(trips, 2)
    return total, slack


def _compiled_bytes(compiled: Iterable[CompiledCollective], guessed: set[Key], mesh: Mesh) -> dict[Key, Fraction]:
    total = defaultdict[Key, Fraction](Fraction)
    for c in compiled:
        key = _key(c.kind, c.axes, c.group, mesh)
        total[key] += c.bytes * (1 if key in guessed else c.trips)
    return total


def _key(kind: str, axes: tuple[str, ...] | None, group: int, mesh: Mesh) -> Key:
    """Axes in mesh order without those of one device: groups do not depend on either."""
    if axes is None:
        return kind, f"groups of {group}"
    return kind, ",".join(name for name, size in mesh if name in axes and size > 1)


def _recasts(compiled: Iterable[CompiledCollective]) -> list[str]:
    recast = sum(c.recast for c in compiled)
    return (
        [f"{recast} collectives send floats in another width on this backend; the planned one counts"] if recast else []
    )


def _join_halves(planned: dict[Key, Fraction], compiled: dict[Key, Fraction]) -> list[str]:
    """Turn reduce-scatter + all-gather back into the all-reduce that was planned, where that explains it."""
    notes = []
    for _, axes in [key for key in planned if key[0] == "all-reduce"]:
        whole, first, second = (("all-reduce", axes), ("reduce-scatter", axes), ("all-gather", axes))
        missing = (planned[whole] - compiled[whole]) / 2
        half = min(missing, compiled[first] - planned[first], compiled[second] - planned[second])
        if half > 0:
            compiled[whole] += 2 * half
            compiled[first] -= half
            compiled[second] -= half
            notes.append(f"all-reduce over {axes} was compiled as reduce-scatter and all-gather")
    return notes


def _difference(report: VerifyReport, judged: str) -> str:
    rows = [line_text(line) for line in report.lines if not line.equal]
    equal = sum(line.equal for line in report.lines)
    title = f"the {judged} program communicates otherwise than planned (bytes per device and step)"
    text = {"compiled": "sharded.lower(*args).compile().as_text()", "lowered": "sharded.lower(*args).as_text('hlo')"}
    remedy = f"{equal} other kinds agree; the {judged} text is {text[judged]}"
    return faults(title, rows + [f"note: {note}" for note in report.notes], remedy)
