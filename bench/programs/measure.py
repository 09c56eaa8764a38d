"""Measures one program in two parts.

    small    every mesh: check, verify, steps in a row, under the plan of a call and under one that divides what it can
    large    the published size, compiled only: bytes of our plans beside those of XLA's program

Facts are written as soon as they are known, so that a part that ends the process leaves those before it.
"""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench.programs.adapter import Adapter, Training
from bench.programs.steps import FREE, as_published, compare_in_a_row, copied, in_a_row, on_mesh, xla_program
from bench.report import machine
from bench.step import bytes_sent
from meshdsl.api.stages import SLOW_DEVICES
from meshdsl.errors import MeshDSLError
from meshdsl.ir.graph import walk
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.types import Array
from meshdsl.trace.objects import holds_objects

Facts = Iterator[dict[str, Any]]
MESHES = ("data=4,model=2", "data=8", "pod=2,data=2,model=2")
LARGE, TOPOLOGY = MESHES[0], "dgx-h100"
MEMORY = 1e12  # bytes, more than a device has: bytes that are sent are compared, not what memory forces
PARTS = ("small", "large")


def measure(adapter: Adapter, part: str, checkout: Path, file: Path) -> None:
    """Measures one part of a program and adds its facts to ``file``, in place of those before."""
    found: dict[str, Any] = {}
    with adapter.importable(checkout):
        training = adapter.build(part)
        for fact in _small(training) if part == "small" else _large(training):
            found |= fact
            others = json.loads(file.read_text()) if file.exists() else {}  # another part may be measured meanwhile
            file.write_text(json.dumps({**others, part: found}, indent=1))


# ---- Numbers ---------------------------------------------------------------------------------------------------------


def _small(training: Training) -> Facts:
    yield {"machine": machine()}
    for text in MESHES:
        try:
            yield {text: _compared(training, text)}
        except MeshDSLError as error:
            yield {text: {"error": str(error)}}


def _compared(training: Training, text: str) -> dict[str, Any]:
    """Returns the facts of one mesh; of the two plans, the second divides as much as it can.

    One step is checked on a trained state: a first state may be all zeros where it matters, its learning rate too.
    """
    mesh = Mesh.parse(text)
    planned = on_mesh(training, mesh)
    divided = on_mesh(training, Mesh.parse(text, SLOW_DEVICES))
    published = as_published(training, mesh)
    trained = in_a_row(published, training, copied(training.args))
    row = compare_in_a_row(divided, published, training, trained)
    reports = [sharded.check(*trained[0]) for sharded in (planned, divided)]
    for sharded in (planned, divided):
        sharded.verify(*trained[0])
    return {
        "checked": [report.worst for report in reports],
        "shares": [dict(report.divided) for report in reports],
        "unknown": [sum(leaf.unknown for leaf in report.leaves) for report in (*reports, row)],
        "in a row": row.worst,
        "outputs": len(row.leaves),
    }


# ---- Bytes -----------------------------------------------------------------------------------------------------------


def _large(training: Training) -> Facts:
    mesh = Mesh.parse(LARGE, TOPOLOGY)
    sharded, start = on_mesh(training, mesh, memory=MEMORY), time.process_time()
    plan = sharded.plan(*training.args)
    yield {"plan seconds": time.process_time() - start, "seconds": plan.seconds, "gap": plan.gap}
    yield {"operations": sum(1 for _ in walk(sharded.stages(*training.args).traced.graph))}
    compiled, inputs, outputs = xla_program(training, mesh)
    yield {"XLA bytes": bytes_sent(compiled.as_text(), mesh)}
    yield {"bytes": bytes_sent(sharded.lower(*training.args).compile().as_text(), mesh)}
    pins, results = _pins(plan.inputs, inputs), _pins(plan.outputs, outputs)
    if holds_objects(training.args):  # what is written back into objects lies as it was taken
        results = {}
    between = on_mesh(training, mesh, pins, results, MEMORY)
    yield {"seconds, XLA's layouts": between.plan(*training.args).seconds}
    yield {"bytes, XLA's layouts": bytes_sent(between.lower(*training.args).compile().as_text(), mesh)}
    alone = Mesh(data=mesh.axis("data"), topology=mesh.topology)
    pins, results = ({path: _without_free(at) for path, at in each.items()} for each in (pins, results))
    yield {"seconds, batch alone": on_mesh(training, alone, pins, results, MEMORY).plan(*training.args).seconds}


def _pins(arrays: Iterable[Array], layouts: Iterable[Layout]) -> dict[str, Layout]:
    return {array.path or "*": at for array, at in zip(arrays, layouts, strict=True)}


def _without_free(layout: Layout) -> Layout:
    return Layout(**{axis: at for axis, at in layout.placements if axis != FREE})
