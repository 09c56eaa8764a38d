"""Measure the planner, and write docs/planner.md with its pictures.

python -m bench.planner.run [part ...]

Parts: gaps, check, peers, steps, equations, axes, sizes, overlap. What was measured is kept in .cache/planner, a file
per part; of parts that were not measured in this checkout, the page keeps what it says. Seconds are those of the
processor, tracing not counted, in a process that has planned something before; memory is not limited. Steps are timed
by the clock: nothing else should run meanwhile.
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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    CACHE.mkdir(parents=True, exist_ok=True)
    for part in () if asked.page else asked.parts or PARTS:
        plan_on(traced_step("mlp"), MESHES[1])
        rows: list[Row] = []
        for row in PARTS[part]():
            print(part, row, flush=True)
            rows.append(row)
            (CACHE / f"{part}.json").write_text(json.dumps(rows))
    write({part: _kept(part) for part in PARTS}, versions())


def _kept(part: str) -> list[Row]:
    file = CACHE / f"{part}.json"
    return json.loads(file.read_text()) if file.exists() else []


def gaps() -> Iterator[Row]:
    """Every family on every mesh."""
    for name in FAMILIES:
        for mesh in MESHES:
            yield {"name": name, "mesh": mesh, **_facts(plan_on(traced_step(name), mesh))}


def check() -> Iterator[Row]:
    """Every family on one axis, against HiGHS on the whole problem, 60 s each."""
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
    """Ours and theirs, predicted time and bytes, on one and two axes."""
    for name in FAMILIES:
        for mesh in MESHES[:2]:
            plan = plan_on(traced_step(name), mesh)
            row: Row = {"name": name, "mesh": mesh, "ours": [plan.cost, bytes_sent_by(plan, plan.choice)]}
            for peer, choose in PEERS.items():
                found = choose(plan.model)
                row[peer] = [plan.model.scale.seconds(found.cost), bytes_sent_by(plan, found)]
            yield row


def equations() -> Iterator[Row]:
    """GPTs of more and more layers, unrolled, on two axes."""
    for layers in LAYERS:
        program, stated = unrolled_gpt(layers)
        plan = plan_on(program, "data=8,model=8", None, layouts=stated.layouts)
        yield {"layers": layers, **_facts(plan)}


def axes() -> Iterator[Row]:
    """One to five axes of two devices."""
    for count in range(1, 6):
        mesh = ",".join(["data=2", *(f"a{i}=2" for i in range(1, count))])
        yield {"axes": count, "name": "mlp", **_facts(plan_on(traced_step("mlp"), mesh))}
        yield {"axes": count, "name": "gpt2-124m", **_facts(plan_on(traced_step("gpt2-124m"), mesh))}


def sizes() -> Iterator[Row]:
    """Two axes of more and more devices, 2 to 4,096."""
    program = traced_step("llama3-8b", batch=8192)
    for data in (2, 8, 64, 512, 4096):
        for model in (2, 32, 4096):
            yield {"data": data, "model": model, **_facts(plan_on(program, f"data={data},model={model}"))}


def overlap() -> Iterator[Row]:
    """Every family on one and two axes: the plan of least seconds, and the one chosen by the time with overlap."""
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
    """Bytes per device and step."""
    peak = PeakCache(Evaluator(plan.model), plan.pins.donated).peak(choice)
    solution = solution_of(plan.model, plan.pins, choice, peak)
    return build_plan(plan.model.problem.program, solution, plan.pins).bytes


PARTS = {f.__name__: f for f in (gaps, check, peers, steps, equations, axes, sizes, overlap)}

if __name__ == "__main__":
    main()
