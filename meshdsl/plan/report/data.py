"""What the report shows of a plan, as plain values that JSON can hold.

Everything that grows with the program is added up here: collectives that read the same share a
row, as in the printed plan, figures are summed per line, and the timeline and the memory have as
many points as a screen can show. All figures are per device and step, trips counted.
"""

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from functools import cache
from itertools import islice
from math import prod
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Split
from meshdsl.plan.report.traces import events, fit_events, memory_points
from meshdsl.plan.text import ArrayGroup, collective_rows, common, group_arrays, layout_text, pattern
from meshdsl.plan.types import Array, PlanData
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import ScheduleTiming

_HELD = 60  # rows of what holds the peak; the smaller rest is one more
Facts = dict[str, Any]


@dataclass
class LineCost:
    """A line of the source with what it costs.

    Args:
      position: in the plan's lines.
      compute, sent: seconds of computing and of communication.
      runs: of its collectives.
    """

    position: int
    source: str
    function: str
    text: str
    compute: float = 0.0
    sent: float = 0.0
    bytes: int = 0
    runs: int = 0

    @property
    def total(self) -> float:
        """Seconds of both."""
        return self.compute + self.sent

    def row(self) -> Iterator[Any]:
        """The values without their names, position left out."""
        return islice(astuple(self), 1, None)


def report_data(plan: PlanData) -> Facts:
    """The values of the page."""
    happened = list(events(plan))
    return {
        **compared(plan),
        "limit": plan.topology.memory,
        "gap": plan.gap,
        "compute": sum(span.seconds * span.trips for span in plan.spans),
        "notes": list(plan.notes),
        "cells": list(_cells(plan)),
        "lines": [list(line.row()) for line in line_costs(plan)],
        "arrays": [_array(group, plan.mesh) for group in group_arrays(plan.inputs)],
        "held": list(_held(plan)),
        "points": memory_points(plan),
        "events": fit_events(happened),
        "lanes": list(dict.fromkeys(event.lane for event in happened)),
        "pipeline": None if plan.pipeline is None else _pipeline(plan.pipeline),
    }


def compared(plan: PlanData) -> Facts:
    """What two plans are compared by."""
    return {
        "name": plan.name,
        "mesh": [list(axis) for axis in plan.mesh],
        "topology": plan.topology.name,
        "seconds": plan.seconds,
        "lower_bound": plan.lower_bound,
        "bytes": plan.bytes,
        "memory": plan.memory,
        "layouts": [[array.path, array.type, _layout(array.layout, array.dims)] for array in plan.inputs],
        "collectives": list(_collectives(plan)),
    }


def _pipeline(pipeline: Pipelined) -> Facts:
    """The schedule in words, and both predictions of it, if there are stages."""
    if not pipeline.axis:
        return {"text": str(pipeline), "drawn": []}
    forecast, both = pipeline.forecast, ("in lockstep", "asynchronous")
    seconds = (forecast.lockstep, forecast.asynchronous) if pipeline.costs else (None, None)
    timings = forecast.lockstep_timing, forecast.asynchronous_timing
    drawn = [{"name": n, "seconds": s, "ranks": _ranks(t)} for n, s, t in zip(both, seconds, timings, strict=True)]
    rows = zip(pipeline.stash, pipeline.stash_bytes, pipeline.memory, strict=False)
    return {"text": str(pipeline), "drawn": drawn, "kept": list(map(list, rows))}


def _ranks(timing: ScheduleTiming) -> list[list[list[Any]]]:
    """Per rank its tasks: kind, microbatch, begin and end, in hundred-thousandths of all."""
    unit = 1e5 / timing.seconds
    return [
        [[t.kind, t.microbatch, round(timing.begin[t] * unit), round(timing.end[t] * unit)] for t in tasks]
        for tasks in timing.schedule.ranks
    ]


def _collectives(plan: PlanData) -> Iterator[Facts]:
    for c, number in collective_rows(plan.collectives):
        runs = c.trips * number
        yield {
            "kind": c.kind,
            "axes": ",".join(c.axes),
            "phase": c.phase,
            "source": c.source,
            "reason": c.reason,
            "type": f"{c.dtype}[{','.join(map(str, c.shape))}]",
            "estimated": c.estimated,
            "each": c.bytes,
            "runs": runs,
            "bytes": runs * c.bytes,
            "seconds": runs * c.seconds,
        }


def _cells(plan: PlanData) -> Iterator[list[Any]]:
    """Runs, bytes and seconds by axes, kind and phase."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for c in plan.collectives:
        cell = sums.setdefault((",".join(c.axes), c.kind, c.phase), [0, 0, 0.0])
        for i, more in enumerate((1, c.bytes, c.seconds)):
            cell[i] += c.trips * more
    yield from ([*key, *cell] for key, cell in sorted(sums.items()))


def line_costs(plan: PlanData) -> list[LineCost]:
    """What every line of the source costs, in their order."""
    found = [LineCost(i, *line) for i, line in enumerate(plan.lines)]
    place = {line.source: line for line in found}
    for span in plan.spans:
        found[span.line].compute += span.seconds * span.trips
    for c in plan.collectives:
        line = place[c.source]
        line.sent += c.seconds * c.trips
        line.bytes += c.bytes * c.trips
        line.runs += c.trips
    return found


def _array(group: ArrayGroup, mesh: Mesh) -> Facts:
    """Arrays that lie alike; ``splits`` says per mesh axis which dim it splits, major axes first."""
    array = group.array
    return {
        "name": group.name,
        "number": group.count,
        "type": array.type,
        "layout": _layout(array.layout, array.dims),
        "splits": [[axis, at.dim] for axis, at in array.layout.placements if isinstance(at, Split)],
        "pinned": " ".join(array.pinned),
        "local": list(array.layout.local_shape(array.shape, mesh.sizes_by_name)),
        "bytes": group.count * _local_bytes(array, mesh),
    }


@cache
def _layout(layout: Layout, dims: tuple[str, ...]) -> str:
    return layout_text(layout.named(dims))


def _local_bytes(array: Array, mesh: Mesh) -> int:
    return prod(array.layout.local_shape(array.shape, mesh.sizes_by_name)) * itemsize(array.dtype)


def itemsize(dtype: str) -> int:
    """Bytes per element of a dtype by its name; keys of random numbers have eight."""
    import jax.numpy as jnp

    try:
        return int(jnp.dtype(dtype).itemsize)
    except TypeError:
        return 8


def _held(plan: PlanData) -> Iterator[list[Any]]:
    """What lives at the fullest point: names that differ in numbers only in one row, largest first."""
    alike: dict[str, list[tuple[str, int]]] = {}
    for name, size in plan.held:
        alike.setdefault(pattern(name), []).append((name, size))
    rows = [(common(name for name, _ in found), len(found), _sum(found)) for found in alike.values()]
    rows.sort(key=lambda row: -row[2])
    yield from map(list, rows[:_HELD])
    if rest := rows[_HELD:]:
        yield ["the rest", sum(row[1] for row in rest), sum(row[2] for row in rest)]


def _sum(found: Iterable[tuple[str, int]]) -> int:
    return sum(size for _, size in found)
