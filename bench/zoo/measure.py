"""Measures a case in two parts: plan and communication, then step time.

Facts are written as soon as they are known, ours before XLA's, because the XLA partitioner crashes the process on some
cases.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from bench.fallbacks import fallbacks
from bench.report import interleave, machine, ratio
from bench.step import bytes_sent, stepper
from bench.zoo.case import Case
from bench.zoo.peer import at_layouts, numbers_agree, xla_layouts
from meshdsl.api import Program, Sharded, parallelize
from meshdsl.errors import MeshDSLError
from meshdsl.ir.graph import walk
from meshdsl.layouts.mesh import Mesh
from meshdsl.padding import pad_program
from meshdsl.padding.regions import compute_regions
from meshdsl.trace import trace

Facts = Iterator[dict[str, Any]]
CASES = {
    "gpt2": "language",
    "bart": "language",
    "mamba2": "language",
    "mixture": "language",
    "recurrent": "language",
    "regnet": "images",
    "convnext": "images",
    "fourier": "images",
    "recommender": "others",
    "equation": "others",
    "graph": "others",
    "inference": "others",
}
MESH = Mesh(data=4, model=2)
DONATED = (0, 1)  # parameters and optimizer state
OURS, XLA = "meshdsl", "XLA partitioner"


def build_case(name: str) -> Case:
    """Returns a case by its name."""
    make: Callable[[], Case] = getattr(import_module(f"bench.zoo.{CASES[name]}"), name)
    return make()


def measure(name: str, part: str, folder: Path, rounds: int) -> None:
    """Measures one part of a case, ``plan`` or ``time``, and writes its facts to ``folder``."""
    case, file = build_case(name), folder / f"{name}.json"
    facts = json.loads(file.read_text()) if file.exists() and part == "time" else {}
    for fact in _planned(case) if part == "plan" else _timed(case, rounds):
        facts |= fact
        file.write_text(json.dumps(facts, indent=1))


def _planned(case: Case) -> Facts:
    program = case.program()
    sharded = on_mesh(program)
    plan = sharded.plan(*program.args)
    traced = trace(program.step, program.args)
    traced = pad_program(compute_regions(traced) if plan.regions else traced, dict(plan.padded))
    yield {"operations": sum(1 for _ in walk(traced.graph)), "machine": machine()}
    gathered = fallbacks(traced, plan.solution)
    yield {"fallbacks": [[x.name, x.source, "uneven" if x.uneven else "fallback", x.bytes] for x in gathered]}
    yield from _compared(sharded, program)
    yield {"bytes": _bytes(sharded, program)}
    jitted = jax.jit(program.step)(*program.args)[-1]
    compiled, shardings = at_layouts(program, plan)
    yield {"XLA bytes": bytes_sent(compiled.as_text(), MESH)}
    yield {"XLA right": numbers_agree(jitted, stepper(compiled, program.args, shardings)())}
    compiled, inputs, outputs = xla_layouts(program, MESH, case.dim)
    yield {"XLA bytes, own layouts": bytes_sent(compiled.as_text(), MESH)}
    input_pins = {array.path: layout for array, layout in zip(plan.inputs, inputs, strict=True)}
    output_pins = {array.path: layout for array, layout in zip(plan.outputs, outputs, strict=True)}
    pinned = parallelize(program.step, MESH, input_pins, output_pins)
    yield {"bytes, XLA's layouts": _bytes(pinned, program)}


def _timed(case: Case, rounds: int) -> Facts:
    program = case.program()
    sharded = on_mesh(program)
    start = time.perf_counter()
    plan = sharded.plan(*program.args)
    yield {"plan seconds": time.perf_counter() - start}
    compiled, shardings = at_layouts(program, plan)
    ours = stepper(sharded, program.args, sharded.input_shardings(*program.args)[0])
    steps = {OURS: ours, XLA: stepper(compiled, program.args, shardings)}
    seconds = interleave(steps, rounds)
    times = ratio(seconds[OURS], seconds[XLA])
    yield {"step ratio": [times.median, times.low, times.high], "rounds": rounds}


def on_mesh(program: Program, mesh: Mesh = MESH) -> Sharded:
    """Returns a case's step over a mesh, its batch split over ``data``."""
    return parallelize(program.step, mesh, program.layouts, donate_argnums=DONATED)


def _compared(sharded: Sharded, program: Program) -> Facts:
    """Yields the worst error, and whether the compiled program communicates as planned."""
    try:
        yield {"worst error": sharded.check(*program.args).worst}
        sharded.verify(*program.args)
        yield {"verify": "equal"}
    except MeshDSLError as error:
        print(error, file=sys.stderr)
        yield {"error": str(error)}


def _bytes(sharded: Sharded, program: Program) -> float:
    return bytes_sent(sharded.lower(*program.args).compile().as_text(), MESH)
