"""Measures the planner and writes docs/evidence/planner.md with its pictures.

python -m bench.planner.run [part ...]

Parts: gaps, check, peers, steps, equations, axes, sizes, overlap. Results are cached in .cache/planner, one file per
part; the page preserves its sections for parts that were not measured in this checkout. Planning is measured in
processor seconds without tracing, in a process that has planned before, without a memory limit. Steps are measured in
wall seconds, so the machine should be otherwise idle.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from bench.planner.cases import (
    FAMILIES,
    MESHES,
    RULES,
    TOPOLOGY,
    PlannedStep,
    plan_on,
    program_of,
    traced_step,
    unrolled_gpt,
)
from bench.planner.page import write
from bench.planner.steps import PEERS, steps
from bench.report import versions
from meshdsl.api import parallelize
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.build import build_plan
from meshdsl.planner.memory.fit import PeakCache
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.solve import solution_of
from tests.planner.integer import Whole

Row = dict[str, Any]
CACHE = Path(".cache/planner")
LAYERS = (1, 2, 4, 8, 16, 32, 64, 128)


def main() -> None:
    """Measures the selected parts and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--page", action="store_true", help="only rewrite the page")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    CACHE.mkdir(parents=True, exist_ok=True)
    for part in () if options.page else options.parts or PARTS:
        plan_on(traced_step("mlp"), MESHES[1])
        rows: list[Row] = []
        for row in PARTS[part]():
            print(part, row, flush=True)
            rows.append(row)
            (CACHE / f"{part}.json").write_text(json.dumps(rows))
    write({part: _cached(part) for part in PARTS}, versions())


def _cached(part: str) -> list[Row]:
    file = CACHE / f"{part}.json"
    return json.loads(file.read_text()) if file.exists() else []


def gaps() -> Iterator[Row]:
    """Plans every family on every mesh."""
    for name in FAMILIES:
        for mesh in MESHES:
            yield {"name": name, "mesh": mesh, **_facts(plan_on(traced_step(name), mesh))}


def check() -> Iterator[Row]:
    """Solves the whole problem with HiGHS, 60 s each, for every family on one axis."""
    for name in FAMILIES:
        plan = plan_on(traced_step(name), MESHES[0])
        start = time.process_time()
        try:
            cost, bound = Whole(plan.model, plan.choice.cost / 1e6).solve(60)
            found = {"cost": cost / plan.choice.cost, "bound": bound / plan.choice.cost}
        except AssertionError:
            found = {}
        yield {"name": name, "nodes": len(plan.model.nodes), "seconds": time.process_time() - start, **found}


def peers() -> Iterator[Row]:
    """Compares predicted time and bytes with other methods, on one and two axes."""
    for name in FAMILIES:
        for mesh in MESHES[:2]:
            plan = plan_on(traced_step(name), mesh)
            row: Row = {"name": name, "mesh": mesh, "ours": [plan.cost, bytes_sent_by(plan, plan.choice)]}
            for peer, choose in PEERS.items():
                found = choose(plan.model)
                row[peer] = [plan.model.scale.seconds(found.cost), bytes_sent_by(plan, found)]
            yield row


def equations() -> Iterator[Row]:
    """Plans unrolled GPTs of increasing depth on two axes."""
    for layers in LAYERS:
        traced, program = unrolled_gpt(layers)
        plan = plan_on(traced, "data=8,model=8", None, layouts=program.layouts)
        yield {"layers": layers, **_facts(plan)}


def axes() -> Iterator[Row]:
    """Plans on one to five axes of two devices each."""
    for count in range(1, 6):
        mesh = ",".join(["data=2", *(f"a{i}=2" for i in range(1, count))])
        yield {"axes": count, "name": "mlp", **_facts(plan_on(traced_step("mlp"), mesh))}
        yield {"axes": count, "name": "gpt2-124m", **_facts(plan_on(traced_step("gpt2-124m"), mesh))}


def sizes() -> Iterator[Row]:
    """Plans on two axes of 2 to 4,096 devices each."""
    program = traced_step("llama3-8b", batch=8192)
    for data in (2, 8, 64, 512, 4096):
        for model in (2, 32, 4096):
            yield {"data": data, "model": model, **_facts(plan_on(program, f"data={data},model={model}"))}


def overlap() -> Iterator[Row]:
    """Plans every family on one and two axes, minimising sequential time and simulated time with overlap."""
    for name in FAMILIES:
        for mesh in MESHES[:2]:
            program, row = program_of(name), {"name": name, "mesh": mesh}
            for how in (False, True):
                over = Mesh.parse(mesh, TOPOLOGY)
                sharded = parallelize(program.step, over, rules=RULES, memory="1000TB", overlap=how)
                start = time.process_time()
                plan = sharded.plan(*program.args)
                took = time.process_time() - start
                row["with" if how else "without"] = [plan.seconds, plan.simulated_seconds, plan.bytes, took]
            yield row


def _facts(plan: PlannedStep) -> Row:
    return {"equations": plan.equations, "cost": plan.cost, "gap": plan.gap, "seconds": plan.seconds}


def bytes_sent_by(plan: PlannedStep, choice: CostedPlan) -> float:
    """Returns bytes that one device sends per step under a plan."""
    peak = PeakCache(Evaluator(plan.model), plan.pins.donated).peak(choice)
    solution = solution_of(plan.model, plan.pins, choice, peak)
    return build_plan(plan.model.problem.program, solution, plan.pins).bytes


PARTS = {f.__name__: f for f in (gaps, check, peers, steps, equations, axes, sizes, overlap)}

if __name__ == "__main__":
    main()
