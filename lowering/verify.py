"""Verification: the compiled program communicates as planned, byte for byte.

Per kind of collective and set of mesh axes, the bytes that one device sends in one step are summed over all iterations,
in the plan and in the compiled module, and have to be equal. So are the collectives that run, each of which costs a
latency: the compiled program may have fewer, since XLA combines several into one instruction, but not more. Sums over
iterations, because a collective costs more inside a loop than after it.

For devices whose compilers order the program, TPUs and GPUs, the report also has what runs beside each compiled
collective, and whether that covers what the plan hides (``meshdsl.lowering.overlap``).

Four differences are reported as notes: collectives that the compiler combined, an all-reduce that was compiled as the
reduce-scatter and all-gather it consists of, numbers that a backend sends in another width (counted in the planned
width), and loops whose number of iterations depends on data (one iteration is compared with one).
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import jax

from meshdsl.errors import DeviceError, VerifyError, faults, first_line
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.aot_targets import CompileTarget
from meshdsl.lowering.hlo.collectives import CompiledCollective, collectives_of_module
from meshdsl.lowering.hlo.dedup import deduplicate
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import Module, parse_module
from meshdsl.lowering.hlo.schedule import read_schedule
from meshdsl.lowering.overlap import OverlapReport, compare_overlap, planned_overlap
from meshdsl.lowering.simulation.check import ProgramCheck
from meshdsl.util.text import bytes_text, table

Rows = Sequence[Sequence[str]]
log = logging.getLogger("meshdsl")

# ---- Report ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifyLine:
    """One kind of collective over one set of axes: bytes per device and step, and collectives, on both sides.

    Args:
      slack: the largest rounding error of the plan, which has whole bytes where the formulas give fractions.
      made: bytes in the target compiler's program, if the lowered program is compared with the plan; else None.
      runs, compiled_runs: collectives that run in a step, on both sides.
    """

    kind: str
    axes: str
    planned: Fraction
    compiled: Fraction
    slack: Fraction
    made: Fraction | None = None
    runs: int = 0
    compiled_runs: int = 0

    @property
    def equal(self) -> bool:
        """Whether both sides send as much, and the compiled program in no more collectives."""
        return abs(self.planned - self.compiled) <= self.slack and self.compiled_runs <= self.runs


@dataclass(frozen=True)
class DeviceUsage:
    """Peak memory of one device, and FLOPs of its products and convolutions per step.

    Args:
      memory, flops: as planned.
      compiled_memory: arguments, results and temporary values; results in donated arguments count once.
      compiled_flops: with loops counted; a loop with an unknown number of iterations counts once.
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
      target: the devices and compiler of an ahead-of-time target, if any.
      overlap: what runs beside the collectives of a TPU's or GPU's program; None for others.
      sums: the results beside those of the unsharded step, on simulated devices; None if they are not checked.
      unchecked: why they are not; empty if nobody asked.

    Example:
      >>> report = md.parallelize(lambda x: jnp.sum(x * x), "data=8", md.data_parallel()).verify(jnp.ones((64, 8)))
      >>> report.equal
      True
    """

    lines: tuple[VerifyLine, ...]
    notes: tuple[str, ...] = ()
    held: DeviceUsage | None = None
    target: str = ""
    overlap: OverlapReport | None = None
    sums: ProgramCheck | None = None
    unchecked: str = ""

    @property
    def equal(self) -> bool:
        """Whether every line agrees."""
        return all(line.equal for line in self.lines)

    def __str__(self) -> str:
        first = [f"compiled for {self.target}"] if self.target else []
        none = [] if self.lines else ["no collectives, as planned"]
        shown = self.overlap if self.overlap and self.overlap.scheduled else None
        schedule = ["", *table(_aligned(shown.rows(), (3, 4, 6, 7))), shown.summary] if shown else []
        schedule += [shown.replay] if shown and shown.replay else []
        notes = (f"note: {note}" for note in self.notes)
        return "\n".join([*first, *table(self._rows()), *none, *schedule, *self._sums(), *notes])

    def _sums(self) -> list[str]:
        """What is known of the results."""
        if self.sums is None:
            return [f"sums: not checked, {self.unchecked}"] if self.unchecked else []
        how = "compared in exact arithmetic" if "optimized" in self.sums.stages else "compared as lowered"
        agreeing = f"{len(self.sums.agreeing)} of {self.sums.results} results are those of the unsharded step"
        return [f"sums: {agreeing}, {how} on simulated devices", *self.sums.left_open]

    def with_sums(self, found: ProgramCheck | str) -> "VerifyReport":
        """Returns the report with what was found of the results, or why they were not checked.

        Raises:
          VerifyError: a result is wrong.
        """
        if isinstance(found, str):
            return replace(self, unchecked=found)
        if not found.equal:
            raise VerifyError(str(found))
        return replace(self, sums=found)

    def _rows(self) -> Rows:
        """The table: collectives and bytes per kind and axes, memory and FLOPs."""
        rows = [_header("lowered", "compiled") if self.target else _header("compiled"), *map(_line, self.lines)]
        held, gap = self.held, [""] if self.target else []
        if held:
            flops = f"{held.flops:.4g}", f"{held.compiled_flops:.4g}"
            memory = bytes_text(held.memory), bytes_text(held.compiled_memory)
            rows += [
                [name, "per device", "", "", planned, *gap, compiled]
                for name, (planned, compiled) in (("memory", memory), ("product FLOPs", flops))
            ]
        return _aligned(rows)


def _header(*sides: str) -> list[str]:
    """Returns the header of the table of a plan beside programs, of which the first is compared with it."""
    return ["collective", "axes", "planned", sides[0], "planned bytes", *(f"{side} bytes" for side in sides)]


def _line(line: VerifyLine) -> list[str]:
    """Returns a row of the table, with the difference if there is one."""
    made, mark = [] if line.made is None else [_count(line.made)], []
    if abs(line.compiled - line.planned) > line.slack:
        mark = [f"differs by {_count(line.compiled - line.planned, '+')}"]
    elif not line.equal:
        mark = [f"{line.compiled_runs - line.runs} collectives more"]
    runs = f"{line.runs:,}", f"{line.compiled_runs:,}"
    return [line.kind, line.axes, *runs, _count(line.planned), _count(line.compiled), *made, *mark]


def _aligned(rows: Rows, numbers: Sequence[int] = ()) -> Rows:
    """Returns rows of equal length, with the numbers of a column below each other.

    Args:
      numbers: positions of the columns of numbers; all but the first two if none are given.
    """
    count = max(map(len, rows))
    columns = list(zip(*([*row, *[""] * (count - len(row))] for row in rows), strict=True))
    right = numbers or range(2, count)
    sides = [[x.rjust(max(map(len, column))) if i in right else x for x in column] for i, column in enumerate(columns)]
    return list(zip(*sides, strict=True))


def _count(number: Fraction, sign: str = "") -> str:
    return f"{int(number):{sign},}" if number.denominator == 1 else f"{float(number):{sign},.2f}"


# ---- Comparison ------------------------------------------------------------------------------------------------------


_SCHEDULED = ("tpu", "gpu", "cuda", "rocm")  # platforms whose compilers print programs in the order in which they run
Key = tuple[str, str]  # kind, axes


class PlannedCollective(Protocol):
    """A planned collective, as far as verification reads it."""

    @property
    def kind(self) -> str:
        """The kind in the plan's words."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes, major first."""
        ...

    @property
    def bytes(self) -> int:
        """Bytes that one device sends per iteration."""
        ...

    @property
    def trips(self) -> int:
        """Executions per step."""
        ...

    @property
    def seconds(self) -> float:
        """Predicted seconds per iteration."""
        ...


def equal_or_error(report: VerifyReport, judged: str) -> VerifyReport:
    """Returns the report if both sides agree.

    Args:
      judged: the program that is compared with the plan: ``compiled`` or ``lowered``.

    Raises:
      VerifyError: they differ; the message lists both sides per kind and axes.
    """
    if not report.equal:
        raise VerifyError(_difference(report, judged))
    return report


def compare(planned: Iterable[PlannedCollective], compiled: Iterable[CompiledCollective], mesh: Mesh) -> VerifyReport:
    """Returns both sides per kind and axes, and the reconciled differences as notes."""
    planned, compiled = list(planned), list(compiled)
    guessed = {collective_key(c.kind, c.axes, c.group, mesh) for c in compiled if not c.known}
    left, slack, runs = _planned(planned, guessed, mesh)
    right, compiled_runs = _compiled(compiled, guessed, mesh)
    notes = [
        f"{kind} over {axes} runs in a loop with an unknown number of iterations: one iteration is compared"
        for kind, axes in sorted(guessed)
    ]
    notes += _recasts(compiled)
    notes += _join_halves(left, right, runs, compiled_runs)
    lines = [
        VerifyLine(*key, left[key], right[key], slack[key], None, runs[key], compiled_runs[key])
        for key in sorted(left.keys() | right.keys())
        if left[key] or right[key]
    ]
    notes += _combined(lines)
    return VerifyReport(tuple(lines), tuple(notes))


def _planned(
    planned: Iterable[PlannedCollective], guessed: set[Key], mesh: Mesh
) -> tuple[dict[Key, Fraction], dict[Key, Fraction], Counter[Key]]:
    """Per key, bytes, their largest rounding error (half a byte per collective that runs), and collectives."""
    total, slack = defaultdict[Key, Fraction](Fraction), defaultdict[Key, Fraction](Fraction)
    runs = Counter[Key]()
    for c in planned:
        key = collective_key(c.kind, c.axes, 0, mesh)
        trips = 1 if key in guessed else c.trips
        total[key] += c.bytes * trips
        slack[key] += Fraction(trips, 2)
        runs[key] += trips
    return total, slack, runs


def _compiled(
    compiled: Iterable[CompiledCollective], guessed: set[Key], mesh: Mesh
) -> tuple[dict[Key, Fraction], Counter[Key]]:
    """Per key, bytes and collectives."""
    total, runs = defaultdict[Key, Fraction](Fraction), Counter[Key]()
    for c in compiled:
        key = collective_key(c.kind, c.axes, c.group, mesh)
        trips = 1 if key in guessed else c.trips
        total[key] += c.bytes * trips
        runs[key] += trips
    return total, runs


def collective_key(kind: str, axes: tuple[str, ...] | None, group: int, mesh: Mesh) -> Key:
    """Returns kind, and axes in mesh order without those of size 1: groups of devices depend on neither."""
    if axes is None:
        return kind, f"groups of {group}"
    return kind, ",".join(name for name, size in mesh if name in axes and size > 1)


def _recasts(compiled: Iterable[CompiledCollective]) -> list[str]:
    recast = sum(c.recast for c in compiled)
    return (
        [f"{recast} collectives send numbers in another width on this backend; bytes are those of the planned width"]
        if recast
        else []
    )


def _combined(lines: Iterable[VerifyLine]) -> list[str]:
    """A note per kind and axes of which the compiler runs fewer collectives than planned, with all their bytes."""
    return [
        f"the compiler combined collectives: {line.kind} over {line.axes}, {line.runs:,} planned, "
        f"{line.compiled_runs:,} compiled"
        for line in lines
        if line.equal and line.compiled_runs < line.runs
    ]


def _join_halves(
    planned: dict[Key, Fraction], compiled: dict[Key, Fraction], runs: Counter[Key], compiled_runs: Counter[Key]
) -> list[str]:
    """Merges reduce-scatter and all-gather into the planned all-reduce, as far as one is missing."""
    notes = []
    for _, axes in [key for key in planned if key[0] == "all-reduce"]:
        whole, first, second = (("all-reduce", axes), ("reduce-scatter", axes), ("all-gather", axes))
        missing = (planned[whole] - compiled[whole]) / 2
        half = min(missing, compiled[first] - planned[first], compiled[second] - planned[second])
        if half > 0:
            compiled[whole] += 2 * half
            compiled[first] -= half
            compiled[second] -= half
            pairs = min(compiled_runs[key] - runs[key] for key in (first, second))
            for key, count in ((whole, pairs), (first, -pairs), (second, -pairs)):
                compiled_runs[key] += max(0, pairs) and count
            notes.append(f"all-reduce over {axes} was compiled as reduce-scatter and all-gather")
    return notes


def _difference(report: VerifyReport, judged: str) -> str:
    rows = list(table(_aligned([_header(judged), *(_line(line) for line in report.lines if not line.equal)])))
    equal = sum(line.equal for line in report.lines)
    title = f"the {judged} program does not communicate as planned (per device and step)"
    text = {"compiled": "sharded.lower(*args).compile().as_text()", "lowered": "sharded.lower(*args).as_text('hlo')"}
    remedy = f"{equal} other rows agree; the {judged} text is {text[judged]}"
    return faults(title, rows + [f"note: {note}" for note in report.notes], remedy)


# ---- Steps and targets -----------------------------------------------------------------------------------------------
# For present devices, the compiled program has to communicate as planned. The compiler of an ahead-of-time target may
# rewrite collectives: a TPU's replaces a small reduce-scatter by an all-reduce of which it keeps a part, or splits one
# into permutes that overlap with the product that uses it. There the lowered program is compared, exactly, and the
# report adds the compiler's communication and memory.


@dataclass(frozen=True)
class ExpectedCommunication:
    """A plan's prediction for one device and step: collectives, peak bytes, FLOPs of products.

    Args:
      exposed: returns the seconds of each collective that the plan does not hide; empty if that is not known.
      simulated: returns the seconds of the step, with what it hides.
    """

    collectives: Sequence[PlannedCollective]
    memory: int
    flops: float
    exposed: Callable[[], Sequence[float]] = tuple
    simulated: Callable[[], float] = float


def verify_here(
    planned: ExpectedCommunication, compiled: jax.stages.Compiled, mesh: Mesh, platform: str, exposed: str = "ignore"
) -> VerifyReport:
    """Compares a plan with the program compiled for present devices; VerifyError if their communication differs.

    Args:
      platform: of the devices.
      exposed: as in ``verify_target``.
    """
    module = parse_module(compiled.as_text() or "")
    report = compare(planned.collectives, collectives_of_module(module, mesh), mesh)
    report = replace(equal_or_error(report, "compiled"), held=_held(planned, compiled, module))
    if platform not in _SCHEDULED:
        return report
    return _judged(replace(report, overlap=_overlap(planned, module, mesh)), exposed, f"these {platform} devices")


def verify_target(
    planned: ExpectedCommunication,
    lowered: jax.stages.Lowered,
    mesh: Mesh,
    target: CompileTarget,
    exposed: str = "ignore",
) -> VerifyReport:
    """Compares a plan with the program lowered for a target, and reports what its compiler makes of it.

    Args:
      exposed: what becomes of a program that hides less than the plan: an ``error``, or a note and a log message
        (``warn``); ``ignore`` leaves it at the table.

    Raises:
      VerifyError: the lowered program does not communicate as planned, or the step does not fit the target's memory.
      DeviceError: jax cannot read the compiled program, since the compiler is not of its version.
      OverlapError: the compiled one hides less than the plan, and ``exposed`` is ``error``.
    """
    before = deduplicate(parse_module(lowered.as_text("hlo", debug_info=True)))
    report = equal_or_error(compare(planned.collectives, collectives_of_module(before, mesh), mesh), "lowered")
    compiled = _compile(planned, lowered, target)
    module = parse_module(_text(compiled, target))
    held = _held(planned, compiled, module)
    if held.compiled_memory > target.memory:
        raise _too_large(planned, target, f"{bytes_text(held.compiled_memory)}, of {bytes_text(target.memory)}")
    made = compare(planned.collectives, collectives_of_module(module, mesh), mesh)
    report = VerifyReport(
        _beside(report.lines, made.lines),
        (*report.notes, *made.notes, *_rewritten(made.lines)),
        held,
        f"{target} by {target.compiler}",
        _overlap(planned, module, mesh),
    )
    return _judged(report, exposed, report.target)


def _overlap(planned: ExpectedCommunication, module: Module, mesh: Mesh) -> OverlapReport:
    """What the compiled program does while it communicates, beside what the plan hides."""
    keys = [collective_key(c.kind, c.axes, 0, mesh) for c in planned.collectives]
    promise = planned_overlap(keys, [c.seconds * c.trips for c in planned.collectives], planned.exposed())
    schedule = read_schedule(module, mesh)
    scheduled = schedule.collectives
    axes = [collective_key(one.sent.kind, one.sent.axes, one.sent.group, mesh)[1] for one in scheduled]
    found = compare_overlap(promise, scheduled, axes)
    simulated = planned.simulated() if promise is not None else 0.0
    return replace(found, replayed=schedule.seconds, computing=schedule.computing, simulated=simulated)


def _judged(report: VerifyReport, exposed: str, target: str) -> VerifyReport:
    """The report, with a note if the program hides less than the plan; or OverlapError."""
    if report.overlap is None or report.overlap.kept or exposed == "ignore":
        return report
    error = report.overlap.error(target)
    if exposed == "error":
        raise error
    log.warning("%s", error)
    return replace(report, notes=(*report.notes, first_line(error).removesuffix(":")))


def _compile(planned: ExpectedCommunication, lowered: jax.stages.Lowered, target: CompileTarget) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _too_large(planned, target, first_line(error)) from error


def _text(compiled: jax.stages.Compiled, target: CompileTarget) -> str:
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise DeviceError(
            f"jax {jax.__version__} cannot read the program that {target.compiler} compiled for {target}: "
            f"{first_line(error)}; install the compiler of this jax: {target.install}"
        ) from error


def _too_large(planned: ExpectedCommunication, target: CompileTarget, said: str) -> VerifyError:
    need = f"the plan needs {bytes_text(planned.memory)}"
    return VerifyError(f"the step does not fit {target}: {need}; {target.compiler}: {said}")


def _held(planned: ExpectedCommunication, compiled: jax.stages.Compiled, module: Module) -> DeviceUsage:
    return DeviceUsage(planned.memory, planned.flops, compiled_bytes(compiled), product_flops(module))


def compiled_bytes(compiled: Any) -> int:
    """Returns the bytes of one device while a compiled program runs: arguments, results and temporary values."""
    found = compiled.memory_analysis()
    outside = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(outside + found.temp_size_in_bytes)


def _beside(lowered: Sequence[VerifyLine], made: Sequence[VerifyLine]) -> tuple[VerifyLine, ...]:
    """Both comparisons in one table, with zeros on the planned side of rows that only the compiler has."""
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
    """Notes if the compiler does not communicate as lowered: which kinds it replaced, and all bytes of both."""
    if all(line.equal for line in lines):
        return []
    more = {(line.kind, line.axes): line.compiled - line.planned for line in lines if not line.equal}
    notes = [
        f"reduce-scatter over {axes} was compiled as all-reduce: {_bytes(made)} are sent instead of {_bytes(-lacking)}"
        for (kind, axes), lacking in more.items()
        if kind == "reduce-scatter" and lacking < 0 < (made := more.get(("all-reduce", axes), Fraction(0)))
    ]
    planned, made = (sum((getattr(line, side) for line in lines), Fraction(0)) for side in ("planned", "compiled"))
    return [*notes, f"the compiler rewrote collectives: it sends {_bytes(made)} instead of {_bytes(planned)}"]


def _bytes(size: Fraction) -> str:
    return bytes_text(float(size))
