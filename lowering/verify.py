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
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import jax

from meshdsl.errors import VerifyError, faults, first_line
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.aot_targets import CompileTarget
from meshdsl.lowering.hlo.collectives import CompiledCollective, collectives_of_module
from meshdsl.lowering.hlo.dedup import deduplicate
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import Module, parse_module
from meshdsl.util.text import bytes_text

# ---- Verify report ---------------------------------------------------------------------------------------------------
# What verify returns: planned and compiled communication side by side, and what a device holds and computes.


@dataclass(frozen=True)
class VerifyLine:
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
class DeviceUsage:
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

    lines: tuple[VerifyLine, ...]
    notes: tuple[str, ...] = ()
    held: DeviceUsage | None = None
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
        held = _held_line(self.held, bool(self.target)) if self.held else []
        first = [f"compiled for {self.target}"] if self.target else []
        return "\n".join([*first, *rows, *held, *(f"note: {note}" for note in self.notes)])


def line_text(line: VerifyLine) -> str:
    """A row of the table; of a difference it says how large it is."""
    mark = "" if line.equal else f"   differs by {_count(line.compiled - line.planned, '+')}"
    made = "" if line.made is None else f" {_count(line.made):>16}"
    return f"{line.kind:20} {line.axes:20} {_count(line.planned):>16} {_count(line.compiled):>16}{made}{mark}"


def _held_line(held: DeviceUsage, lowered: bool) -> list[str]:
    """Rows under those of the collectives; of a program that is only lowered, nothing of this is known."""
    gap = " " * 17 if lowered else ""
    pairs = {
        "memory": (bytes_text(held.memory), bytes_text(held.compiled_memory)),
        "FLOPs of products": (f"{held.flops:.4g}", f"{held.compiled_flops:.4g}"),
    }
    return [f"{what + ' per device':41} {ours:>16} {gap}{theirs:>16}" for what, (ours, theirs) in pairs.items()]


def _count(number: Fraction, sign: str = "") -> str:
    return f"{int(number):{sign},}" if number.denominator == 1 else f"{float(number):{sign},.2f}"


# ---- Verify ----------------------------------------------------------------------------------------------------------


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
    return VerifyReport(tuple(VerifyLine(*key, left[key], right[key], slack[key]) for key in keys), tuple(notes))


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


# ---- Judged ----------------------------------------------------------------------------------------------------------
# Verify a planned step with a compiler: that of the devices at hand, or of a target that is not there.
#
# For the devices at hand the compiled program itself has to communicate what the plan says. A target's compiler may
# rewrite collectives: a TPU's makes an all-reduce of a small reduce-scatter and keeps a part of it, or cuts one into
# permutes that run beside the product they belong to. There the program is compared as it was lowered, exactly, and the
# report says beside it what the compiler made of it, how much memory that takes, and whether it fits.


@dataclass(frozen=True)
class ExpectedCommunication:
    """What a plan says of one device and step: collectives, bytes at the fullest point, FLOPs of products."""

    collectives: Sequence[PlannedCollective]
    memory: int
    flops: float


def verify_here(planned: ExpectedCommunication, compiled: jax.stages.Compiled, mesh: Mesh) -> VerifyReport:
    """Compare a plan with what was compiled for the devices at hand; VerifyError if it communicates otherwise."""
    module = parse_module(compiled.as_text() or "")
    report = compare(planned.collectives, collectives_of_module(module, mesh), mesh)
    return replace(equal_or_error(report, "compiled"), held=_held(planned, compiled, module))


def verify_target(
    planned: ExpectedCommunication, lowered: jax.stages.Lowered, mesh: Mesh, target: CompileTarget
) -> VerifyReport:
    """Compare a plan with the program that was lowered for a target, and say what its compiler makes of it.

    Raises VerifyError if the lowered program communicates otherwise than planned, or does not fit the target's memory.
    """
    before = deduplicate(parse_module(lowered.as_text("hlo", debug_info=True)))
    report = equal_or_error(compare(planned.collectives, collectives_of_module(before, mesh), mesh), "lowered")
    compiled = _compiled(planned, lowered, target)
    module = parse_module(compiled.as_text() or "")
    held = _held(planned, compiled, module)
    if held.compiled_memory > target.memory:
        raise _too_large(planned, target, f"{bytes_text(held.compiled_memory)}, of {bytes_text(target.memory)}")
    made = compare(planned.collectives, collectives_of_module(module, mesh), mesh)
    return VerifyReport(
        _beside(report.lines, made.lines),
        (*report.notes, *made.notes, *_rewritten(made.lines)),
        held,
        f"{target} by {target.compiler}",
    )


def _compiled(
    planned: ExpectedCommunication, lowered: jax.stages.Lowered, target: CompileTarget
) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _too_large(planned, target, first_line(error)) from error


def _too_large(planned: ExpectedCommunication, target: CompileTarget, said: str) -> VerifyError:
    need = f"planned are {bytes_text(planned.memory)}"
    return VerifyError(f"the step does not fit {target}: {need}, and {target.compiler} says: {said}")


def _held(planned: ExpectedCommunication, compiled: jax.stages.Compiled, module: Module) -> DeviceUsage:
    return DeviceUsage(planned.memory, planned.flops, compiled_bytes(compiled), product_flops(module))


def compiled_bytes(compiled: Any) -> int:
    """What one device holds while a compiled program runs: arguments, results and temporary values."""
    found = compiled.memory_analysis()
    outside = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(outside + found.temp_size_in_bytes)


def _beside(lowered: Sequence[VerifyLine], made: Sequence[VerifyLine]) -> tuple[VerifyLine, ...]:
    """Both comparisons in one table; what only the compiler's program has was neither planned nor lowered."""
    before, after = ({(line.kind, line.axes): line for line in lines} for lines in (lowered, made))
    nothing = Fraction(0)
    rows = (
        replace(
            before.get(key) or VerifyLine(*key, nothing, nothing, nothing),
            made=after[key].compiled if key in after else nothing,
        )
        for key in sorted(before.keys() | after.keys())
    )
    return tuple(rows)


def _rewritten(lines: Sequence[VerifyLine]) -> list[str]:
    """One line if the compiler sends otherwise than it was told."""
    if all(line.equal for line in lines):
        return []
    planned, made = (sum(getattr(line, side) for line in lines) for side in ("planned", "compiled"))
    return [f"the compiler rewrote collectives: it sends {bytes_text(float(made))}, planned are {bytes_text(planned)}"]
