"""The contents of the report as plain values that JSON can hold.

Everything that grows with the program is added up here: collectives that agree in everything shown share a row, as in
the printed plan, figures are summed per source line, and timeline and memory have as many points as a screen can show.
All figures are per device and step, iterations counted.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from itertools import islice
from math import prod
from typing import Any

from meshdsl.ir.graph import element_bits
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import B, Split
from meshdsl.plan.report.highlight import highlighted
from meshdsl.plan.report.traces import events, fit_events, memory_points
from meshdsl.plan.text import ArrayGroup, collective_rows, common, group_arrays, layout_text, pattern
from meshdsl.plan.types import Array, PlanData
from meshdsl.schedules.pipelined import Pipelined
from meshdsl.schedules.simulate import ScheduleTiming

_BUFFER_ROWS = 60  # rows of buffers at the memory peak; the smaller ones share one more row
Facts = dict[str, Any]


@dataclass
class LineCost:
    """A source line with its cost per device and step.

    Args:
      position: index into the plan's lines.
      source: name of the line, ``file.py:12``.
      function: function that its operations come from.
      text: the line.
      compute: seconds of computing.
      sent: seconds of communication.
      bytes: bytes that one device sends.
      runs: iterations of its collectives.
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
        """Seconds of computing and communication."""
        return self.compute + self.sent

    def row(self) -> Iterator[Any]:
        """The values of the fields after ``position``."""
        return islice(astuple(self), 1, None)


def report_data(plan: PlanData) -> Facts:
    """Everything that the page shows."""
    timeline = list(events(plan))
    return {
        **comparison_data(plan),
        "limit": plan.topology.memory,
        "gap": plan.gap,
        "compute": sum(span.seconds * span.trips for span in plan.spans),
        "notes": list(plan.notes),
        "cells": list(_cells(plan)),
        "lines": [[*line.row(), highlighted(line.text)] for line in line_costs(plan)],
        "arrays": [_array(group, plan.mesh) for group in group_arrays(plan.inputs)],
        "held": list(_buffers(plan)),
        "points": memory_points(plan),
        "events": fit_events(timeline),
        "lanes": list(dict.fromkeys(event.lane for event in timeline)),
        "pipeline": None if plan.pipeline is None else _pipeline(plan.pipeline),
    }


def comparison_data(plan: PlanData) -> Facts:
    """The part of the page's values by which two plans are compared."""
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
    """The schedule in words and, if there are stages, both predictions of it and the stash of its ranks."""
    if not pipeline.axis:
        return {"text": str(pipeline), "drawn": []}
    forecast, names = pipeline.forecast, ("in lockstep", "asynchronous")
    seconds = (forecast.lockstep, forecast.asynchronous) if pipeline.costs else (None, None)
    timings = forecast.lockstep_timing, forecast.asynchronous_timing
    drawn = [{"name": n, "seconds": s, "ranks": _ranks(t)} for n, s, t in zip(names, seconds, timings, strict=True)]
    rows = zip(pipeline.stash, pipeline.stash_bytes, pipeline.memory, strict=False)
    return {"text": str(pipeline), "drawn": drawn, "kept": list(map(list, rows))}


def _ranks(timing: ScheduleTiming) -> list[list[list[Any]]]:
    """Per rank its tasks: kind, microbatch, begin and end; times in hundred-thousandths of the whole."""
    unit = 1e5 / timing.seconds
    return [
        [[t.kind, t.microbatch, round(timing.begin[t] * unit), round(timing.end[t] * unit)] for t in tasks]
        for tasks in timing.schedule.ranks
    ]


def _collectives(plan: PlanData) -> Iterator[Facts]:
    for c, number, exposed in collective_rows(plan.collectives, plan.exposed):
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
            "exposed": exposed,
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
    """The cost of every source line, in the plan's order."""
    found = [LineCost(i, *line) for i, line in enumerate(plan.lines)]
    by_source = {line.source: line for line in found}
    for span in plan.spans:
        found[span.line].compute += span.seconds * span.trips
    for c in plan.collectives:
        line = by_source[c.source]
        line.sent += c.seconds * c.trips
        line.bytes += c.bytes * c.trips
        line.runs += c.trips
    return found


def _array(group: ArrayGroup, mesh: Mesh) -> Facts:
    """A row of arrays; ``splits`` has the dim that each mesh axis splits, outer axes first."""
    array = group.array
    return {
        "name": group.name,
        "number": group.count,
        "type": array.type,
        "layout": _layout(array.layout, array.dims),
        "meanings": [_meaning(part, array) for part in _layout(array.layout, array.dims).split(" ")],
        "splits": [[axis, at.dim] for axis, at in array.layout.placements if isinstance(at, Split)],
        "pinned": " ".join(array.pinned),
        "local": list(array.layout.local_shape(array.shape, mesh.sizes_by_name)),
        "bytes": group.count * _local_bytes(array, mesh),
    }


def _meaning(part: str, array: Array) -> str:
    """What a part of a layout's text says: of ``axis=placement``, or of ``B``, which is that of every axis."""
    axis, stated, _ = part.partition("=")
    return f"{axis}, {array.layout.named(array.dims).on(axis).meaning}" if stated else B.meaning


@cache
def _layout(layout: Layout, dims: tuple[str, ...]) -> str:
    return layout_text(layout.named(dims))


def _local_bytes(array: Array, mesh: Mesh) -> int:
    return -(-prod(array.layout.local_shape(array.shape, mesh.sizes_by_name)) * _bits(array.dtype) // 8)


def _bits(dtype: str) -> int:
    """Bits per element of a dtype given by its name."""
    import jax.numpy as jnp

    return _KEY_BITS.get(dtype) or element_bits(jnp.dtype(dtype))


_KEY_BITS = {
    **{"key<fry>": 64, "key<rbg>": 128, "key<urbg>": 128},
    **{"key<fry4>": 128, "key<phx2>": 32, "key<phx4>": 64},
}


def _buffers(plan: PlanData) -> Iterator[list[Any]]:
    """Buffers at the memory peak, largest first; names that differ in numbers only share a row."""
    by_pattern: dict[str, list[tuple[str, int]]] = {}
    for name, size in plan.held:
        by_pattern.setdefault(pattern(name), []).append((name, size))
    rows = [
        (common(name for name, _ in found), len(found), sum(size for _, size in found)) for found in by_pattern.values()
    ]
    rows.sort(key=lambda row: -row[2])
    yield from map(list, rows[:_BUFFER_ROWS])
    if rest := rows[_BUFFER_ROWS:]:
        yield ["the rest", sum(row[1] for row in rest), sum(row[2] for row in rest)]
