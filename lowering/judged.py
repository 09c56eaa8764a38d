"""Verify a planned step with a compiler: that of the devices at hand, or of a target that is not there.

For the devices at hand the compiled program itself has to communicate what the plan says. A target's compiler may
rewrite collectives: a TPU's makes an all-reduce of a small reduce-scatter and keeps a part of it, or cuts one into
permutes that run beside the product they belong to. There the program is compared as it was lowered, exactly, and the
report says beside it what the compiler made of it, how much memory that takes, and whether it fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import jax

from meshdsl.errors import VerifyError, first_line
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo import collectives_of_module
from meshdsl.lowering.hlo_flops import product_flops
from meshdsl.lowering.hlo_once import without_repeats
from meshdsl.lowering.hlo_text import Module, parse_module
from meshdsl.lowering.targets import Target
from meshdsl.lowering.verify import PlannedCollective, compare, equal_or_error
from meshdsl.lowering.verify_report import Held, Line, VerifyReport
from meshdsl.units import bytes_text


@dataclass(frozen=True)
class Planned:
    """What a plan says of one device and step: collectives, bytes at the fullest point, FLOPs of products."""

    collectives: Sequence[PlannedCollective]
    memory: int
    flops: float


def verify_here(planned: Planned, compiled: jax.stages.Compiled, mesh: Mesh) -> VerifyReport:
    """Compare a plan with what was compiled for the devices at hand; VerifyError if it communicates otherwise."""
    module = parse_module(compiled.as_text() or "")
    report = compare(planned.collectives, collectives_of_module(module, mesh), mesh)
    return replace(equal_or_error(report, "compiled"), held=_held(planned, compiled, module))


def verify_target(planned: Planned, lowered: jax.stages.Lowered, mesh: Mesh, target: Target) -> VerifyReport:
    """Compare a plan with the program that was lowered for a target, and say what its compiler makes of it.

    Raises VerifyError if the lowered program communicates otherwise than planned, or does not fit the target's memory.
    """
    before = without_repeats(parse_module(lowered.as_text("hlo", debug_info=True)))
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


def _compiled(planned: Planned, lowered: jax.stages.Lowered, target: Target) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _too_large(planned, target, first_line(error)) from error


def _too_large(planned: Planned, target: Target, said: str) -> VerifyError:
    need = f"planned are {bytes_text(planned.memory)}"
    return VerifyError(f"the step does not fit {target}: {need}, and {target.compiler} says: {said}")


def _held(planned: Planned, compiled: jax.stages.Compiled, module: Module) -> Held:
    return Held(planned.memory, planned.flops, compiled_bytes(compiled), product_flops(module))


def compiled_bytes(compiled: Any) -> int:
    """What one device holds while a compiled program runs: arguments, results and temporary values."""
    found = compiled.memory_analysis()
    outside = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(outside + found.temp_size_in_bytes)


def _beside(lowered: Sequence[Line], made: Sequence[Line]) -> tuple[Line, ...]:
    """Both comparisons in one table; what only the compiler's program has was neither planned nor lowered."""
    before, after = ({(line.kind, line.axes): line for line in lines} for lines in (lowered, made))
    nothing = Fraction(0)
    rows = (
        replace(
            before.get(key) or Line(*key, nothing, nothing, nothing),
            made=after[key].compiled if key in after else nothing,
        )
        for key in sorted(before.keys() | after.keys())
    )
    return tuple(rows)


def _rewritten(lines: Sequence[Line]) -> list[str]:
    """One line if the compiler sends otherwise than it was told."""
    if all(line.equal for line in lines):
        return []
    planned, made = (sum(getattr(line, side) for line in lines) for side in ("planned", "compiled"))
    return [f"the compiler rewrote collectives: it sends {bytes_text(float(made))}, planned are {bytes_text(planned)}"]
