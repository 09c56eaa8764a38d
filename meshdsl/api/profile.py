"""Measured beside predicted seconds of collectives: what a trace of jax's profiler says of a compiled step.

The events of a trace are named by instructions of the compiled program, which say kind and mesh axes of a collective.
A device's time in a collective includes waiting for the others that take part. Per kind and axes, all sums are those of
one step and one device. Where a backend runs a collective in two halves, the time of the first one is measured.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.verify import Key, collective_key
from meshdsl.plan.types import PlanData
from meshdsl.util.text import seconds_text, table

_MODULE = re.compile(r"^HloModule ([\w.\-]+)", re.MULTILINE)


class CollectiveTime(NamedTuple):
    """Seconds per step of one kind of collective over one set of axes; None where one side has none."""

    kind: str
    axes: str
    predicted: float | None
    measured: float | None


def collective_times(
    trace: Path, programs: Iterable[jax.stages.Compiled], plan: PlanData, steps: int
) -> tuple[CollectiveTime, ...]:
    """Returns predicted and measured seconds per kind and axes.

    Args:
      trace: a folder that ``jax.profiler.start_trace`` has written.
      programs: the compiled programs that ran.
      plan: of the step.
      steps: number of steps in the trace.
    """
    predicted, measured = defaultdict[Key, float](float), defaultdict[Key, float](float)
    mesh = plan.mesh
    for c in plan.collectives:
        predicted[collective_key(c.kind, c.axes, 0, mesh)] += c.trips * c.seconds
    names = _instructions(programs, mesh)
    here = min(len(jax.local_devices()), mesh.size)
    for module, instruction, seconds in _events(trace):
        key = names.get((module, instruction))
        if key is not None:
            measured[key] += seconds / steps / here
    return tuple(CollectiveTime(*key, predicted.get(key), measured.get(key)) for key in sorted({*predicted, *measured}))


def times_text(times: Sequence[CollectiveTime]) -> str:
    """Returns a table of the times."""
    if not any(each.measured for each in times):
        return "the trace names no collective of the step"
    rows = [["collective", "axes", "predicted", "measured", "measured / predicted"]]
    for each in times:
        ratio = f"{each.measured / each.predicted:.2f}" if each.predicted and each.measured else ""
        cells = ("" if x is None else seconds_text(x) for x in (each.predicted, each.measured))
        rows.append([each.kind, each.axes, *cells, ratio])
    return "\n".join(table(rows))


def _instructions(programs: Iterable[jax.stages.Compiled], mesh: Mesh) -> dict[tuple[str, str], Key]:
    """Kind and axes of the collectives by the names of program and instruction."""
    found: dict[tuple[str, str], Key] = {}
    for program in programs:
        text = program.as_text() or ""
        module = _MODULE.search(text)
        for c in compiled_collectives(text, mesh):
            found[module.group(1) if module else "", c.name] = collective_key(c.kind, c.axes, c.group, mesh)
    return found


def _events(trace: Path) -> Iterator[tuple[str, str, float]]:
    """The events of compiled programs in the newest trace: program, instruction, seconds."""
    file = max(trace.rglob("*.xplane.pb"), key=lambda each: each.stat().st_mtime)
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                facts: dict[str, Any] = dict(event.stats)
                if "hlo_op" in facts:
                    yield str(facts.get("hlo_module", "")), str(facts["hlo_op"]), event.duration_ns * 1e-9
