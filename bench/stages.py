"""What stages of a pipeline keep within memory limits: by the planner's choice, and by ``recompute=``.

python -m bench.stages [MODEL ...] [--again]

Models at the sizes of their papers in bfloat16, without ``jax.checkpoint``, on H100s, ``1f1b``. Writes a section
of docs/evidence/pipelines.md; results are cached in .cache/stages.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.pipeline_page import write
from bench.report import table, versions
from meshdsl.api import Program, parallelize
from meshdsl.errors import MemoryLimitError
from meshdsl.layouts.mesh import Mesh
from meshdsl.models import gpt, llama
from meshdsl.schedules.spec import Pipeline
from meshdsl.util.text import bytes_text, percent_text, seconds_text

CACHE = Path(".cache/stages")
RULES = "batch:data heads:model hidden:model layers:pipe"
UNLIMITED = 1e15
WAYS = {"stage": ("stage", "off"), "none": ("none", "off"), "auto": ("stage", "auto")}  # recompute=, remat=


class Case(NamedTuple):
    """A model on a mesh, and the gigabytes within which it is planned."""

    program: Program
    mesh: Mesh
    microbatches: int
    limits: tuple[float, ...]


def case(name: str) -> Case:
    """Returns a case by the name of its model."""
    if name == "gpt3-175b":
        config = replace(gpt.CONFIGS[name], remat="none", dtype="bfloat16")
        return Case(gpt.program(config, RULES, 64), Mesh.parse("pipe=8,data=1,model=8", "dgx-h100"), 32, (80, 70, 60))
    config = replace(llama.CONFIGS[name], remat="none", dtype="bfloat16")
    return Case(llama.program(config, RULES, 64), Mesh.parse("pipe=4,data=2,model=8", "dgx-h100"), 16, (80,))


def main() -> None:
    """Plans the cases that are not cached, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", default=["gpt3-175b", "llama3-70b"])
    parser.add_argument("--again", action="store_true", help="plan what is cached as well")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    rows = [row for name in options.models for row in _rows(name, options.again)]
    header = ["model", "mesh", "limit", *(f"`{way}`" for way in WAYS), *(f"`{way}`, peak" for way in WAYS)]
    write({"kept": f"{table([*header, 'gap', 'planning'], rows)}\n\n{versions()}"})


def _rows(name: str, again: bool) -> Iterator[list[str]]:
    file = CACHE / f"{name}.json"
    facts: dict[str, Any] = json.loads(file.read_text()) if file.exists() and not again else {}
    given = case(name)
    for limit in (UNLIMITED, *(1e9 * n for n in given.limits)):
        for way in WAYS:
            if f"{way} {limit}" not in facts:
                facts[f"{way} {limit}"] = found = _planned(given, limit, *WAYS[way])
                file.write_text(json.dumps(facts))
                print(name, way, limit, found, flush=True)
        plans = [facts[f"{way} {limit}"] for way in WAYS]
        seconds = [seconds_text(plan["seconds"]) if plan["memory"] else "does not fit" for plan in plans]
        memory = [bytes_text(plan["memory"]) if plan["memory"] else "" for plan in plans]
        limited = "unlimited" if limit == UNLIMITED else bytes_text(round(limit))
        last = percent_text(plans[-1]["gap"]), f"{plans[-1]['planning']:.0f} s"
        yield [name, str(given.mesh), limited, *seconds, *memory, *last]


def _planned(given: Case, limit: float, recompute: str, remat: str) -> dict[str, float]:
    sharded = parallelize(
        given.program.step,
        given.mesh,
        given.program.layouts,
        rules=given.program.rules,
        memory=limit,
        remat=remat,
        pipeline=Pipeline(given.microbatches, recompute=recompute),
        donate_argnums=(0, 1),
    )
    start = time.process_time()
    try:
        plan = sharded.plan(*given.program.args)
        found = {"seconds": plan.seconds, "memory": plan.memory, "gap": plan.gap}
    except MemoryLimitError:
        found = {"seconds": 0.0, "memory": 0, "gap": 0.0}
    return found | {"planning": time.process_time() - start}


if __name__ == "__main__":
    main()
